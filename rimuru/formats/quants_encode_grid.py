"""Simple encoders of the grid types, of the ternary types and of NVFP4, for test and demo models.

Same contract as quants_encode.py, which offers them: float32 [n_blocks, block_elements] -> uint8
[n_blocks, block_bytes]. Scales follow from the size of the values, codes are the nearest grid points; real quantisers
weigh importance and search for scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rimuru.formats.quants_grid import GRID_OF, grid
from rimuru.formats.quants_ref_grid import E2M1_DOUBLED, ue4m3

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_CHUNK = 1 << 14
"""Groups compared with a whole grid at a time: bounds the memory at 128 MiB."""
_SPREAD = {
    "iq1_s": 1.05, "iq1_m": 1.05, "iq2_xxs": 1.0, "iq2_xs": 0.9, "iq2_s": 0.9, "iq3_xxs": 0.9, "iq3_s": 0.8,
}  # fmt: skip
"""Size of the values, in units of the scale, over the size of a grid's points; found by trying normal values."""


def _bytes(values: NDArray[np.generic], dtype: str) -> Bytes:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def _pack(fields: Ints, bits: int) -> Ints:
    """[n, m, k] fields of some bits -> [n, m] words, the first field lowest."""
    packed: Ints = (fields << (bits * np.arange(fields.shape[-1]))).sum(axis=-1)
    return packed


def _nearest(name: str, targets: Floats, shift: float = 0.0) -> Ints:
    """Codes [n] of the grid points, moved by `shift`, that are nearest to targets [n, 8 or 4]."""
    points = grid(name).astype(np.float32) + np.float32(shift)
    halves = 0.5 * np.square(points).sum(axis=1)
    found = np.empty(len(targets), np.int64)
    for start in range(0, len(targets), _CHUNK):
        part = targets[start : start + _CHUNK]
        found[start : start + _CHUNK] = np.argmin(halves - part @ points.T, axis=1)
    return found


def _scales(x: Floats, name: str, n_groups: int, unit: float, highest: int) -> tuple[Floats, Ints, Floats]:
    """d [n, 1], steps [n, n_groups] of 0..highest, and x in units of d * unit * (1 + 2 step) [n, n_groups, m]."""
    groups = x.reshape(len(x), n_groups, -1)
    size = np.sqrt(np.square(grid(GRID_OF[name]).astype(np.float32)).mean()) * _SPREAD[name]
    wanted = np.sqrt(np.square(groups).mean(axis=2)) / size / unit
    d = (wanted.max(axis=1, keepdims=True) / (1 + 2 * highest)).astype(np.float16).astype(np.float32)
    step = np.clip(np.rint((np.divide(wanted, d, out=np.zeros_like(wanted), where=d != 0) - 1) / 2), 0, highest)
    scale = (d * np.float32(unit) * (1 + 2 * step).astype(np.float32))[:, :, None]
    units = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
    return d, step.astype(np.int64), units


def _magnitudes(units: Floats, even: bool) -> tuple[Floats, Ints]:
    """Values [n, 32, 8] without their signs, and sign bytes [n, 32].

    even: the number of negative ones must be even, so the smallest value takes the wrong sign where it is odd.
    """
    negative = units < 0
    if even:
        odd = negative.sum(axis=2) & 1
        smallest = np.abs(units).argmin(axis=2)[:, :, None]
        flipped = np.take_along_axis(negative, smallest, axis=2) ^ (odd[:, :, None] == 1)
        np.put_along_axis(negative, smallest, flipped, axis=2)
    return np.where(negative, -units, units), _pack(negative.astype(np.int64), 1)


def _signed_grid(x: Floats, name: str, n_scales: int, unit: float, even: bool) -> tuple[Floats, Ints, Ints, Ints]:
    """d [n, 1], steps [n, n_scales], codes [n, 32 or 64] and sign bytes [n, 32] of the IQ2 and IQ3 types."""
    d, steps, units = _scales(x, name, n_scales, unit, 15)
    values, signs = _magnitudes(units.reshape(len(x), 32, 8), even)
    width = grid(name).shape[1]
    return d, steps, _nearest(name, values.reshape(-1, width)).reshape(len(x), -1), signs


def _sign_words(steps: Ints, signs: Ints) -> Bytes:
    """Per 32 weights four 7-bit sign indices and a 4-bit step in a u32: [n, 8], [n, 32] -> [n, 32]."""
    return _bytes(_pack((signs & 127).reshape(len(signs), 8, 4), 7) | steps << 28, "<u4")


def _nibbles(steps: Ints) -> Bytes:
    return _bytes(_pack(steps.reshape(len(steps), -1, 2), 4), "<u1")


def _iq2_xxs(x: Floats) -> Bytes:
    d, steps, codes, signs = _signed_grid(x, "iq2_xxs", 8, 0.125, True)
    words = _sign_words(steps, signs).reshape(len(x), 8, 4)
    pairs = np.concatenate((codes.astype(np.uint8).reshape(len(x), 8, 4), words), axis=2)
    return np.hstack((_bytes(d, "<f2"), pairs.reshape(len(x), -1)))


def _iq2_xs(x: Floats) -> Bytes:
    d, steps, codes, signs = _signed_grid(x, "iq2_xs", 16, 0.125, True)
    return np.hstack((_bytes(d, "<f2"), _bytes(codes | (signs & 127) << 9, "<u2"), _nibbles(steps)))


