"""Cases of the pointwise verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cases.common import Case, Inputs, Outputs, act_of, normal
from cases.matmul import random_rows
from rimuru.arch.spec import Activation
from rimuru.formats.quants import BY_NAME
from rimuru.ops.base import Ops

_EPS = 1e-6


def _case(
    name: str,
    make: Callable[[np.random.Generator], Inputs],
    run: Callable[[Ops, Inputs], Outputs],
    n_tokens: int,
    width: int,
    passes: int,
    tolerance: float = 1e-5,
) -> Case:
    """A case that reads and writes `passes` arrays [n_tokens, width]."""
    kind: Any = "model" if width >= 2048 else "edge"
    n_bytes, n_flops = passes * n_tokens * width * 4, 4 * n_tokens * width
    return Case(name, make, run, lambda _: n_bytes, lambda _: n_flops, tolerance, kind)


def _rms_norm(n_tokens: int, width: int) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, n_tokens, width, scale=3.0), "weight": normal(rng, width)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.act(n_tokens, width)
        ops.rms_norm(ops.upload(i["x"]), ops.upload(i["weight"]), _EPS, out)
        return {"out": ops.download(out.f32)}

    return _case(f"rms_norm {n_tokens}x{width}", make, run, n_tokens, width, 2)


def _add_norm(n_tokens: int, width: int) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {
            "x": normal(rng, n_tokens, width), "delta": normal(rng, n_tokens, width), "weight": normal(rng, width),
        }  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        x = ops.upload(i["x"])
        ops.add_norm(x, ops.upload(i["delta"]), ops.upload(i["weight"]), _EPS, 0.75)
        return {"x": ops.download(x)}

    return _case(f"add_norm {n_tokens}x{width}", make, run, n_tokens, width, 3)


def _gated_norm(n_tokens: int, width: int, n_groups: int, shared_weight: bool, gate_first: bool) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        n_weight = width // n_groups if shared_weight else width
        return {
            "x": normal(rng, n_tokens, width), "gate": normal(rng, n_tokens, width, scale=4.0),
            "weight": normal(rng, n_weight),
        }  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.act(n_tokens, width)
        weight = ops.upload(i["weight"])
        ops.gated_norm(ops.upload(i["x"]), ops.upload(i["gate"]), weight, _EPS, n_groups, gate_first, out)
        return {"out": ops.download(out.f32)}

    name = f"gated_norm {n_tokens}x{width} groups {n_groups} {'gate first' if gate_first else 'norm first'}"
    return _case(name + (" shared" if shared_weight else ""), make, run, n_tokens, width, 3)


def _glu(n_tokens: int, width: int, activation: Activation, gated: bool) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        shape = (n_tokens, width)
        gate = normal(rng, *shape, scale=5.0)
        gate[0, : min(8, width)] = [0.0, -0.0, 100.0, -100.0, 7.5, -7.5, 1e-30, 88.0][: min(8, width)]
        return {"gate": gate if gated else None, "up": normal(rng, *shape, scale=5.0)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.act(n_tokens, width)
        gate = None if i["gate"] is None else ops.upload(i["gate"])
        ops.glu(gate, ops.upload(i["up"]), activation, out)
        return {"out": ops.download(out.f32)}

    name = f"glu {activation} {n_tokens}x{width}" + ("" if gated else " ungated")
    return _case(name, make, run, n_tokens, width, 3 if gated else 2)


def _multiply(n_tokens: int, width: int) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {"a": normal(rng, n_tokens, width), "b": normal(rng, n_tokens, width)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.act(n_tokens, width)
        ops.multiply(ops.upload(i["a"]), ops.upload(i["b"]), out)
        return {"out": ops.download(out.f32)}

    return _case(f"multiply {n_tokens}x{width}", make, run, n_tokens, width, 3)


def _row_gate(n_tokens: int, width: int) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, n_tokens, width), "weight": normal(rng, width, scale=width**-0.5)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.empty((n_tokens,), np.float32)
        ops.row_gate(act_of(ops, i["x"]), ops.upload(i["weight"]), out)
        return {"out": ops.download(out)}

    return _case(f"row_gate {n_tokens}x{width}", make, run, n_tokens, width, 1)


def _gather_rows(n_tokens: int, width: int) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {"x": normal(rng, n_tokens, width), "rows": rng.integers(0, n_tokens, n_tokens + 2).astype(np.int32)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.empty((n_tokens + 2, width), np.float32)
        ops.gather_rows(ops.upload(i["x"]), ops.upload(i["rows"]), out)
        return {"out": ops.download(out)}

    return _case(f"gather_rows {n_tokens}x{width}", make, run, n_tokens, width, 2, 0.0)


def _finish_logits(n_rows: int, n_vocab: int, softcap: float | None) -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {"logits": normal(rng, n_rows, n_vocab, scale=20.0)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        logits = ops.upload(i["logits"])
        ops.finish_logits(logits, 0.125, softcap)
        return {"logits": ops.download(logits)}

    return _case(f"finish_logits {n_rows}x{n_vocab} cap {softcap}", make, run, n_rows, n_vocab, 2)


def _take_tokens(n_tokens: int, n_previous: int) -> Case:
    """Every other token is one that only the device knows."""

    def make(rng: np.random.Generator) -> Inputs:
        ids = rng.integers(0, 1000, n_tokens).astype(np.int32)
        ids[::2] = -1 - rng.integers(0, n_previous, len(ids[::2]))
        return {"ids": ids, "previous": rng.integers(0, 1000, n_previous).astype(np.int32)}

    def run(ops: Ops, i: Inputs) -> Outputs:
        ids = ops.upload(i["ids"])
        ops.take_tokens(ids, ops.upload(i["previous"]))
        return {"ids": ops.download(ids)}

    kind: Any = "model" if n_tokens == 32 else "edge"
    return Case(f"take_tokens {n_tokens} of {n_previous}", make, run, lambda _: 8 * n_tokens, lambda _: 0, 0.0, kind)


def embed_case(name: str, n_tokens: int, width: int, n_vocab: int, kind: Any = "edge") -> Case:
    """Rows of a table in a format, the last row among them."""
    fmt = BY_NAME[name]

    def make(rng: np.random.Generator) -> Inputs:
        ids = rng.integers(0, n_vocab, n_tokens).astype(np.int32)
        ids[-1] = n_vocab - 1
        return {"raw": random_rows(rng, fmt, n_vocab, width), "ids": ids}

    def run(ops: Ops, i: Inputs) -> Outputs:
        out = ops.empty((n_tokens, width), np.float32)
        ops.embed(ops.weight(i["raw"], fmt, width), ops.upload(i["ids"]), 1.5, out)
        return {"out": ops.download(out)}

    n_bytes = n_tokens * (fmt.row_bytes(width) + 4 * width)
    return Case(
        f"embed {name} {n_tokens} of {n_vocab}x{width}", make, run, lambda _: n_bytes, lambda _: n_tokens * width,
        1e-5, kind,
    )  # fmt: skip


SHAPES = ((1, 1), (3, 7), (2, 100), (5, 288), (1, 2048), (64, 2048))
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu2", "swiglu_oai", "identity")

CASES: tuple[Case, ...] = (
    *[_rms_norm(*shape) for shape in SHAPES],
    *[_add_norm(*shape) for shape in SHAPES],
    *[_gated_norm(2, 256, 4, shared, first) for shared in (False, True) for first in (False, True)],
    _gated_norm(3, 90, 1, False, True),
    _gated_norm(1, 4096, 32, True, False),
    _gated_norm(32, 8192, 8, False, True),
    _gated_norm(32, 4096, 8, False, True),  # Nemotron 3 Nano
    *[_glu(2, 96, activation, gated) for activation in ACTIVATIONS for gated in (False, True)],
    *[_glu(3, 17, activation, True) for activation in ACTIVATIONS],
    _glu(128, 4096, "silu", True),
    *[_multiply(*shape) for shape in SHAPES],
    *[_row_gate(*shape) for shape in SHAPES],
    *[_gather_rows(*shape) for shape in SHAPES],
    *[_finish_logits(2, 1000, cap) for cap in (None, 30.0)],
    _finish_logits(32, 100352, None),  # Granite 4.0 H
    *[_take_tokens(*sizes) for sizes in ((1, 1), (5, 3), (200, 130), (32, 32))],
    *[embed_case(name, 3, 512, 20) for name in ("f32", "f16", "bf16", "q8_0", "q4_k", "q6_k")],
)
