#!/usr/bin/env python3
"""Writes a small GGUF model with random weights, a small tokenizer and a chat template.

    python tools/make_random_gguf.py OUT.gguf [--arch qwen3moe] [--quant q4_k_m] [--seed 0] [--set KEY=VALUE ...]

Its answers are noise, but everything a real file has is there: for tests, for trying the commands, for measuring.
--quant is one type for all matrices, a mix (q4_k_m, q5_k_m, mxfp4_moe), or `mixed`: another type for every matrix.
--set changes a metadata key, without the architecture's prefix, e.g. --set block_count=8 --set expert_count=32.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.arch.quant_mix import quantisations
from rimuru.arch.registry import runnable_architectures
from rimuru.arch.shape_data import ModelShape
from rimuru.arch.shapes import describe
from rimuru.formats.quants import ENGINE_FORMATS, QuantFormat
from rimuru.formats.quants_encode import quantize
from rimuru.formats.writer import KeyValue, write_gguf
from rimuru.text.byte_bpe import BYTE_TO_CHARACTER

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
SAMPLE_TEXT = """The pool is one range of addresses. When many requests run, it lends pages to their states; when few
run, it lends them to experts. Nothing has a fixed share. A page that is free today was an expert yesterday, and the
expert that was read from the disk a moment ago may be the first one to leave again. The quick brown fox jumps over the
lazy dog, and then it rests for a while in the sun. There are more things in the world than any of us will ever see."""
N_MERGES = 160
_TYPE_NAMES = {bool: "bool", int: "u32", float: "f32", str: "str"}


def write_random_model(
    path: str | Path, arch: str = "qwen3moe", quant: str = "q4_k_m", seed: int = 0, tokenizer: bool = True, **keys: Any
) -> Path:
    """Write a random model and return its path.

    keys: metadata without the architecture's prefix, with `__` for a dot; None removes a default. `n_vocab` is the
    vocabulary where `tokenizer` is False (default 160). The same arguments give the same file.
    """
    texts, types, merges = _vocabulary()
    n_vocab = len(texts) if tokenizer else int(keys.pop("n_vocab", 160))
    shape = _shape(arch, n_vocab, {key.replace("__", "."): value for key, value in keys.items()})
    gguf, _ = describe(shape, "f32" if quant == "mixed" else quant, f"random {arch}")
    kv: list[KeyValue] = [("general.architecture", "str", arch), ("general.name", "str", f"random {arch}")]
    kv += [_key_value(key, value) for key, value in shape.metadata().items()]
    if tokenizer:
        kv += _tokenizer_keys(texts, types, merges)
    else:
        kv.append(("tokenizer.ggml.model", "str", "none"))
    tensors = []
    for info in gguf.tensors.values():
        fmt = _mixed_format(info.name, info.shape, info.format) if quant == "mixed" else info.format
        values = _values(info.name, info.shape, seed)
        tensors.append((info.name, info.shape, fmt, quantize(values, fmt).reshape(-1)))
    write_gguf(path, kv, tensors)
    return Path(path)


def _shape(arch: str, n_vocab: int, changes: dict[str, Any]) -> ModelShape:
    """A model of a few MB: rows of 256, which every type's blocks divide."""
    keys: dict[str, Any] = {
        "block_count": 4, "context_length": 2048, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
        "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
    }  # fmt: skip
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
    if arch in ("qwen2moe", "qwen3moe", "olmoe"):
        keys |= experts
    if arch == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = 256
    if arch == "olmoe":  # its experts are feed_forward_length wide, and every head has its own keys
        keys |= {"feed_forward_length": 256, "attention.head_count_kv": 4}
    keys = {key: value for key, value in (keys | changes).items() if value is not None}
    return ModelShape(arch, n_vocab, keys)


def _key_value(key: str, value: Any) -> KeyValue:
    if isinstance(value, list):
        element = _TYPE_NAMES[type(value[0])].replace("u32", "i32")
        return key, "arr", (element, value)
    return key, _TYPE_NAMES[type(value)], value


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values, numpy order; each tensor has its own stream, so one tensor does not depend on the others."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape[::-1], dtype=np.float32)
    if name.endswith("_norm.weight"):
        return 1 + 0.1 * values
    if name.endswith(".bias"):
        return 0.1 * values
    # The embedding's rows are not scaled: a residual stream of size one, as after training.
    return values if name == "token_embd.weight" else values * np.float32(1.2 / shape[0] ** 0.5)


def _mixed_format(name: str, shape: tuple[int, ...], plain: QuantFormat) -> QuantFormat:
    if len(shape) < 2 or name.endswith("ffn_gate_inp.weight"):
        return plain
    fitting = [fmt for fmt in ENGINE_FORMATS if shape[0] % fmt.block_elements == 0]
    return fitting[zlib.crc32(name.encode()) % len(fitting)]


# ---------------------------------------------------------------- tokenizer
def _vocabulary() -> tuple[list[str], list[int], list[str]]:
    """(token texts, token types, merge lines) of a byte-level BPE trained on SAMPLE_TEXT."""
    merges = _train_merges(SAMPLE_TEXT, N_MERGES)
    texts = list(BYTE_TO_CHARACTER) + [left + right for left, right in merges]
    normal, control = 1, 3
    types = [normal] * len(texts) + [control] * len(SPECIAL_TOKENS)
    return texts + list(SPECIAL_TOKENS), types, [f"{left} {right}" for left, right in merges]


def _train_merges(text: str, n_merges: int) -> list[tuple[str, str]]:
    """The most frequent pair first, ties by text; words keep their leading space, as the pre-tokenizer cuts them."""
    cut = Counter(" " + word for word in text.split())
    words = {tuple(BYTE_TO_CHARACTER[byte] for byte in word.encode()): n for word, n in cut.items()}
    merges: list[tuple[str, str]] = []
    while len(merges) < n_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {_merged(word, best): n for word, n in words.items()}
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    found: list[str] = []
    for part in word:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return tuple(found)


def _tokenizer_keys(texts: list[str], types: list[int], merges: list[str]) -> list[KeyValue]:
    ids = {text: index for index, text in enumerate(texts)}
    return [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "qwen2"),
        ("tokenizer.ggml.tokens", "arr", ("str", texts)),
        ("tokenizer.ggml.token_type", "arr", ("i32", types)),
        ("tokenizer.ggml.merges", "arr", ("str", merges)),
        ("tokenizer.ggml.bos_token_id", "u32", ids["<|endoftext|>"]),
        ("tokenizer.ggml.eos_token_id", "u32", ids["<|im_end|>"]),
        ("tokenizer.ggml.padding_token_id", "u32", ids["<|endoftext|>"]),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "str", CHAT_TEMPLATE),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--arch", default="qwen3moe", choices=runnable_architectures())
    parser.add_argument("--quant", default="q4_k_m", choices=(*quantisations(), "mixed"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-tokenizer", action="store_true", help="token ids only")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a metadata key")
    args = parser.parse_args()
    changes = {}
    for setting in args.set:
        key, _, value = setting.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError:
            sys.exit(f"--set {setting}: write KEY=VALUE with a number, true, false, null or a list as VALUE")
    write_random_model(args.output, args.arch, args.quant, args.seed, not args.no_tokenizer, **changes)
    print(f"{args.output}: {args.arch}, {args.quant}, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
