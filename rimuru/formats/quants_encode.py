"""Simple encoders of the engine's tensor types, for test and demo models: nearest codes under plain scales.

Real quantisers search for better scales; these only have to give blocks whose decoded values are close to the input.
Layouts: quants_ref.py, whose decoders are the inverse.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rimuru.formats import quants_encode_grid
from rimuru.formats.quants import QuantFormat
from rimuru.formats.quants_ref import IQ4_VALUES, MXFP4_VALUES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def quantize(x: ArrayLike, fmt: QuantFormat) -> Bytes:
    """Rows of finite values [..., n] -> uint8 [..., row_bytes]. KeyError for a type the engine cannot use."""
    values = np.ascontiguousarray(x, np.float32)
    row_bytes = fmt.row_bytes(values.shape[-1])
    blocks = _ENCODERS[fmt.name](values.reshape(-1, fmt.block_elements))
    return np.ascontiguousarray(blocks).reshape(*values.shape[:-1], row_bytes)


def _bytes(values: NDArray[np.generic], dtype: str) -> Bytes:
    """Each row of numbers as little-endian bytes."""
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def _half(values: NDArray[np.floating]) -> Floats:
    """Round to f16, as the stored scale is, so that codes are chosen for the scale that will be read."""
    return values.astype(np.float16).astype(np.float32)


def _divide(a: NDArray[np.floating], b: NDArray[np.floating]) -> Floats:
    """a / b as float32, 0 where b is 0."""
    out: Floats = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32)
    np.divide(a, b, out=out, where=b != 0, casting="same_kind")
    return out


def _codes(values: Floats, lowest: int, highest: int) -> NDArray[np.int32]:
    return np.clip(np.rint(values), lowest, highest).astype(np.int32)


def _pack(codes: NDArray[np.int32]) -> Bytes:
    """4-bit codes [..., 2 m] -> uint8 [..., m]: the first half in the low nibbles."""
    low, high = np.split(codes, 2, axis=-1)
    return (low | high << 4).astype(np.uint8)


def _fifth_bits(codes: NDArray[np.int32]) -> Bytes:
    return np.packbits((codes >> 4).astype(np.uint8), axis=-1, bitorder="little")


def _f32(x: Floats) -> Bytes:
    return _bytes(x, "<f4")


def _f16(x: Floats) -> Bytes:
    return _bytes(x, "<f2")


def _bf16(x: Floats) -> Bytes:
    bits = x.view(np.uint32).astype(np.uint64)
    return _bytes((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "<u2")  # round half to even


def _symmetric(x: Floats, half_range: int) -> tuple[Floats, NDArray[np.int32]]:
    """Scale [n, 1] and codes 0..2 half_range - 1 around half_range; the largest value gets code 0."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scale = _half(peak / -half_range)
    return scale, _codes(_divide(x, scale) + half_range, 0, 2 * half_range - 1)


def _affine(x: Floats, highest: int) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Scale [n, 1], minimum [n, 1] and codes 0..highest."""
    low = _half(x.min(axis=1, keepdims=True))
    scale = _half((x.max(axis=1, keepdims=True) - low) / highest)
    return scale, low, _codes(_divide(x - low, scale), 0, highest)


def _q4_0(x: Floats) -> Bytes:
    scale, codes = _symmetric(x, 8)
    return np.hstack((_bytes(scale, "<f2"), _pack(codes)))


def _q4_1(x: Floats) -> Bytes:
    scale, low, codes = _affine(x, 15)
    return np.hstack((_bytes(scale, "<f2"), _bytes(low, "<f2"), _pack(codes)))


def _q5_0(x: Floats) -> Bytes:
    scale, codes = _symmetric(x, 16)
    return np.hstack((_bytes(scale, "<f2"), _fifth_bits(codes), _pack(codes & 15)))


def _q5_1(x: Floats) -> Bytes:
    scale, low, codes = _affine(x, 31)
    return np.hstack((_bytes(scale, "<f2"), _bytes(low, "<f2"), _fifth_bits(codes), _pack(codes & 15)))


def _q8_0(x: Floats) -> Bytes:
    scale = _half(np.abs(x).max(axis=1, keepdims=True) / 127)
    return np.hstack((_bytes(scale, "<f2"), _bytes(_codes(_divide(x, scale), -127, 127), "<i1")))


def _two_bits(codes: NDArray[np.int32]) -> Bytes:
    """2-bit codes [n, 256] in element order -> qs[64]."""
    grouped = codes.reshape(-1, 2, 4, 32)
    shifts = np.array((0, 2, 4, 6)).reshape(1, 1, 4, 1)
    packed: Bytes = (grouped << shifts).sum(axis=2).reshape(-1, 64).astype(np.uint8)
    return packed


def _affine_k(
    x: Floats, n_groups: int, highest: int, highest_scale: int
) -> tuple[Floats, Floats, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """d, dmin [n, 1], integer scales and mins [n, n_groups], codes [n, 256] of the K types with a minimum."""
    groups = x.reshape(len(x), n_groups, -1)
    low = -np.minimum(groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + low) / highest
    d = _half(scale.max(axis=1, keepdims=True) / highest_scale)
    dmin = _half(low.max(axis=1, keepdims=True) / highest_scale)
    scales = _codes(_divide(scale, d), 0, highest_scale)
    mins = _codes(_divide(low, dmin), 0, highest_scale)
    shifted = groups + (dmin * mins)[:, :, None].astype(np.float32)
    codes = _codes(_divide(shifted, (d * scales)[:, :, None].astype(np.float32)), 0, highest)
    return d, dmin, scales, mins, codes.reshape(len(x), -1)


def _q2_k(x: Floats) -> Bytes:
    d, dmin, scales, mins, codes = _affine_k(x, 16, 3, 15)
    packed = (scales | mins << 4).astype(np.uint8)
    return np.hstack((packed, _two_bits(codes), _bytes(d, "<f2"), _bytes(dmin, "<f2")))


def _k4_scales(scales: NDArray[np.int32], mins: NDArray[np.int32]) -> Bytes:
    """Eight 6-bit scales and mins -> uint8 [n, 12]."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return np.hstack((first, second, third)).astype(np.uint8)


