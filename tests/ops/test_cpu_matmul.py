"""Matrix products of the CPU backend: right to the last float, and the same bits whatever the batch, cores or variant.

The truth is float64 arithmetic on the decoded weights and on the activations as rounded to 8 bits: what is left between
that and the kernels is only the order of float32 sums.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases.matmul import random_rows

from rimuru.base.errors import UnsupportedModelError
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS, QuantFormat
from rimuru.formats.quants_ref import dequantize
from rimuru.ops.base import Act, Weight
from rimuru.ops.cpu import dot, embed, matmul, quantize, simd_launch

FORMATS = [f.name for f in ENGINE_FORMATS]
BLOCKED = [name for name in FORMATS if not BY_NAME[name].is_float]
WITH_MINIMUM = ["q4_1", "q5_1", "q2_k", "q4_k", "q5_k"]
BATCHES = (1, 2, 3, 7, 16, 33, 130)


def widths(fmt: QuantFormat) -> tuple[int, ...]:
    if fmt.is_float:
        return (1, 15, 64, 300, 1440)
    if fmt.block_elements == 256:
        return (256, 512, 768, 2816)
    return tuple(n for n in (32, 64, 96, 288, 320, 1408, 1440) if n % fmt.block_elements == 0)


def filled(values: np.ndarray) -> Act:
    x = quantize.act(*values.shape)
    x.f32[:] = values
    quantize.quantize_act(x, len(values))
    return x


def seen(x: Act) -> np.ndarray:
    """What the integer products see of an activation, float64."""
    return quantize.dequantize_records(x.quant.records, x.f32.shape[1]).astype(np.float64)


def weight(raw: np.ndarray, name: str, n_in: int) -> Weight:
    return Weight(raw, BY_NAME[name], len(raw), n_in)


def product(x: Act, w: Weight) -> np.ndarray:
    out = np.full((len(x.f32), w.n_out), np.nan, np.float32)
    matmul.linear(x, [w], [out])
    return out


def decoded(w: Weight) -> np.ndarray:
    return dequantize(w.data, w.format).astype(np.float64)


def assert_close(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> None:
    """Within float32 rounding of a sum whose terms' magnitudes add up to `magnitude`."""
    np.testing.assert_array_less(np.abs(got - want), 1e-6 * magnitude + 1e-30)


