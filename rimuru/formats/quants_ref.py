"""NumPy decoders of the engine's tensor types: slow, plain, and the truth that kernels are compared with.

`dequantize(raw, fmt)` takes rows as bytes, uint8 [..., row_bytes], and gives float32 [..., n]. Each decoder below gets
blocks uint8 [n_blocks, block_bytes] and gives float32 [n_blocks, block_elements]. Multi-byte fields are little-endian.
Decoders of grids, ternary digits and NVFP4
are in quants_ref_grid.py; encoders for test models in quants_encode.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rimuru.formats import quants_ref_grid
from rimuru.formats.quants import QuantFormat

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4_VALUES: NDArray[np.int8] = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
"""What the 4-bit codes of IQ4_NL and IQ4_XS stand for."""
MXFP4_VALUES: Floats = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
"""What the 4-bit codes of MXFP4 stand for, before the block's power of two. Code 8 is -0, read as 0."""


def dequantize(raw: NDArray[np.uint8], fmt: QuantFormat) -> Floats:
    """Values of rows: uint8 [..., row_bytes] -> float32 [..., n]. KeyError for a type the engine cannot use."""
    decode = _DECODERS[fmt.name]
    n_blocks, rest = divmod(raw.shape[-1], fmt.block_bytes)
    if rest:
        raise ValueError(f"{raw.shape[-1]} bytes are no multiple of a {fmt.name} block of {fmt.block_bytes}")
    blocks = np.ascontiguousarray(raw).reshape(-1, fmt.block_bytes)
    # Damaged scales (inf, nan, overflow) decode to what they say, without a warning per block.
    with np.errstate(over="ignore", invalid="ignore"):
        values = decode(blocks)
    return values.reshape(*raw.shape[:-1], n_blocks * fmt.block_elements)


def _half(blocks: Blocks, at: int) -> Floats:
    """The f16 at byte `at` of each block -> float32 [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Blocks) -> Blocks:
    """uint8 [..., m] -> [..., 2 m]: all low nibbles, then all high nibbles."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(blocks: Blocks, at: int) -> Blocks:
    """The 32 bits at byte `at`, each as bit 4 of element 0..31 -> uint8 [n_blocks, 32]."""
    bits: Blocks = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _f32(blocks: Blocks) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Blocks) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> Floats:
    # d f16 | qs[16]
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Blocks) -> Floats:
    # d f16 | m f16 | qs[16]
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Floats:
    # d f16 | qh u32 | qs[16]
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Blocks) -> Floats:
    # d f16 | m f16 | qh u32 | qs[16]
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Floats:
    # d f16 | qs i8[32]
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _two_bits(packed: Blocks) -> Blocks:
    """qs[64] -> codes [n_blocks, 2, 4, 32] in element order: half, shift, byte."""
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)


def _q2_k(blocks: Blocks) -> Floats:
    # scales[16] | qs[64] | d f16 | dmin f16
    codes = _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    low = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return (scale[:, :, None] * codes - low[:, :, None]).reshape(-1, 256)


def q3_k_scales(packed: Blocks) -> NDArray[np.int8]:
    """The 16 signed scales of Q3_K blocks: uint8 [n_blocks, 12] -> int8 [n_blocks, 16], -32..31."""
    shifts = np.array((0, 2, 4, 6), np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:12] >> shifts) & 3).reshape(-1, 16)
    return (_nibbles(packed[:, :8]) | (high << 4)).astype(np.int8) - np.int8(32)


def _q3_k(blocks: Blocks) -> Floats:
    # hmask[32] | qs[64] | scales[12] | d f16
    low = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32)
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, None, :32] >> bits) & 1
    codes = (low.astype(np.int8) - np.int8(4) * (high ^ 1).astype(np.int8)).reshape(-1, 16, 16)
    scale = _half(blocks, 108) * q3_k_scales(blocks[:, 96:108]).astype(np.float32)
    return (scale[:, :, None] * codes.astype(np.float32)).reshape(-1, 256)


def k4_scales(packed: Blocks) -> tuple[Blocks, Blocks]:
    """The 6-bit scales and mins of Q4_K and Q5_K blocks: uint8 [n_blocks, 12] -> two uint8 [n_blocks, 8]."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=1)
    mins = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=1)
    return scales, mins


def _scale_and_min(blocks: Blocks, codes: Blocks) -> Floats:
    """d f16 | dmin f16 | scales[12] and codes [n_blocks, 8, 32] -> values."""
    scales, mins = k4_scales(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales.astype(np.float32)
    low = _half(blocks, 2) * mins.astype(np.float32)
    return (scale[:, :, None] * codes.astype(np.float32) - low[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: Blocks) -> Floats:
    # d f16 | dmin f16 | scales[12] | qs[128]
    return _scale_and_min(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> Floats:
    # d f16 | dmin f16 | scales[12] | qh[32] | qs[128]
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    return _scale_and_min(blocks, low | high << np.uint8(4))


def _q6_k(blocks: Blocks) -> Floats:
    # ql[128] | qh[64] | scales i8[16] | d f16
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = _two_bits(blocks[:, 128:192]).reshape(-1, 2, 128)
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * codes).reshape(-1, 256)


def _iq4_nl(blocks: Blocks) -> Floats:
    # d f16 | qs[16]
    return _half(blocks, 0) * IQ4_VALUES[_nibbles(blocks[:, 2:])].astype(np.float32)


def iq4_xs_scales(high: NDArray[np.uint16], low: Blocks) -> NDArray[np.int8]:
    """The 8 signed scales of IQ4_XS blocks from scales_h [n_blocks] and scales_l [n_blocks, 4] -> int8, -32..31."""
    index = np.arange(8, dtype=np.uint16)
    low_bits = low[:, index // 2] >> (4 * (index % 2)).astype(np.uint8) & 15
    high_bits = ((high[:, None] >> (2 * index)) & 3).astype(np.uint8)
    return (low_bits | high_bits << 4).astype(np.int8) - np.int8(32)


def _iq4_xs(blocks: Blocks) -> Floats:
    # d f16 | scales_h u16 | scales_l[4] | qs[128]
    scales = iq4_xs_scales(np.ascontiguousarray(blocks[:, 2:4]).view("<u2")[:, 0], blocks[:, 4:8])
    scale = _half(blocks, 0) * scales.astype(np.float32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return (scale[:, :, None] * IQ4_VALUES[codes].astype(np.float32)).reshape(-1, 256)


def _mxfp4(blocks: Blocks) -> Floats:
    # e u8 | qs[16]; ldexp keeps the smallest scales exact where a float32 factor would be subnormal
    return np.ldexp(MXFP4_VALUES[_nibbles(blocks[:, 1:])], blocks[:, :1].astype(np.int32) - 127)


_DECODERS: dict[str, Callable[[Blocks], Floats]] = {
    "f32": _f32, "f16": _f16, "bf16": _bf16,
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, **quants_ref_grid.DECODERS,
}  # fmt: skip
