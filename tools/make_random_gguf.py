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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script
from rimuru.arch.quant_mix import quantisations
from rimuru.arch.registry import runnable_architectures
from rimuru.arch.shape_data import ModelShape
from rimuru.arch.shapes import describe
from rimuru.arch.spec import ModelConfig
from rimuru.formats.gguf import TensorInfo
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS, QuantFormat
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
    gguf, config = describe(shape, "f32" if quant == "mixed" else quant, f"random {arch}")
    kv: list[KeyValue] = [("general.architecture", "str", arch), ("general.name", "str", f"random {arch}")]
    kv += [_key_value(key, value) for key, value in shape.metadata().items()]
    if tokenizer:
        kv += _tokenizer_keys(texts, types, merges)
    else:
        kv.append(("tokenizer.ggml.model", "str", "none"))
    tensors = []
    for info in _with_both_factors(dict(gguf.tensors)):
        fmt = _mixed_format(info.name, info.shape, info.format) if quant == "mixed" else info.format
        values = _values(info.name, info.shape, seed)
        if info.name == "token_embd.weight":
            values *= np.float32(_embedding_factor(config))
        if fmt.name == "nvfp4" and info.name != "token_embd.weight":
            values, factors = _with_factors(info.name, values)
            name = info.name.removesuffix(".weight") + ".scale"
            tensors.append((name, factors.shape, BY_NAME["f32"], factors.view(np.uint8)))
        tensors.append((info.name, info.shape, fmt, quantize(values, fmt).reshape(-1)))
    write_gguf(path, kv, tensors)
    return Path(path)


