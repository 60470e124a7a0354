"""The expert kernels of the CPU backend against a plain loop over (token, slot)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.moe import expert_layout, fill_pool

from rimuru.arch.spec import MoeSpec
from rimuru.formats.quants import ENGINE_FORMATS
from rimuru.formats.quants_ref import dequantize
from rimuru.ops.base import Act, ExpertTable
from rimuru.ops.cpu import moe, quantize, simd_launch

THREE = ("gate", "up", "down")


class Layer:
    """Random experts in shuffled pages of a pool."""

    def __init__(
        self,
        formats: dict[str, str],
        spec: MoeSpec,
        n_in: int,
        page_bytes: int = 4096,
        biases: bool = False,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.spec = spec
        self.layout = expert_layout(formats, spec.n_experts, n_in, spec.width, page_bytes)
        self.pool, self.pages = fill_pool(rng, self.layout, page_bytes)
        self.page_bytes = page_bytes
        self.biases = {
            p.name: rng.standard_normal((spec.n_experts, p.n_rows)).astype(np.float32)
            for p in (self.layout.projections if biases else ())
        }
        self._matrices: dict[tuple[str, int], np.ndarray] = {}

    def table(self, pool: np.ndarray | None = None, pages: np.ndarray | None = None) -> ExpertTable:
        base = (self.pool if pool is None else pool).ctypes.data
        addresses = base + (self.pages if pages is None else pages).astype(np.int64) * self.page_bytes
        return ExpertTable(self.layout, self.page_bytes, addresses, self.biases)

    def matrix(self, name: str, expert: int) -> np.ndarray | None:
        """float64 weights, read through the page ids."""
        p = self.layout.projection(name)  # type: ignore[arg-type]
        if p is None:
            return None
        if (name, expert) not in self._matrices:
            rows = []
            for row in range(p.n_rows):
                page, in_page = divmod(row, p.rows_per_page)
                at = int(self.pages[expert, p.first_page + page]) * self.page_bytes + in_page * p.row_bytes
                rows.append(self.pool[at : at + p.row_bytes])
            self._matrices[name, expert] = dequantize(np.stack(rows), p.format).astype(np.float64)
        return self._matrices[name, expert]

    def is_float(self, name: str) -> bool:
        p = self.layout.projection(name)  # type: ignore[arg-type]
        return p is not None and p.format.is_float


def filled(values: np.ndarray) -> Act:
    x = quantize.act(*values.shape)
    x.f32[:] = values
    quantize.quantize_act(x, len(values))
    return x


def rounded(values: np.ndarray) -> np.ndarray:
    """float64 rows after rounding to 8-bit records."""
    return quantize.dequantize_records(filled(values.astype(np.float32)).quant.records, values.shape[1]).astype(
        np.float64
    )


def activate(name: str, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
    z = up if gate is None else gate
    if name == "swiglu_oai":
        g, u = np.minimum(z, 7), np.clip(up, -7, 7)
        return g / (1 + np.exp(-1.702 * g)) * (u + 1)
    with np.errstate(over="ignore"):
        value = {
            "silu": lambda: z / (1 + np.exp(-z)),
            "gelu_tanh": lambda: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
            "relu2": lambda: np.maximum(z, 0) ** 2,
        }[name]()
    return value if gate is None else value * up


def expected(layer: Layer, x: np.ndarray, ids: np.ndarray, exact_hidden: bool = False) -> np.ndarray:
    """float64 [T, k, n_out], with activations rounded as the kernels round them."""

    def apply(name: str, expert: int, values: np.ndarray) -> np.ndarray | None:
        matrix = layer.matrix(name, expert)
        if matrix is None:
            return None
        seen = values if layer.is_float(name) or exact_hidden else rounded(values[None])[0]
        bias = layer.biases[name][expert] if name in layer.biases else 0
        return matrix @ seen + bias

    out = []
    for row, experts in zip(x.astype(np.float64), ids, strict=True):
        for e in experts:
            up = apply("up", e, row)
            assert up is not None
            out.append(apply("down", e, activate(layer.spec.activation, apply("gate", e, row), up)))
    return np.array(out).reshape(*ids.shape, -1)


def run(layer: Layer, x: Act, ids: np.ndarray, active: np.ndarray | None = None, table: Any = None) -> np.ndarray:
    n_tokens, top_k = ids.shape
    scratch = moe.moe_scratch(n_tokens + 3, layer.spec, x.f32.shape[1])
    scratch.out[:] = -77
    moe.moe_experts(x, ids, table or layer.table(), active, layer.spec, scratch)
    assert (scratch.out[n_tokens * top_k :] == -77).all()
    return scratch.out[: n_tokens * top_k].reshape(n_tokens, top_k, -1).copy()


def random_ids(rng: np.random.Generator, n_tokens: int, spec: MoeSpec) -> np.ndarray:
    return np.stack([rng.permutation(spec.n_experts)[: spec.top_k] for _ in range(n_tokens)]).astype(np.int32)


def nmse(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sum((got - want) ** 2) / np.sum(want**2))


CASES = {
    "q4_k_m": ({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, MoeSpec(8, 2, 256), 512),
    "three types": ({"gate": "q5_k", "up": "q6_k", "down": "q8_0"}, MoeSpec(5, 3, 288), 256),
    "fallback types": ({"gate": "q4_k", "up": "q3_k", "down": "q5_0"}, MoeSpec(6, 2, 352), 256),
    "gpt-oss": (dict.fromkeys(THREE, "mxfp4"), MoeSpec(16, 4, 96, activation="swiglu_oai"), 288),
    "nemotron": ({"up": "q5_0", "down": "q8_0"}, MoeSpec(8, 2, 64, activation="relu2", gated=False), 96),
    "gelu": (dict.fromkeys(THREE, "q8_0"), MoeSpec(4, 2, 160, activation="gelu_tanh"), 192),
    "floats": ({"gate": "f32", "up": "bf16", "down": "f16"}, MoeSpec(5, 2, 77), 45),
    "float down": ({"gate": "q8_0", "up": "q8_0", "down": "f32"}, MoeSpec(5, 2, 50), 64),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str) -> None:
    formats, spec, n_in = CASES[name]
    layer = Layer(formats, spec, n_in, biases=name in ("gpt-oss", "three types"))
    rng = np.random.default_rng(1)
    values = rng.standard_normal((130, n_in)).astype(np.float32)
    ids = random_ids(rng, 130, spec)
    x = filled(values)
    got = run(layer, x, ids)
    # float32 hidden values may round to a neighbouring 8-bit code, so the error is a little over that of sums
    assert nmse(got, expected(layer, values, ids)) < 1e-6
    for n_tokens in (1, 2, 8, 9, 33, 65):
        assert np.array_equal(run(layer, x.head(n_tokens), ids[:n_tokens]), got[:n_tokens]), n_tokens


@pytest.mark.parametrize("fmt", [f.name for f in ENGINE_FORMATS])
def test_every_format(fmt: str) -> None:
    spec = MoeSpec(4, 2, 256)
    layer = Layer(dict.fromkeys(THREE, fmt), spec, 256, page_bytes=8192)
    rng = np.random.default_rng(2)
    values = rng.standard_normal((5, 256)).astype(np.float32)
    ids = random_ids(rng, 5, spec)
    got = run(layer, filled(values), ids)
    assert nmse(got, expected(layer, values, ids)) < 1e-6
    exact = nmse(got, expected(layer, values, ids, exact_hidden=True))
    assert exact < (1e-11 if fmt in ("f32", "f16", "bf16") else 5e-4)


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 9, 33])
def test_repeated_experts(n_tokens: int) -> None:
    """Known fault E03: the same id twice in a token's row, and one expert for everybody."""
    formats, _, n_in = CASES["q4_k_m"]
    spec = MoeSpec(8, 3, 256)
    layer = Layer(formats, spec, n_in)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((n_tokens, n_in)).astype(np.float32)
    ids = rng.integers(0, 8, (n_tokens, 3)).astype(np.int32)
    ids[:, 2] = ids[:, 0]
    for rows in (ids, np.full_like(ids, 5)):
        got = run(layer, filled(values), rows)
        assert nmse(got, expected(layer, values, rows)) < 1e-6
        assert np.array_equal(got[:, 2], got[:, 0])


