"""NumPy decoders of the types below 4 bits that are made of grids or of ternary digits, and of NVFP4.

Same contract as quants_ref.py, which offers them: blocks uint8 [n_blocks, block_bytes] -> float32
[n_blocks, block_elements]. Sub-scales and levels have so few bits that every product here is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rimuru.formats.quants_grid import even_signs, grid

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]
Words = NDArray[np.integer]

E2M1_DOUBLED: NDArray[np.int8] = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Twice what the 4-bit codes of NVFP4 stand for."""
_POWERS_OF_3 = np.array((1, 3, 9, 27, 81), np.uint8)


def _half(blocks: Blocks, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _words(blocks: Blocks, start: int, stop: int, dtype: str) -> NDArray[np.uint32]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype).astype(np.uint32)


def _fields(words: Words, shifts: tuple[int, ...], mask: int) -> NDArray[np.uint32]:
    """[n, m] words -> [n, m * len(shifts)]: the field at each shift of every word."""
    parts = words.astype(np.uint32)[..., None] >> np.array(shifts, np.uint32)
    return (parts & np.uint32(mask)).reshape(len(words), -1)


def _signs(bits: Words) -> Floats:
    """Sign bytes [n, 32] -> factors [n, 256]: -1 where the bit is set."""
    unpacked = np.unpackbits(bits.astype(np.uint8), axis=1, bitorder="little")
    return 1 - 2 * unpacked.astype(np.float32)


def _scaled(scales: Floats, values: Floats) -> Floats:
    """Scales [n, m] times values [n, 256], each scale for 256 / m neighbours."""
    n_scales = scales.shape[1]
    return (scales[:, :, None] * values.reshape(len(values), n_scales, -1)).reshape(len(values), -1)


def _levels(name: str, index: Words) -> Floats:
    return grid(name)[index].reshape(len(index), -1).astype(np.float32)


