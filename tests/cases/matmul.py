"""Cases of `linear`: every tensor type, shapes around the kernels' tiles, and the matrices of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cases.common import Case, Inputs, Outputs, normal
from rimuru.base.units import align_up
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS, QuantFormat
from rimuru.ops.base import Act, Ops

TOLERANCES = {"f32": 1e-4, "f16": 4e-3, "bf16": 4e-3}
"""Of matrices of plain numbers; 8-bit activations cost the other types about 5e-3 of the outputs' size per output."""

QUANTISED_TOLERANCE = 0.04

_SCALE_FIELDS = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
    "iq1_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "tq1_0": (52,),
    "tq2_0": (64,),
}  # fmt: skip
_STEPS = {  # about the root mean square of a weight over the block's scale
    "q4_0": 5, "q4_1": 9, "q5_0": 9, "q5_1": 18, "q8_0": 74, "q2_k": 14, "q3_k": 40, "q4_k": 280, "q5_k": 570,
    "q6_k": 1400, "iq4_nl": 62, "iq4_xs": 1150,
    "iq1_s": 7, "iq1_m": 7, "iq2_xxs": 60, "iq2_xs": 60, "iq2_s": 60, "iq3_xxs": 120, "iq3_s": 160, "tq1_0": 0.8,
    "tq2_0": 1.2,
}  # fmt: skip


