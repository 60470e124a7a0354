#!/usr/bin/env python3
"""Stage 4: trained weights -> GGUF.

    tools/demo_model/export.py --weights trained --data demo_data --out demo.gguf [--quant demo] [--kind moe]

--quant: `demo` is the mix that ships (experts Q5_1, other matrices Q8_0); else one type for all matrices, e.g. f32,
f16, q8_0, q5_0, q4_0; matrices whose rows a type's blocks do not divide are Q8_0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # run as a script
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from rimuru.formats.quants import BY_NAME, QuantFormat
from rimuru.formats.quants_encode import quantize
from rimuru.formats.writer import KeyValue, TensorData, write_gguf

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{ message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
NORMAL, CONTROL = 1, 3
FLOAT_PARTS = ("norm", "ssm_conv1d", "ssm_dt", "ssm_a", "ffn_gate_inp", "ffn_gate_inp_shexp")
"""Stored as F32, as converters do."""
MIX = {"experts": "q5_1", "others": "q8_0"}


def read_weights(folder: Path, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(float32 tensors by GGUF name, what losses-KIND.json says)."""
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob(f"{kind}-*.npz")):
        with np.load(path) as stored:
            tensors |= {name: stored[name].astype(np.float32) for name in stored.files}
    return tensors, json.loads((folder / f"losses-{kind}.json").read_text())


def gguf_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As they are stored: `ssm_a` is -exp of its logarithm."""
    return {name: -np.exp(values) if name.endswith("ssm_a") else values for name, values in weights.items()}


def format_of(name: str, width: int, quant: str) -> QuantFormat:
    """The type of a tensor with rows of `width` values."""
    parts = name.split(".")
    if len(parts) < 2 or any(part in FLOAT_PARTS or part.endswith("_norm") for part in parts[-2:]):
        return BY_NAME["f32"]
    wanted = quant if quant != "demo" else MIX["experts" if "_exps" in name else "others"]
    fmt = BY_NAME[wanted]
    return fmt if width % fmt.block_elements == 0 else BY_NAME["q8_0"]


def metadata(shape: dict[str, Any], name: str) -> list[KeyValue]:
    """The keys of qwen35moe, or of qwen35 where there are no experts."""
    arch = "qwen35moe" if shape["n_experts"] else "qwen35"
    pairs = shape["n_rot"] // 2
    third = pairs // 3
    dense_width = shape["top_k"] * shape["expert_width"] + shape["shared_width"]
    keys: list[KeyValue] = [
        ("block_count", "u32", shape["n_layers"]),
        ("context_length", "u32", shape["context"]),
        ("embedding_length", "u32", shape["width"]),
        ("feed_forward_length", "u32", dense_width),
        ("attention.head_count", "u32", shape["n_head"]),
        ("attention.head_count_kv", "u32", shape["n_head_kv"]),
        ("attention.key_length", "u32", shape["head_dim"]),
        ("attention.value_length", "u32", shape["head_dim"]),
        ("attention.layer_norm_rms_epsilon", "f32", shape["eps"]),
        ("rope.freq_base", "f32", shape["rope_base"]),
        ("rope.dimension_count", "u32", shape["n_rot"]),
        ("rope.dimension_sections", "arr", ("i32", [pairs - 2 * third, third, third, 0])),
        ("full_attention_interval", "u32", shape["attention_interval"]),
        ("ssm.conv_kernel", "u32", shape["conv_kernel"]),
        ("ssm.state_size", "u32", shape["state_dim"]),
        ("ssm.group_count", "u32", shape["n_key_heads"]),
        ("ssm.time_step_rank", "u32", shape["n_value_heads"]),
        ("ssm.inner_size", "u32", shape["n_value_heads"] * shape["state_dim"]),
    ]
    if shape["n_experts"]:
        keys += [
            ("expert_count", "u32", shape["n_experts"]),
            ("expert_used_count", "u32", shape["top_k"]),
            ("expert_feed_forward_length", "u32", shape["expert_width"]),
            ("expert_shared_feed_forward_length", "u32", shape["shared_width"]),
        ]
    general: list[KeyValue] = [
        ("general.architecture", "str", arch),
        ("general.type", "str", "model"),
        ("general.name", "str", name),
        ("general.license", "str", "mit"),
        ("general.description", "str", "Tells short stories in simple English. Made to show and to test Rimuru."),
        ("general.languages", "arr", ("str", ["en"])),
        ("general.quantization_version", "u32", 2),
    ]
    return general + [(f"{arch}.{key}", kind, value) for key, kind, value in keys]


def tokenizer_keys(path: Path) -> list[KeyValue]:
    """The keys of a tokenizer that prepare.py wrote."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in stored["added_tokens"]}
    ids = dict(stored["model"]["vocab"]) | special
    texts = sorted(ids, key=lambda text: ids[text])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in stored["model"]["merges"]]
    return [
        ("tokenizer.ggml.model", "str", "gpt2"),
        ("tokenizer.ggml.pre", "str", "gpt-2"),
        ("tokenizer.ggml.tokens", "arr", ("str", texts)),
        ("tokenizer.ggml.token_type", "arr", ("i32", [CONTROL if text in special else NORMAL for text in texts])),
        ("tokenizer.ggml.merges", "arr", ("str", merges)),
        ("tokenizer.ggml.eos_token_id", "u32", special["<|endoftext|>"]),
        ("tokenizer.ggml.eot_token_id", "u32", special["<|im_end|>"]),
        ("tokenizer.ggml.padding_token_id", "u32", special["<|endoftext|>"]),
        ("tokenizer.ggml.add_bos_token", "bool", False),
        ("tokenizer.chat_template", "str", CHAT_TEMPLATE),
    ]


def export(
    weights: dict[str, np.ndarray], shape: dict[str, Any], tokenizer: Path, out: Path, quant: str, name: str
) -> None:
    """Write a GGUF file. weights: float32 in row-major shapes, as trained; shape: the fields of DemoShape."""
    tensors: list[TensorData] = []
    for tensor, values in gguf_tensors(weights).items():
        fmt = format_of(tensor, values.shape[-1], quant)
        tensors.append((tensor, values.shape[::-1], fmt, quantize(values, fmt).reshape(-1)))
    write_gguf(out, metadata(shape, name) + tokenizer_keys(tokenizer), tensors)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="what train.py wrote")
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quant", default="demo", choices=["demo", *sorted(BY_NAME)])
    parser.add_argument("--kind", default="moe", choices=["moe", "dense"])
    options = parser.parse_args(arguments)
    weights, about = read_weights(options.weights, options.kind)
    name = "Rimuru demo" if options.kind == "moe" else "Rimuru demo, dense"
    export(weights, about["shape"], options.data / "tokenizer.json", options.out, options.quant, name)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