def test_active_experts_in_two_calls_are_all_experts() -> None:
    formats, spec, n_in = CASES["q4_k_m"]
    layer = Layer(formats, spec, n_in)
    rng = np.random.default_rng(4)
    x = filled(rng.standard_normal((20, n_in)).astype(np.float32))
    ids = random_ids(rng, 20, spec)
    whole = run(layer, x, ids)
    active = np.array([True, False, True, True, False, False, True, False])
    table = layer.table()
    table.addresses[~active] = 0  # unreadable: touching one would crash
    first = run(layer, x, ids, active, table)
    second = run(layer, x, ids, ~active)
    chosen = active[ids]
    assert (first[~chosen] == -77).all() and (second[chosen] == -77).all()
    assert np.array_equal(np.where(chosen[..., None], first, second), whole)
    assert (run(layer, x, ids, np.zeros(8, bool)) == -77).all()


def test_placement_does_not_change_results() -> None:
    formats, spec, n_in = CASES["three types"]
    layer = Layer(formats, spec, n_in)
    rng = np.random.default_rng(5)
    x = filled(rng.standard_normal((11, n_in)).astype(np.float32))
    ids = random_ids(rng, 11, spec)
    want = run(layer, x, ids)
    n_pages = len(layer.pool) // layer.page_bytes
    moved = np.full((n_pages + 9) * layer.page_bytes, 0xFF, np.uint8)
    new_ids = rng.permutation(n_pages + 9)[:n_pages]
    for old, new in enumerate(new_ids):
        source = layer.pool[old * layer.page_bytes : (old + 1) * layer.page_bytes]
        moved[new * layer.page_bytes : (new + 1) * layer.page_bytes] = source
    assert np.array_equal(run(layer, x, ids, None, layer.table(moved, new_ids[layer.pages])), want)
    before = simd_launch.threads()
    try:
        for n in (1, 3):
            simd_launch.set_threads(n)
            assert np.array_equal(run(layer, x, ids), want)
    finally:
        simd_launch.set_threads(before)