@pytest.mark.parametrize("name", FORMATS)
def test_products_and_independence_of_the_batch(name: str) -> None:
    fmt = BY_NAME[name]
    rng = np.random.default_rng(1)
    for n_in in widths(fmt):
        x = filled(rng.standard_normal((130, n_in)).astype(np.float32) * rng.uniform(0.1, 10, (130, 1)))
        w = weight(random_rows(rng, fmt, 127, n_in), name, n_in)
        values = x.f32.astype(np.float64) if fmt.is_float else seen(x)
        full = product(x, w)
        assert_close(full, values @ decoded(w).T, np.abs(values) @ np.abs(decoded(w)).T)
        for n_tokens in BATCHES:
            assert np.array_equal(product(x.head(n_tokens), w), full[:n_tokens]), (n_in, n_tokens)
        for n_rows in (1, 3, 5):
            for n_tokens in (1, 5):
                got = product(x.head(n_tokens), w.rows(2, 2 + n_rows))
                assert np.array_equal(got, full[:n_tokens, 2 : 2 + n_rows]), (n_in, n_rows, n_tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_error_against_unrounded_activations(name: str) -> None:
    rng = np.random.default_rng(2)
    n_in = 1024
    w = weight(random_rows(rng, BY_NAME[name], 64, n_in), name, n_in)
    x = filled(rng.standard_normal((40, n_in)).astype(np.float32))
    want = x.f32.astype(np.float64) @ decoded(w).T
    error = np.sum((product(x, w) - want) ** 2) / np.sum(want**2)
    assert error <= (1e-12 if BY_NAME[name].is_float else 2e-4)


def test_threads_do_not_change_results() -> None:
    rng = np.random.default_rng(3)
    before = simd_launch.threads()
    w = [weight(random_rows(rng, BY_NAME[n], rows, 512), n, 512) for n, rows in (("q4_k", 700), ("q6_k", 33))]
    try:
        for n_tokens in (1, 60):
            x = filled(rng.standard_normal((n_tokens, 512)).astype(np.float32))
            results = []
            for n in (1, 2, 3, 1):
                simd_launch.set_threads(n)
                assert simd_launch.threads() == n
                outs = [np.zeros((n_tokens, v.n_out), np.float32) for v in w]
                matmul.linear(x, w, outs)
                results.append(np.concatenate(outs, axis=1))
            assert all(np.array_equal(r, results[0]) for r in results)
    finally:
        simd_launch.set_threads(before)


@pytest.mark.parametrize("n_tokens", [1, 2, 70])
def test_bias_scale_and_accumulation(n_tokens: int) -> None:
    rng = np.random.default_rng(4)
    n_in = 288
    x = filled(rng.standard_normal((n_tokens, n_in)).astype(np.float32))
    w = [weight(random_rows(rng, BY_NAME[n], rows, n_in), n, n_in) for n, rows in (("f32", 5), ("q8_0", 70))]
    wide = rng.standard_normal((n_tokens, 100)).astype(np.float32)  # outs may be parts of wider rows
    outs = [wide[:, 3:8], wide[:, 20:90]]
    untouched = wide.copy()
    bias = rng.standard_normal(70).astype(np.float32)
    row_scale = rng.uniform(0.5, 2, n_tokens).astype(np.float32)
    plain = [product(x, v) for v in w]
    want = [
        untouched[:, 3:8] + plain[0] * (0.25 * row_scale)[:, None],
        untouched[:, 20:90] + (plain[1] + bias) * (0.25 * row_scale)[:, None],
    ]
    matmul.linear(x, w, outs, [None, bias], True, 0.25, row_scale)
    for got, wanted in zip(outs, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    for part in (slice(0, 3), slice(8, 20), slice(90, 100)):
        assert np.array_equal(wide[:, part], untouched[:, part])


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_extreme_activations(name: str, n_tokens: int) -> None:
    """Known fault Q03: block sums that 16-bit floats cannot hold; zeros; one huge value among small ones."""
    rng = np.random.default_rng(5)
    n_in = 512
    w = weight(random_rows(rng, BY_NAME[name], 6, n_in), name, n_in)
    spiky = rng.standard_normal((n_tokens, n_in)).astype(np.float32)
    spiky[:, 7] = 1e6
    for values in (np.full((n_tokens, n_in), 3000.0), np.full((n_tokens, n_in), -1e5), spiky):
        x = filled(values.astype(np.float32))
        assert_close(product(x, w), seen(x) @ decoded(w).T, np.abs(seen(x)) @ np.abs(decoded(w)).T)
    assert not product(filled(np.zeros((n_tokens, n_in), np.float32)), w).any()
    tiny = filled(np.full((n_tokens, n_in), 1e-38, np.float32))
    assert np.isfinite(product(tiny, w)).all()


def test_not_a_number_stays_in_its_token() -> None:
    rng = np.random.default_rng(6)
    w = weight(random_rows(rng, BY_NAME["q4_k"], 9, 256), "q4_k", 256)
    values = rng.standard_normal((3, 256)).astype(np.float32)
    clean = product(filled(values), w)
    for bad in (np.nan, np.inf):
        broken = values.copy()
        broken[1, 100] = bad
        got = product(filled(broken), w)
        assert np.isnan(got[1]).all()
        assert np.array_equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", BLOCKED)
def test_odd_scales(name: str) -> None:
    """Negative, zero and subnormal scales; for MXFP4 and NVFP4 the ends of the scales' range."""
    fmt = BY_NAME[name]
    rng = np.random.default_rng(7)
    n_in = 512
    raw = random_rows(rng, fmt, 8, n_in)
    blocks = raw.reshape(8, -1, fmt.block_bytes)
    if name == "mxfp4":
        for row, exponent in enumerate((0, 1, 2, 3, 126, 200, 20, 100)):
            blocks[row, :, 0] = exponent
    elif name == "nvfp4":
        blocks[:, :, :4] = rng.choice([0, 1, 7, 8, 0x77, 0x7E, 0x7F, 0x80, 0xFF], blocks[:, :, :4].shape)
    elif name == "iq1_m":  # a nibble of the scale on top of each of the last words
        for row, bits in enumerate((0x0000, 0x8000, 0x0001, 0x8001, 0x0032, 0xA51F, 0x3C00, 0xBC00)):
            for i in range(4):
                blocks[row, :, 49 + 2 * i] = blocks[row, :, 49 + 2 * i] & 15 | (bits >> (4 * i) & 15) << 4
    else:
        at = {"q2_k": 80, "q3_k": 108, "q6_k": 208, "tq1_0": 52, "tq2_0": 64}.get(name, 0)
        for row, scale in enumerate((0.0, -0.0, 6e-8, -6e-8, 3e-6, -0.02, 1.0, -1.0)):
            blocks[row, :, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    w = weight(raw, name, n_in)
    for n_tokens in (1, 4):
        x = filled(rng.standard_normal((n_tokens, n_in)).astype(np.float32))
        want = seen(x) @ decoded(w).T
        assert_close(product(x, w), want, np.abs(seen(x)) @ np.abs(decoded(w)).T + 1e-36)


def test_mxfp4_exponents_match_the_decoder() -> None:
    """Every exponent byte, through the embedding verb: exact."""
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17
    out = np.empty((256, 32), np.float32)
    embed.embed(weight(raw, "mxfp4", 32), np.arange(256, dtype=np.int32), 1.0, out)
    assert np.array_equal(out, dequantize(raw, BY_NAME["mxfp4"]))


def test_nvfp4_scales_match_the_decoder() -> None:
    """Every scale byte, through the embedding verb: exact."""
    raw = np.zeros((64, 36), np.uint8)
    raw[:, :4] = np.arange(256).reshape(64, 4)
    raw[:, 4:] = np.tile(np.arange(8) * 34 + 16, 4)  # codes 0 to 15 in each sub-block
    out = np.empty((64, 64), np.float32)
    embed.embed(weight(raw, "nvfp4", 64), np.arange(64, dtype=np.int32), 1.0, out)
    assert np.array_equal(out, dequantize(raw, BY_NAME["nvfp4"]))


@pytest.mark.parametrize("name", FORMATS)
def test_embed(name: str) -> None:
    rng = np.random.default_rng(8)
    fmt = BY_NAME[name]
    for n_in in widths(fmt):
        table = weight(random_rows(rng, fmt, 11, n_in), name, n_in)
        ids = np.array([3, 0, 10, 3, 7], np.int32)
        out = np.empty((5, n_in), np.float32)
        embed.embed(table, ids, 1.0, out)
        assert np.array_equal(out, dequantize(table.data[ids], fmt))
        embed.embed(table, ids, 3.5, out)
        np.testing.assert_allclose(out, 3.5 * dequantize(table.data[ids], fmt), rtol=2e-7)


def test_records_follow_their_definition() -> None:
    rng = np.random.default_rng(9)
    for n_tokens, width in ((1, 32), (3, 288), (90, 1440)):
        values = rng.standard_normal((n_tokens, width)).astype(np.float32)
        x = filled(values)
        blocks = values.reshape(n_tokens, -1, 32)
        amax = np.abs(blocks).max(-1, keepdims=True)
        quants = np.rint(blocks * (np.float32(127) / amax))
        want = (quants * (amax / np.float32(127))).reshape(n_tokens, width)
        assert np.array_equal(quantize.dequantize_records(x.quant.records, width), want)
        sums = x.quant.records.reshape(n_tokens, -1, 384)[:, :, 288:].copy().view(np.int32)
        n_blocks = width // 32
        flat = [part.reshape(n_tokens, -1)[:, :n_blocks] for part in (sums[..., :8], sums[..., 8:16], sums[..., 16:])]
        assert np.array_equal(flat[0], quants.sum(-1))
        assert np.array_equal(flat[1], quants[..., :16].sum(-1))
        assert np.array_equal(flat[2], quants[..., 16:].sum(-1))


def test_widths_without_blocks_have_no_8_bit_form() -> None:
    x = quantize.act(2, 45)
    assert x.quant is None
    quantize.quantize_act(x, 2)
    assert x.head(1).f32.shape == (1, 45)
    assert quantize.act_bytes(2, 45) == 2 * 45 * 4
    assert quantize.act_bytes(2, 288) == 2 * (288 * 4 + 2 * 384)


def test_unknown_format() -> None:
    with pytest.raises(UnsupportedModelError, match="q8_k"):
        dot.kernels("q8_k")
