"""CUDA norms, products and gates: the cases of every backend, the 8-bit form that they leave, and the embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.common import Case, compare, normal
from cases.pointwise import CASES

from rimuru.formats.quants import ENGINE_FORMATS, QuantFormat
from rimuru.formats.quants_ref import dequantize
from rimuru.ops.cuda.matmul import MAX_GEMV_TOKENS, act

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, ops: Any) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), max(case.tolerance, 2e-5), case.tolerances)


@pytest.mark.parametrize("has_halves", [True, False], ids=["few rows", "no halves"])
@pytest.mark.parametrize("width", [32, 96, 2048, 4096])
@pytest.mark.parametrize("verb", ["rms_norm", "glu", "multiply", "gated_norm"])
def test_eight_bit_form(ops: Any, verb: str, width: int, has_halves: bool) -> None:
    """Blocks of 32: scale = largest / 127, rounded values, exact sums of each half. They are there for as many rows as
    integer kernels read, and for any number where there are no halves to read instead."""
    rng = np.random.default_rng(width)
    n_rows = MAX_GEMV_TOKENS if has_halves else 9
    a, b = ops.upload(normal(rng, n_rows, width, scale=3.0)), ops.upload(normal(rng, n_rows, width))
    weight = ops.upload(normal(rng, width))
    out = act(9, width, deterministic=not has_halves).head(n_rows)
    assert (out.quant.halves is not None) == has_halves
    if verb == "rms_norm":
        ops.rms_norm(a, weight, 1e-6, out)
    elif verb == "glu":
        ops.glu(a, b, "silu", out)
    elif verb == "multiply":
        ops.multiply(a, b, out)
    else:
        ops.gated_norm(a, b, weight, 1e-6, width // 32, False, out)
    values, scales, sums = (ops.download(part) for part in (out.quant.values, out.quant.scales, out.quant.sums))
    blocks = ops.download(out.f32).reshape(n_rows, width // 32, 32).astype(np.float64)
    largest = np.abs(blocks).max(axis=2)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    exact = blocks * 127 / largest[..., None]
    whole = values.reshape(blocks.shape).astype(np.int64)
    assert np.abs(whole - exact).max() <= 0.5 + 1e-4
    halves = whole.reshape(n_rows, width // 32, 2, 16).sum(axis=3)
    assert np.array_equal(sums & 0xFFFF, halves[..., 0] & 0xFFFF)
    assert np.array_equal(sums >> 16, halves[..., 1])


@pytest.mark.parametrize("fmt", ENGINE_FORMATS, ids=lambda fmt: fmt.name)
def test_embed(ops: Any, fmt: QuantFormat) -> None:
    rng = np.random.default_rng(7)
    n_vocab, width = 40, 512
    raw = rng.integers(0, 256, (n_vocab, fmt.row_bytes(width))).astype(np.uint8)
    if fmt.is_float:
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[fmt.name]
        numbers = normal(rng, n_vocab, width)
        raw = (numbers.view(np.uint32) >> 16 if fmt.name == "bf16" else numbers).astype(dtype).view(np.uint8)
    with np.errstate(all="ignore"):
        table = dequantize(raw.reshape(-1), fmt).reshape(n_vocab, width)
    good = np.flatnonzero(np.isfinite(table).all(axis=1) & (np.abs(table).max(axis=1) < 1e30))
    ids = np.resize(good, 13).astype(np.int32)
    out = ops.empty((13, width), np.float32)
    ops.embed(ops.weight(raw, fmt, width), ops.upload(ids), 1.5, out)
    np.testing.assert_allclose(ops.download(out), table[ids] * np.float32(1.5), rtol=2e-6, atol=1e-30)


def test_embed_skips_padding(ops: Any) -> None:
    from rimuru.formats.quants import BY_NAME

    table = ops.weight(np.ones((4, 64), np.float32).view(np.uint8), BY_NAME["f32"], 64)
    out = ops.empty((3, 64), np.float32)
    ops.embed(table, ops.upload(np.array([1, -1, 9], np.int32)), 1.0, out)
    assert ops.download(out)[:, 0].tolist() == [1.0, 0.0, 0.0]


def test_take_tokens(ops: Any) -> None:
    ids = ops.upload(np.array([5, -1, -3, 7], np.int32))
    ops.take_tokens(ids, ops.upload(np.array([10, 20, 30], np.int32)))
    assert ops.download(ids).tolist() == [5, 10, 30, 7]
