"""Small vocabularies built by hand, for tests of everything that needs a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rimuru.formats.writer import KeyValue, write_gguf
from rimuru.text.byte_bpe import BYTE_TO_CHARACTER
from rimuru.text.tokenizer import Tokenizer

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "é ¬", "1 2")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM_PIECES = ("▁", "▁a", "ab", "▁ab", "b", "a", "c", "abc", "▁abc", "▁▁", "▁▁▁▁", "bc", "é", ".", "▁c", "<", ">", "s")
SPM_SCORES = tuple(-float(i % 7) for i in range(len(SPM_PIECES)))


def write_vocab(
    path: Path,
    model: str,
    tokens: Sequence[str],
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = None,
    scores: Sequence[float] | None = None,
    pre: str | None = None,
    keys: Mapping[str, object] | None = None,
) -> Path:
    """Write a GGUF that holds only a vocabulary. keys: more metadata (int as u32, bool, str)."""
    kv: list[KeyValue] = [
        ("general.architecture", "str", "llama"),
        ("tokenizer.ggml.model", "str", model),
        ("tokenizer.ggml.tokens", "arr", ("str", list(tokens))),
    ]
    for name, kind, values in (("token_type", "i32", types), ("merges", "str", merges), ("scores", "f32", scores)):
        if values is not None:
            kv.append((f"tokenizer.ggml.{name}", "arr", (kind, list(values))))
    if pre is not None:
        kv.append(("tokenizer.ggml.pre", "str", pre))
    names = {bool: "bool", int: "u32", str: "str"}
    kv += [(key, names[type(value)], value) for key, value in (keys or {}).items()]
    write_gguf(path, kv, [])
    return path


def byte_level(
    folder: Path,
    merges: Sequence[str] = MERGES,
    specials: Sequence[str] = CHATML,
    special_type: int = 3,
    pre: str | None = "qwen2",
    drop: Sequence[str] = (),
    **keys: object,
) -> Tokenizer:
    """Byte-level BPE: all bytes, the merges' results (without those in `drop`), the special tokens.

    keys: `tokenizer.ggml.` metadata by the rest of the name; bos_token_id is the first special token, eos the last.
    """
    texts = dict.fromkeys([*BYTE_TO_CHARACTER, *("".join(pair) for pair in (m.split(" ", 1) for m in merges))])
    normal = [text for text in texts if text not in drop]
    types = [1] * len(normal) + [special_type] * len(specials)
    ends = {"bos_token_id": len(normal), "eos_token_id": len(types) - 1} if specials else {}
    named = {_key(name): value for name, value in {**ends, **keys}.items() if value is not None}
    path = folder / "byte_level.gguf"
    return Tokenizer.from_gguf(
        write_vocab(path, "gpt2", [*normal, *specials], types, list(merges), pre=pre, keys=named)
    )


def spm(
    folder: Path, extra: Sequence[str] = (), extra_type: int = 4, with_bytes: bool = True, **keys: object
) -> Tokenizer:
    """SentencePiece: <unk>, <s>, </s>, the byte tokens, SPM_PIECES, then `extra` of one type."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *SPM_PIECES, *extra]
    types = [2, 3, 3] + [6] * len(byte_tokens) + [1] * len(SPM_PIECES) + [extra_type] * len(extra)
    scores = [0.0] * (3 + len(byte_tokens)) + [*SPM_SCORES] + [0.0] * len(extra)
    named = {_key(name): value for name, value in keys.items()}
    return Tokenizer.from_gguf(write_vocab(folder / "spm.gguf", "llama", tokens, types, scores=scores, keys=named))


def _key(name: str) -> str:
    return name.replace("__", ".") if "__" in name or name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