def _iq2_s(x: Floats) -> Bytes:
    d, steps, codes, signs = _signed_grid(x, "iq2_s", 16, 0.125, False)
    high = _pack((codes >> 8).reshape(len(x), 8, 4), 2)
    parts = (codes & 255, signs, high)
    return np.hstack((_bytes(d, "<f2"), *(_bytes(part, "<u1") for part in parts), _nibbles(steps)))


def _iq3_xxs(x: Floats) -> Bytes:
    d, steps, codes, signs = _signed_grid(x, "iq3_xxs", 8, 0.25, True)
    return np.hstack((_bytes(d, "<f2"), _bytes(codes, "<u1"), _sign_words(steps, signs)))


def _iq3_s(x: Floats) -> Bytes:
    d, steps, codes, signs = _signed_grid(x, "iq3_s", 8, 1.0, False)
    high = _pack((codes >> 8).reshape(len(x), 8, 8), 1)
    parts = (codes & 255, high, signs)
    return np.hstack((_bytes(d, "<f2"), *(_bytes(part, "<u1") for part in parts), _nibbles(steps)))


def _shifted_grid(units: Floats, n_shifts: int) -> tuple[Ints, Ints]:
    """Codes [n, 32] and signs [n, n_shifts] (1 = minus 1/8) of the IQ1 types: the better of both shifts."""
    n = len(units)
    groups = units.reshape(-1, 8)
    points = grid("iq1_s").astype(np.float32)
    codes, errors = [], []
    for shift in (0.125, -0.125):
        code = _nearest("iq1_s", groups, shift)
        codes.append(code.reshape(n, 32))
        error = np.square(groups - points[code] - np.float32(shift)).sum(axis=1)
        errors.append(error.reshape(n, n_shifts, -1).sum(axis=2))
    negative = (errors[1] < errors[0]).astype(np.int64)
    return np.where(np.repeat(negative, 32 // n_shifts, axis=1) == 1, codes[1], codes[0]), negative


def _iq1_s(x: Floats) -> Bytes:
    d, steps, units = _scales(x, "iq1_s", 8, 1.0, 7)
    codes, negative = _shifted_grid(units, 8)
    high = _pack((codes >> 8).reshape(len(x), 8, 4), 3) | steps << 12 | negative << 15
    return np.hstack((_bytes(d, "<f2"), _bytes(codes & 255, "<u1"), _bytes(high, "<u2")))


def _iq1_m(x: Floats) -> Bytes:
    d, steps, units = _scales(x, "iq1_m", 16, 1.0, 7)
    codes, negative = _shifted_grid(units, 32)
    nibbles = (codes >> 8 | negative << 3).reshape(len(x), 16, 2)
    d_bits = d.astype(np.float16).view(np.uint16).astype(np.int64)  # [n, 1]: a nibble on top of each word of steps
    words = _pack(steps.reshape(len(x), 4, 4), 3) | (d_bits >> (4 * np.arange(4)) & 15) << 12
    return np.hstack((_bytes(codes & 255, "<u1"), _bytes(_pack(nibbles, 4), "<u1"), _bytes(words, "<u2")))


def _ternary(x: Floats) -> tuple[Floats, Ints]:
    """d [n, 1] and digits 0..2 [n, 256]: values beyond 0.6 of their root mean square are +-d."""
    size = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    digits = np.sign(x) * (np.abs(x) > 0.6 * size)
    count = np.abs(digits).sum(axis=1, keepdims=True)
    d = (x * digits).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return d.astype(np.float32), digits.astype(np.int64) + 1


def _digit_bytes(digits: Ints) -> Ints:
    """[n, k, m] digits -> [n, m] bytes whose multiples by 3^i, modulo 256, start with digit i."""
    n_digits = digits.shape[1]
    value = (digits * 3 ** (4 - np.arange(n_digits)).reshape(1, -1, 1)).sum(axis=1)
    return (value * 256 + 242) // 243


def _tq1_0(x: Floats) -> Bytes:
    d, digits = _ternary(x)
    parts = (
        digits[:, :160].reshape(-1, 5, 32),
        digits[:, 160:240].reshape(-1, 5, 16),
        digits[:, 240:].reshape(-1, 4, 4),
    )
    return np.hstack((*(_bytes(_digit_bytes(part), "<u1") for part in parts), _bytes(d, "<f2")))


def _tq2_0(x: Floats) -> Bytes:
    d, digits = _ternary(x)
    packed = _pack(digits.reshape(len(x), 2, 4, 32).transpose(0, 1, 3, 2), 2)
    return np.hstack((_bytes(packed.reshape(len(x), 64), "<u1"), _bytes(d, "<f2")))


def _nvfp4(x: Floats) -> Bytes:
    groups = x.reshape(len(x), 4, 16)
    possible = ue4m3(np.arange(127, dtype=np.uint8))
    wanted = np.abs(groups).max(axis=2) / 6
    code = np.abs(wanted[:, :, None] - possible).argmin(axis=2)
    scale = possible[code][:, :, None]
    units = np.divide(groups, scale, out=np.zeros_like(groups), where=scale != 0)
    codes = np.abs(units[..., None] - E2M1_DOUBLED.astype(np.float32) / 2).argmin(axis=3)
    packed = (codes[:, :, :8] | codes[:, :, 8:] << 4).reshape(len(x), 32)
    return np.hstack((_bytes(code, "<u1"), _bytes(packed, "<u1")))


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "nvfp4": _nvfp4,
}  # fmt: skip