def random_rows(rng: np.random.Generator, fmt: QuantFormat, n_rows: int, n_in: int, std: float = 0.05) -> np.ndarray:
    """uint8 [n_rows, row_bytes]: random codes under scales that give weights of about the size `std`."""
    if fmt.is_float:
        values = normal(rng, n_rows, n_in, scale=std)
        if fmt.name == "bf16":
            return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
        return values.astype(np.float16 if fmt.name == "f16" else np.float32).view(np.uint8)
    n_blocks = n_rows * (n_in // fmt.block_elements)
    blocks = np.frombuffer(rng.bytes(n_blocks * fmt.block_bytes), np.uint8).reshape(n_blocks, -1).copy()
    if fmt.name == "mxfp4":
        blocks[:, 0] = rng.integers(119, 123, n_blocks)
    if fmt.name == "nvfp4":
        blocks[:, :4] = rng.integers(0, 0x14, (n_blocks, 4))
    if fmt.name == "iq1_m":  # the scale's nibbles are the upper ones of four words
        scales = (rng.uniform(0.5, 1.5, n_blocks) * std / _STEPS["iq1_m"]).astype(np.float16).view(np.uint16)
        for i in range(4):
            nibble = (scales >> (4 * i) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | nibble << 4
    for offset in _SCALE_FIELDS.get(fmt.name, ()):
        scales = (rng.uniform(0.5, 1.5, n_blocks) * std / _STEPS[fmt.name]).astype(np.float16)
        blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


def filled_act(ops: Ops, values: np.ndarray) -> Act:
    """An activation made by a verb, so that the backend's own form of it is there too."""
    act = ops.act(*values.shape)
    ops.glu(None, ops.upload(values), "identity", act)  # the verb that leaves every form, as experts read them
    return act


def linear_case(
    name: str,
    formats: Sequence[str],
    n_out: Sequence[int],
    n_in: int,
    n_tokens: int,
    *,
    full: bool = False,
    x_scale: float = 1.0,
    x_constant: float | None = None,
    kind: Any = "edge",
    tolerance: float | None = None,
    factors: Sequence[float] | None = None,
) -> Case:
    """Matrices that share an input. full: with biases, adding onto the outputs, scaled by row and as a whole."""
    types = [BY_NAME[f] for f in formats]

    def make_inputs(rng: np.random.Generator) -> Inputs:
        constant = None if x_constant is None else np.full((n_tokens, n_in), x_constant, np.float32)
        return {
            "x": normal(rng, n_tokens, n_in, scale=x_scale) if constant is None else constant,
            "raw": [random_rows(rng, fmt, rows, n_in) for fmt, rows in zip(types, n_out, strict=True)],
            "before": [normal(rng, n_tokens, rows) for rows in n_out],
            "biases": [normal(rng, rows) if i % 2 == 0 else None for i, rows in enumerate(n_out)],
            "row_scale": rng.uniform(0.5, 2, n_tokens).astype(np.float32),
        }

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        weights = [ops.weight(raw, fmt, n_in) for raw, fmt in zip(inputs["raw"], types, strict=True)]
        for weight, factor in zip(weights, factors or [1.0] * len(weights), strict=True):
            weight.factor = factor
        outs = [ops.upload(before.copy()) for before in inputs["before"]]
        x = filled_act(ops, inputs["x"])
        if full:
            biases = [None if b is None else ops.upload(b) for b in inputs["biases"]]
            ops.linear(x, weights, outs, biases, True, 0.5, ops.upload(inputs["row_scale"]))
        else:
            ops.linear(x, weights, outs)
        return {f"out{i}": ops.download(out) for i, out in enumerate(outs)}

    # The size of a few outputs says little about the size of what was added up to make them.
    worst = max(TOLERANCES.get(f, QUANTISED_TOLERANCE) for f in formats)
    return Case(
        name=f"linear {name}",
        make_inputs=make_inputs,
        run=run,
        bytes_moved=lambda i: sum(raw.nbytes for raw in i["raw"]) + i["x"].nbytes + sum(b.nbytes for b in i["before"]),
        flops=lambda i: 2 * n_tokens * n_in * sum(n_out),
        tolerance=tolerance or (worst if n_tokens * max(n_out) > 40 else 6 * worst),
        kind=kind,
        flops_on="float32" if set(formats) == {"f32"} else "products",
    )


def _edge_cases() -> list[Case]:
    cases = []
    for fmt in ENGINE_FORMATS:
        widths = (256, 768, 2816) if fmt.block_elements == 256 else (32, 96, 288, 1408)
        widths = tuple(align_up(width, fmt.block_elements) for width in widths)
        rows = (127, 5, 3, 1)
        for i, width in enumerate(widths):
            for n_tokens in (1, 3, 8, 9, 40)[i % 2 :: 2]:
                label = f"{fmt.name} {rows[i]}x{width} T={n_tokens}"
                cases.append(linear_case(label, [fmt.name], [rows[i]], width, n_tokens, full=i == 1))
        cases.append(linear_case(f"{fmt.name} 300x512 T=130", [fmt.name], [300], 512, 130))
    mixed = ["q4_k", "q6_k", "q5_k"]
    for n_tokens in (1, 5, 17, 70):
        cases.append(
            linear_case(f"q, k, v of three types T={n_tokens}", mixed, [192, 64, 33], 512, n_tokens, full=True)
        )
    for n_tokens in (1, 17):
        three = ["nvfp4", "q8_0", "nvfp4"]
        label = f"factors T={n_tokens}"
        cases.append(linear_case(label, three, [64, 33, 40], 320, n_tokens, full=True, factors=(0.25, 1.0, 3.0)))
    cases.append(linear_case("f32 and q8_0 T=20", ["f32", "q8_0"], [60, 96], 256, 20))
    cases.append(linear_case("f32 router 70x80 T=1030", ["f32"], [70], 80, 1030, full=True))
    # Sums of constant blocks overflow 16-bit floats (known fault Q03).
    for name in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k"):
        for n_tokens in (1, 20):
            label = f"{name} constant 1e5 T={n_tokens}"
            cases.append(linear_case(label, [name], [16], 1024, n_tokens, x_constant=1e5))
    return cases


EDGE_CASES = _edge_cases()

MODEL_CASES = [
    linear_case(
        f"qwen3-30b q k v {v} T={n_tokens}", ["q4_k", "q4_k", v], [4096, 512, 512], 2048, n_tokens, kind="model"
    )
    for v in ("q4_k", "q6_k")
    for n_tokens in (1, 8, 32, 512)
]

CASES = EDGE_CASES + MODEL_CASES
