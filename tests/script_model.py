"""A model whose answers are written down: its layers add nothing, so the next token depends on the last one only.

The default script: line feed -> A > B > .. > Z > <|im_end|> (so every ChatML request is answered ABC..Z);
a > b > .. > z > <|im_end|>; 0 > 1 > .. > 9 > 0 without end; ! > two halves of 鬱 > a; any other -> A.
`words` make the chat answer a chain of them instead; each word is one token, so a word may stand in it only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rimuru.base.units import align_up
from rimuru.formats.quants import BY_NAME
from rimuru.formats.writer import KeyValue, TensorData, write_gguf
from rimuru.text.byte_bpe import BYTE_TO_CHARACTER

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HALVES = ("é¬", "±")
"""0xE9 0xAC and 0xB1, as byte-level characters: together the UTF-8 of 鬱."""
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HELLO = [{"role": "user", "content": "hello"}]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def write_script_model(
    path: Path,
    words: Sequence[str] = (),
    template: str = CHATML,
    context: int = 512,
    n_layers: int = 2,
    control: Sequence[str] = (),
) -> Path:
    """Write the model and return its path. control: words, or further tokens, that are control tokens."""
    assert len(set(words)) == len(words), "a word may stand in the script only once"
    further = [text for text in control if text not in words]
    tokens = [*BYTE_TO_CHARACTER, HALVES[0], *words, *further, *SPECIALS]
    types = [NORMAL] * 257 + [CONTROL if text in control else USER_DEFINED for text in words]
    types += [CONTROL] * (len(further) + len(SPECIALS))
    ids = {text: i for i, text in enumerate(tokens)}
    width = align_up(len(tokens), 32)
    keys: list[KeyValue] = [
        ("general.architecture", "str", "qwen3moe"),
        ("general.name", "str", "script"),
        *((f"qwen3moe.{name}", kind, value) for name, kind, value in _shape(width, context, n_layers)),
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "qwen2"),
        ("tokenizer.ggml.tokens", "arr", ("str", tokens)),
        ("tokenizer.ggml.token_type", "arr", ("i32", types)),
        ("tokenizer.ggml.merges", "arr", ("str", ["é ¬"])),
        ("tokenizer.ggml.bos_token_id", "u32", ids[SPECIALS[0]]),
        ("tokenizer.ggml.eos_token_id", "u32", ids[SPECIALS[2]]),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "str", template),
    ]
    write_gguf(path, keys, _tensors(_successors(ids, words), width, n_layers))
    return path


def _shape(width: int, context: int, n_layers: int) -> list[tuple[str, str, object]]:
    return [
        ("block_count", "u32", n_layers),
        ("context_length", "u32", context),
        ("embedding_length", "u32", width),
        ("feed_forward_length", "u32", 64),
        ("attention.head_count", "u32", 2),
        ("attention.head_count_kv", "u32", 1),
        ("attention.key_length", "u32", 64),
        ("attention.value_length", "u32", 64),
        ("attention.layer_norm_rms_epsilon", "f32", 1e-6),
        ("rope.freq_base", "f32", 1e6),
        ("expert_count", "u32", 8),
        ("expert_used_count", "u32", 2),
        ("expert_feed_forward_length", "u32", 64),
    ]


def _successors(ids: dict[str, int], words: Sequence[str]) -> np.ndarray:
    """int64 [n_vocab]: the token that follows each token."""
    after = np.full(len(ids), ids["A"])
    end = ids[SPECIALS[2]]
    for first, last in ("AZ", "az"):
        for code in range(ord(first), ord(last)):
            after[ids[chr(code)]] = ids[chr(code + 1)]
        after[ids[last]] = end
    for digit in range(10):
        after[ids[str(digit)]] = ids[str((digit + 1) % 10)]
    for left, right in zip(("!", *HALVES), (*HALVES, "a"), strict=True):
        after[ids[left]] = ids[right]
    line_feed = ids[BYTE_TO_CHARACTER[10]]
    for left, right in zip([line_feed, *(ids[w] for w in words)], [*(ids[w] for w in words), end], strict=True):
        if words:
            after[left] = right
    after[end] = line_feed
    return after


def _tensors(after: np.ndarray, width: int, n_layers: int) -> list[TensorData]:
    rng = np.random.default_rng(5)
    n_vocab = len(after)
    embedding, head = np.zeros((n_vocab, width)), np.zeros((n_vocab, width))
    embedding[np.arange(n_vocab), np.arange(n_vocab)] = 1
    head[after, np.arange(n_vocab)] = 1
    arrays = {"token_embd.weight": embedding, "output_norm.weight": np.ones(width), "output.weight": head}
    for layer in range(n_layers):
        for name, shape in (
            ("attn_q", (128, width)), ("attn_k", (64, width)), ("attn_v", (64, width)),
            ("ffn_gate_inp", (8, width)), ("ffn_gate_exps", (8, 64, width)), ("ffn_up_exps", (8, 64, width)),
        ):  # fmt: skip
            arrays[f"blk.{layer}.{name}.weight"] = rng.normal(0, 0.05, shape)
        for name, shape in (("attn_output", (width, 128)), ("ffn_down_exps", (8, width, 64))):
            arrays[f"blk.{layer}.{name}.weight"] = np.zeros(shape)
        for name, n in (("attn_norm", width), ("ffn_norm", width), ("attn_q_norm", 64), ("attn_k_norm", 64)):
            arrays[f"blk.{layer}.{name}.weight"] = np.ones(n)
    return [
        (name, array.shape[::-1], BY_NAME["f32"], np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8))
        for name, array in arrays.items()
    ]