@pytest.mark.parametrize("n_tokens", [1, 8, 64])
def test_large_hidden_values_stay_finite(n_tokens: int) -> None:
    """Known fault E07: silu(g) u far above 65504."""
    formats, spec, n_in = CASES["q4_k_m"]
    layer = Layer(formats, spec, n_in)
    rng = np.random.default_rng(6)
    values = rng.standard_normal((n_tokens, n_in)).astype(np.float32) * 3000
    ids = random_ids(rng, n_tokens, spec)
    got = run(layer, filled(values), ids)
    gate, up = (layer.matrix(name, ids[0, 0]) for name in ("gate", "up"))
    assert gate is not None and up is not None
    assert np.abs(activate("silu", gate @ values[0], up @ values[0])).max() > 1e6
    assert np.isfinite(got).all()
    assert nmse(got, expected(layer, values, ids)) < 1e-6


@pytest.mark.parametrize(("n_experts", "top_k"), [(1, 1), (300, 10), (40, 40)])
def test_expert_counts(n_experts: int, top_k: int) -> None:
    spec = MoeSpec(n_experts, top_k, 32)
    layer = Layer(dict.fromkeys(THREE, "q4_0"), spec, 32)
    rng = np.random.default_rng(7)
    values = rng.standard_normal((6, 32)).astype(np.float32)
    ids = random_ids(rng, 6, spec)
    assert nmse(run(layer, filled(values), ids), expected(layer, values, ids)) < 1e-6


def test_ids_outside_the_layer_are_skipped() -> None:
    formats, spec, n_in = CASES["q4_k_m"]
    layer = Layer(formats, spec, n_in)
    x = filled(np.ones((2, n_in), np.float32))
    got = run(layer, x, np.array([[-1, 3], [8, 0]], np.int32))
    assert (got[0, 0] == -77).all() and (got[1, 0] == -77).all()
    assert (got[:, 1] != -77).all()


def test_missing_projection_is_refused() -> None:
    formats, spec, n_in = CASES["q4_k_m"]
    layer = Layer(formats, spec, n_in)
    table = layer.table()
    table.layout = dataclasses.replace(layer.layout, projections=layer.layout.projections[:2])
    with pytest.raises(ValueError, match="down"):
        run(layer, filled(np.ones((1, n_in), np.float32)), np.zeros((1, 2), np.int32), None, table)


@pytest.mark.parametrize("n_tokens", [1, 3, 200])
def test_combine(n_tokens: int) -> None:
    spec = MoeSpec(8, 5, 32)
    rng = np.random.default_rng(8)
    scratch = moe.moe_scratch(n_tokens, spec, 300)
    scratch.out[:] = rng.standard_normal(scratch.out.shape)
    weights = rng.standard_normal((n_tokens, 5)).astype(np.float32)
    before = rng.standard_normal((n_tokens, 300)).astype(np.float32)
    want = np.zeros((n_tokens, 300), np.float32)
    for slot in range(5):  # in order, each product and each sum rounded: the same bits for any batch
        want += weights[:, slot : slot + 1] * scratch.out.reshape(n_tokens, 5, 300)[:, slot]
    out = before.copy()
    moe.moe_combine(scratch, weights, out, False, 1.0)
    assert np.array_equal(out, want)
    out = before.copy()
    moe.moe_combine(scratch, weights, out, True, 0.5)
    assert np.array_equal(out, before + np.float32(0.5) * want)