def _q4_k(x: Floats) -> Bytes:
    d, dmin, scales, mins, codes = _affine_k(x, 8, 15, 63)
    packed = _pack(codes.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.hstack((_bytes(d, "<f2"), _bytes(dmin, "<f2"), _k4_scales(scales, mins), packed))


def _q5_k(x: Floats) -> Bytes:
    d, dmin, scales, mins, codes = _affine_k(x, 8, 31, 63)
    packed = _pack((codes & 15).reshape(-1, 4, 64)).reshape(-1, 128)
    bits = np.arange(8).reshape(1, 8, 1)
    high = ((codes >> 4).reshape(-1, 8, 32) << bits).sum(axis=1).astype(np.uint8)
    return np.hstack((_bytes(d, "<f2"), _bytes(dmin, "<f2"), _k4_scales(scales, mins), high, packed))


def _symmetric_k(
    x: Floats, n_groups: int, half_range: int, lowest_scale: int
) -> tuple[Floats, NDArray[np.int32], Floats]:
    """d [n, 1], signed integer scales [n, n_groups] of at least lowest_scale, and x in units of them [n, groups, m]."""
    groups = x.reshape(len(x), n_groups, -1)
    at_peak = np.abs(groups).argmax(axis=2)[:, :, None]
    scale = np.take_along_axis(groups, at_peak, axis=2)[:, :, 0] / -half_range
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = _half(peak / lowest_scale)
    scales = _codes(_divide(scale, d), lowest_scale, -lowest_scale - 1)
    return d, scales, _divide(groups, (d * scales)[:, :, None].astype(np.float32))


def _q3_k(x: Floats) -> Bytes:
    d, scales, units = _symmetric_k(x, 16, 4, -32)
    codes = _codes(units + 4, 0, 7).reshape(-1, 256)
    bits = np.arange(8).reshape(1, 8, 1)
    high = ((codes >> 2).reshape(-1, 8, 32) << bits).sum(axis=1).astype(np.uint8)
    six = scales + 32
    shifts = np.array((0, 2, 4, 6)).reshape(1, 4, 1)
    top = ((six >> 4).reshape(-1, 4, 4) << shifts).sum(axis=1).astype(np.uint8)
    return np.hstack((high, _two_bits(codes & 3), _pack(six & 15), top, _bytes(d, "<f2")))


def _q6_k(x: Floats) -> Bytes:
    d, scales, units = _symmetric_k(x, 16, 32, -128)
    codes = _codes(units + 32, 0, 63).reshape(-1, 256)
    low = _pack((codes & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    return np.hstack((low, _two_bits(codes >> 4), _bytes(scales, "<i1"), _bytes(d, "<f2")))


def _nearest(units: Floats, values: NDArray[np.generic]) -> NDArray[np.int32]:
    distance = np.abs(units[..., None] - values.astype(np.float32))
    nearest: NDArray[np.int32] = np.argmin(distance, axis=-1).astype(np.int32)
    return nearest


def _iq4_nl(x: Floats) -> Bytes:
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    scale = _half(peak / IQ4_VALUES[0])
    return np.hstack((_bytes(scale, "<f2"), _pack(_nearest(_divide(x, scale), IQ4_VALUES))))


def _iq4_xs(x: Floats) -> Bytes:
    d, scales, units = _symmetric_k(x, 8, int(-IQ4_VALUES[0]), -32)
    six = scales + 32
    index = np.arange(8)
    high = ((six >> 4) << (2 * index)).sum(axis=1)[:, None]
    low = six[:, 0::2] & 15 | (six[:, 1::2] & 15) << 4
    packed = _pack(_nearest(units, IQ4_VALUES)).reshape(-1, 128)
    return np.hstack((_bytes(d, "<f2"), _bytes(high, "<u2"), low.astype(np.uint8), packed))


def _mxfp4(x: Floats) -> Bytes:
    peak = np.abs(x).max(axis=1, keepdims=True)
    exponent = np.frexp(peak / 4)[1] - 1  # the largest value lands in 4..8, of which 6 is the largest code
    exponent = np.clip(np.where(peak > 0, exponent, 0), -127, 127)
    codes = _nearest(np.ldexp(x, -exponent), MXFP4_VALUES)
    return np.hstack((_bytes(exponent + 127, "<u1"), _pack(codes)))


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "f32": _f32, "f16": _f16, "bf16": _bf16,
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, **quants_encode_grid.ENCODERS,
}  # fmt: skip