def _iq2_xxs(blocks: Blocks) -> Floats:
    # d f16 | 8 x (4 grid bytes, u32: 4 x 7-bit sign index, 4-bit scale)
    pairs = blocks[:, 2:].reshape(len(blocks), 8, 8)
    aux = _words(pairs[:, :, 4:].reshape(len(blocks), -1), 0, 32, "<u4")
    index = pairs[:, :, :4].reshape(len(blocks), -1).astype(np.uint32)
    scale = _half(blocks, 0) * (np.float32(0.5) + (aux >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(scale, _levels("iq2_xxs", index) * _signs(even_signs()[_fields(aux, (0, 7, 14, 21), 127)]))


def _iq2_scale(blocks: Blocks, at: int) -> Floats:
    """The 16 scales of IQ2_XS and IQ2_S from 8 bytes of nibbles."""
    steps = _fields(blocks[:, at : at + 8], (0, 4), 15).astype(np.float32)
    return _half(blocks, 0) * (np.float32(0.5) + steps) * np.float32(0.25)


def _iq2_xs(blocks: Blocks) -> Floats:
    # d f16 | u16 qs[32]: 9-bit index, 7-bit sign index | scales[8]
    words = _words(blocks, 2, 66, "<u2")
    values = _levels("iq2_xs", words & np.uint32(511)) * _signs(even_signs()[words >> 9])
    return _scaled(_iq2_scale(blocks, 66), values)


def _iq2_s(blocks: Blocks) -> Floats:
    # d f16 | qs[32] | signs[32] | qh[8] | scales[8]
    index = blocks[:, 2:34] | _fields(blocks[:, 66:74], (0, 2, 4, 6), 3) << 8
    return _scaled(_iq2_scale(blocks, 74), _levels("iq2_s", index) * _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: Blocks) -> Floats:
    # d f16 | qs[64] | u32 [8]: 4 x 7-bit sign index, 4-bit scale
    aux = _words(blocks, 66, 98, "<u4")
    scale = _half(blocks, 0) * (np.float32(0.5) + (aux >> 28).astype(np.float32)) * np.float32(0.5)
    values = _levels("iq3_xxs", blocks[:, 2:66].astype(np.uint32))
    return _scaled(scale, values * _signs(even_signs()[_fields(aux, (0, 7, 14, 21), 127)]))


def _iq3_s(blocks: Blocks) -> Floats:
    # d f16 | qs[64] | qh[8] | signs[32] | scales[4]
    index = blocks[:, 2:66] | _fields(blocks[:, 66:74], tuple(range(8)), 1) << 8
    scale = _half(blocks, 0) * (1 + 2 * _fields(blocks[:, 106:110], (0, 4), 15)).astype(np.float32)
    return _scaled(scale, _levels("iq3_s", index) * _signs(blocks[:, 74:106]))


def _shifted(name: str, index: Words, negative: Words) -> Floats:
    """Levels of an IQ1 grid plus 1/8, or minus 1/8 where `negative` [n, m] is set, for 256 / m neighbours."""
    delta = np.where(negative != 0, np.float32(-0.125), np.float32(0.125))
    values = _levels(name, index).reshape(len(index), negative.shape[1], -1) + delta[:, :, None]
    return values.reshape(len(index), -1).astype(np.float32)


def _iq1_s(blocks: Blocks) -> Floats:
    # d f16 | qs[32] | u16 qh[8]: 4 x 3 index bits, 3-bit scale, sign of the shift
    high = _words(blocks, 34, 50, "<u2")
    index = blocks[:, 2:34] | _fields(high, (0, 3, 6, 9), 7) << 8
    scale = _half(blocks, 0) * (2 * _fields(high, (12,), 7) + 1).astype(np.float32)
    return _scaled(scale, _shifted("iq1_s", index, high >> 15))


def _iq1_m(blocks: Blocks) -> Floats:
    # qs[32] | qh[16]: nibbles of 3 index bits and the sign of the shift | u16 scales[4]: 4 x 3 bits, a nibble of d
    nibbles = _fields(blocks[:, 32:48], (0, 4), 15)
    words = _words(blocks, 48, 56, "<u2")
    d_bits = (words >> 12 << np.array((0, 4, 8, 12), np.uint32)).sum(axis=1).astype("<u2")
    scale = d_bits.view("<f2").astype(np.float32)[:, None] * (2 * _fields(words, (0, 3, 6, 9), 7) + 1).astype(
        np.float32
    )
    return _scaled(scale, _shifted("iq1_s", blocks[:, :32] | (nibbles & np.uint32(7)) << 8, nibbles >> 3))


def _digits(packed: Blocks, n: int) -> Blocks:
    """n ternary digits of each byte: [n_blocks, m] -> [n_blocks, n * m], the first digits of all bytes first."""
    shifted = (packed[:, None, :] * _POWERS_OF_3[:n, None]).astype(np.uint16)  # modulo 256
    return (shifted * np.uint16(3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq1_0(blocks: Blocks) -> Floats:
    # qs[48]: 5 digits a byte, of the first 32 bytes, then of the other 16 | qh[4]: 4 digits a byte | d f16
    parts = (_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4))
    return _half(blocks, 52) * (np.concatenate(parts, axis=1).astype(np.float32) - 1)


def _tq2_0(blocks: Blocks) -> Floats:
    # qs[64] | d f16; 32 bytes hold 4 runs of 32, at bits 0, 2, 4, 6
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 1, 4, 1)
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    return _half(blocks, 64) * (codes.reshape(-1, 256).astype(np.float32) - 1)


def ue4m3(codes: Blocks) -> Floats:
    """Unsigned 8-bit floats, 4 bits of exponent with bias 7, 3 of mantissa. 0x7F is 0; the top bit is not looked at."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    value = np.where(exponent == 0, mantissa * np.float32(2**-9), normal)
    return np.where(codes == 0x7F, np.float32(0), value).astype(np.float32)


def _nvfp4(blocks: Blocks) -> Floats:
    # scales u8[4] | qs[32]: 8 bytes for 16 elements, low nibbles first
    packed = blocks[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate((packed & 15, packed >> 4), axis=2)
    scale = ue4m3(blocks[:, :4]) * np.float32(0.5)
    return (scale[:, :, None] * E2M1_DOUBLED[codes].astype(np.float32)).reshape(-1, 64)


DECODERS: dict[str, Callable[[Blocks], Floats]] = {
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "nvfp4": _nvfp4,
}  # fmt: skip
