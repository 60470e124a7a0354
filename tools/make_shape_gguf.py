#!/usr/bin/env python3
"""Writes a GGUF file of the real size of a published model, with random weights and no tokenizer, in seconds.

    python tools/make_shape_gguf.py gpt-oss-20b OUT.gguf [--quant mxfp4_moe] [--set block_count=2 ...] [--skew 0.35]
    python tools/make_shape_gguf.py deepseek-v2-lite OUT.gguf

For measuring speed and memory; `rimuru inspect` knows the same names. Rows repeat within a tensor (a file of gigabytes
is made of a few megabytes of random numbers), so the answers say nothing. --skew is the spread of the norms of the
routers' rows: 0 routes evenly, 0.35 sends about half of the traffic to a quarter of the experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases.matmul import random_rows  # noqa: E402

from rimuru.arch.quant_mix import quantisations  # noqa: E402
from rimuru.arch.shape_data import SHAPES, ModelShape  # noqa: E402
from rimuru.arch.shapes import describe, shape_names  # noqa: E402
from rimuru.formats.gguf import TensorInfo  # noqa: E402
from rimuru.formats.writer import KeyValue, write_gguf  # noqa: E402

MOST_DRAWN_ROWS = 512
_TYPE_NAMES = {bool: "bool", int: "u32", float: "f32", str: "str"}


def tensor_rows(info: TensorInfo, skew: float) -> np.ndarray:
    """uint8 [n, k, row_bytes]: k random rows, n times over without taking more memory."""
    rng = np.random.default_rng(zlib.crc32(info.name.encode()))
    n_rows = info.n_rows
    if info.format.is_float:
        return float_values(info, skew, rng).view(np.uint8).reshape(1, n_rows, -1)
    drawn = next(k for k in range(min(MOST_DRAWN_ROWS, n_rows), 0, -1) if n_rows % k == 0)
    rows = random_rows(rng, info.format, drawn, info.n_in, std=info.n_in**-0.5).reshape(1, drawn, -1)
    return np.broadcast_to(rows, (n_rows // drawn, *rows.shape[1:]))


def float_values(info: TensorInfo, skew: float, rng: np.random.Generator) -> np.ndarray:
    """The values of norms, biases, routers and matrices of plain numbers, in their type."""
    values = rng.standard_normal((info.n_rows, info.n_in), dtype=np.float32)
    if info.name.endswith("_norm.weight"):
        values = 1 + 0.1 * values
    elif info.name.endswith("ssm_a"):
        values = -np.exp(values)
    elif info.name.endswith("ffn_gate_inp.weight"):
        norms = np.exp(np.float32(skew) * rng.standard_normal((info.n_rows, 1), dtype=np.float32))
        values *= 2 * norms * np.float32(info.n_in**-0.5)
    elif info.n_rows == 1 or info.name.endswith(".bias"):
        values *= np.float32(0.1)
    else:
        values *= np.float32(info.n_in**-0.5)
    if info.format.name == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if info.format.name == "f16" else np.float32)


def key_value(key: str, value: Any) -> KeyValue:
    if isinstance(value, list):
        element = _TYPE_NAMES[type(value[0])].replace("u32", "i32")
        return key, "arr", (element, value)
    return key, _TYPE_NAMES[type(value)], value


def write_shape(path: Path, shape: ModelShape, quant: str, name: str, skew: float = 0.0) -> None:
    """Write the file of a shape. A file without a tokenizer says so: prompts are token ids."""
    gguf, _ = describe(shape, quant, name)
    kv: list[KeyValue] = [
        ("general.architecture", "str", shape.architecture),
        ("general.name", "str", f"random {name}"),
    ]
    kv += [key_value(key, value) for key, value in shape.metadata().items()]
    kv.append((f"{shape.architecture}.vocab_size", "u32", shape.n_vocab))  # no list of tokens tells it
    kv.append(("tokenizer.ggml.model", "str", "none"))
    tensors = [(info.name, info.shape, info.format, tensor_rows(info, skew)) for info in gguf.tensors.values()]
    write_gguf(path, kv, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=shape_names())
    parser.add_argument("output", type=Path)
    parser.add_argument("--quant", choices=quantisations(), help="mxfp4_moe for gpt-oss, else q4_k_m")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a metadata key")
    args = parser.parse_args()
    shape, started = SHAPES[args.shape], time.monotonic()
    changes = {key: json.loads(value) for key, _, value in (setting.partition("=") for setting in args.set)}
    quant = args.quant or ("mxfp4_moe" if shape.architecture == "gpt-oss" else "q4_k_m")
    write_shape(args.output, replace(shape, keys=shape.keys | changes), quant, args.shape, args.skew)
    size, seconds = args.output.stat().st_size, time.monotonic() - started
    print(f"{args.output}: {args.shape}, {quant}, {size / 1e9:.2f} GB in {seconds:.1f} s")


if __name__ == "__main__":
    main()