_BASE: dict[str, Any] = {
    "block_count": 4, "context_length": 2048, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
    "attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
}  # fmt: skip
"""A model of a few MB: rows of 256, which every type's blocks divide."""
_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
_EXPERTS_AS_FFN = _EXPERTS | {"feed_forward_length": 256}
"""Where experts are feed_forward_length wide."""
_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
_SHARED = {"expert_shared_count": 1, "leading_dense_block_count": 1}
_GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
_DELTA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256,
    "rope.dimension_count": 32, "rope.dimension_sections": [6, 5, 5, 0],
}  # fmt: skip
_MAMBA2 = {
    "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 8, "ssm.inner_size": 512,
}  # fmt: skip
_MAMBA1 = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 512}
_ONE_ATTENTION = {"attention.head_count_kv": [0, 0, 2, 0]}
_SCALES = {"embedding_scale": 1.5, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 2.0}
_NEMOTRON = _MAMBA2 | _ONE_ATTENTION | {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": [0, 512, 0, 512]}
_LFM2 = {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}
_LATENT = {
    "attention.head_count_kv": 1, "attention.key_length": 160, "attention.value_length": 128,
    "attention.kv_lora_rank": 128, "attention.q_lora_rank": 128, "attention.key_length_mla": 96,
    "attention.value_length_mla": 64, "rope.dimension_count": 32, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 256, "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 256}
_LONGROPE = {"rope.scaling.original_context_length": 1024, "rope.scaling.attn_factor": 1.2}

KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2moe": _EXPERTS | {"expert_shared_feed_forward_length": 256},
    "qwen3moe": _EXPERTS,
    "olmoe": _EXPERTS_AS_FFN | {"attention.head_count_kv": 4},
    "qwen3next": _EXPERTS | _DELTA | {"expert_shared_feed_forward_length": 256},
    "qwen35": _DELTA,
    "qwen35moe": _EXPERTS | _DELTA | {"expert_shared_feed_forward_length": 256},
    "granite": _SCALES,
    "granitemoe": _EXPERTS_AS_FFN | _SCALES | {"expert_shared_feed_forward_length": 256},
    "granitehybrid": _EXPERTS_AS_FFN | _SCALES | _MAMBA2 | _ONE_ATTENTION | {"rope.scaling.finetuned": False},
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON | _EXPERTS | _SIGMOID | {"expert_shared_feed_forward_length": 256},
    "jamba": _EXPERTS_AS_FFN | _MAMBA1 | _ONE_ATTENTION,
    "deepseek2": _LATENT | _EXPERTS | _SIGMOID | _SHARED | _GROUPS,
    "gpt-oss": _EXPERTS | _YARN | {"attention.sliding_window": 32},
    "glm4moe": _EXPERTS | _SIGMOID | _SHARED | {"rope.dimension_count": 32},
    "lfm2": _LFM2,
    "lfm2moe": _LFM2 | _EXPERTS | {"leading_dense_block_count": 1, "expert_gating_func": 2},
    "bailingmoe2": _EXPERTS | _SIGMOID | _SHARED | _GROUPS | {"rope.dimension_count": 32},
    "minimax-m2": _EXPERTS_AS_FFN | {"expert_gating_func": 2, "rope.dimension_count": 32},
    "hunyuan-moe": _EXPERTS_AS_FFN | {"expert_shared_feed_forward_length": 256},
    "dots1": _EXPERTS | _SIGMOID | _SHARED | {"attention.head_count_kv": 4},
    "ernie4_5-moe": _EXPERTS | {"leading_dense_block_count": 1, "interleave_moe_layer_step": 2}
    | {"expert_shared_feed_forward_length": 256},
    "gemma3": {"attention.sliding_window": 32, "attention.sliding_window_pattern": 2, "rope.scaling.factor": 8.0},
    "phi3": _LONGROPE,
}  # fmt: skip
"""What the metadata of an architecture has beside or in place of _BASE."""

_QKV_BIAS = tuple(f"blk.*.attn_{part}.bias" for part in "qkv")
OPTIONAL: dict[str, tuple[str, ...]] = {
    "qwen2": _QKV_BIAS,
    "jamba": ("blk.1.ffn_gate_inp.weight", "blk.3.ffn_gate_inp.weight"),
    "deepseek2": tuple(f"blk.{i}.exp_probs_b.bias" for i in (1, 2, 3)),
    "glm4moe": (*_QKV_BIAS, "blk.*.attn_q_norm.weight", "blk.*.attn_k_norm.weight"),
    "bailingmoe2": tuple(f"blk.{i}.exp_probs_b.bias" for i in (1, 2, 3)),
    "ernie4_5-moe": ("blk.1.exp_probs_b.bias",),
    "phi3": ("rope_factors_long.weight", "rope_factors_short.weight"),
}
"""Tensors that files of an architecture may have, and these do; `*` stands for the block number."""
_TIED = ("gemma3", "lfm2", "lfm2moe", "granitehybrid")


def _shape(arch: str, n_vocab: int, changes: dict[str, Any]) -> ModelShape:
    keys = {key: value for key, value in (_BASE | KEYS[arch] | changes).items() if value is not None}
    for key in ("attention.head_count_kv", "feed_forward_length"):  # lists give one period of the blocks
        if isinstance(keys[key], list):
            keys[key] = [keys[key][index % len(keys[key])] for index in range(keys["block_count"])]
    return ModelShape(arch, n_vocab, keys, arch in _TIED, OPTIONAL.get(arch, ()))


def _with_both_factors(tensors: dict[str, TensorInfo]) -> list[TensorInfo]:
    """The tensors, with the rope factors of the other context length: which are used depends on the context."""
    found = list(tensors.values())
    pair = ("rope_factors_long.weight", "rope_factors_short.weight")
    for name, other in (pair, pair[::-1]):
        if name in tensors and other not in tensors:
            found.append(replace(tensors[name], name=other))
    return found


def _key_value(key: str, value: Any) -> KeyValue:
    if isinstance(value, list):
        element = _TYPE_NAMES[type(value[0])].replace("u32", "i32")
        return key, "arr", (element, value)
    return key, _TYPE_NAMES[type(value)], value


def _values(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random values, numpy order; each tensor has its own stream, so one tensor does not depend on the others."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape[::-1], dtype=np.float32)
    if name.endswith(("_norm.weight", "ssm_d")):
        return 1 + 0.1 * values
    if name.startswith("rope_factors"):
        return 1 + np.abs(values)
    if name.endswith("ssm_a"):  # decay rates: states fade over a few to a few hundred tokens
        return -np.exp(values)
    if name.endswith("ssm_dt.bias"):
        return 0.5 * values - 2
    if name.endswith("attn_sinks.weight"):
        return values
    if name.endswith(".bias"):
        return 0.1 * values
    # The embedding's rows are not scaled here: a residual stream of size one, as after training.
    return values if name == "token_embd.weight" else values * np.float32(1.2 / shape[0] ** 0.5)


def _embedding_factor(config: ModelConfig) -> float:
    """What the embedding's values are multiplied with. A head that is the embedding would answer every token with that
    token, whatever the layers do, were they not larger than it in the residual stream."""
    return (config.n_embd**-0.5 if config.tied_head else 1.0) / config.embedding_scale


def _with_factors(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NVFP4: values over factors, and the factors, one of each expert or one of all, so that scales stop at 448."""
    per_expert = name.endswith("_exps.weight")
    parts = values.reshape(len(values) if per_expert else 1, -1)
    factors = np.abs(parts).max(axis=1) / np.float32(448 * 6)
    return (parts / factors[:, None]).reshape(values.shape), factors


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
