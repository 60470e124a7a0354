"""What each quantised format looks like to the kernels: one `unpack` per format, and a row in the table.

`unpack(k, address)` expands 256 weights (one K block, or eight blocks of 32) to unsigned bytes and scales:

    quads[p], p = 0..3: 16 lanes of 4 bytes; lane l holds elements 4 s .. 4 s + 3 of block b = l % 8, s = 2 p + l // 8
        (a "step" s is 4 elements of each of the eight 32-element blocks of a superblock)
    weight = scale[b] * (byte - offset) - minimum[b]                      formats with a scale per 32 elements
    weight = scale * sub_scale[half][b] * (byte - offset) - minimum * sub_minimum[half][b]     per 16 (half = s // 4)
    (sub-scales are integers, or float32 where their range asks for it)

Bytes are unsigned because the dot instructions multiply unsigned by signed bytes; the offset is taken back exactly with
the activation's integer sums. Byte maps follow ggml's block structs (facts/gguf-architectures.md, quantisation types).
Formats made of grids or ternary digits are in dot_formats_grid.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rimuru.ops.cpu.simd import F16, F32X8, I8, I8X16, I16, I32, I32X4, I32X8, I32X16, I64, Kernel, V

BLOCKS = 8
"""32-element blocks of a superblock."""

_LANES = [(2 * p + lane // 8, lane % 8) for p in range(4) for lane in range(16)]
"""(step, block) of every lane of the four quads."""


def per_quad(p: int) -> list[tuple[int, int]]:
    return _LANES[16 * p : 16 * p + 16]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """256 weights in registers; see the module's text."""

    quads: Sequence[V]  # 4 x i32x16
    scale: V  # f32x8
    minimum: V | None = None  # f32x8
    sub_scales: tuple[V, V] | None = None  # i32x8 or f32x8 for elements 0..15 and 16..31 of each block
    sub_minimums: tuple[V, V] | None = None


@dataclass(frozen=True, slots=True)
class DotFormat:
    """A row of the table: how to unpack, and which shape of scales the format has."""

    name: str
    super_bytes: int
    """Bytes of 256 weights."""
    unpack: Callable[[Kernel, V], Unpacked]
    offset: int = 0
    per_16: bool = False
    has_minimum: bool = False
    float_sub_scales: bool = False

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        return self.per_16, self.has_minimum, self.float_sub_scales


# ---- pieces


def half(k: Kernel, address: V) -> V:
    return k.load(address, F16).to_f32()


def _halves(k: Kernel, address: V, stride: int) -> V:
    """Eight float16, one per block, as f32x8."""
    bits = k.vector([k.load(address + b * stride, I16) for b in range(BLOCKS)])
    return bits.bitcast(F16x8).to_f32()


def blocks16(k: Kernel, address: V, stride: int) -> V:
    """The 16 quant bytes of each of eight blocks as 32 dwords, dword 4 b + d."""
    parts = [k.load(address + b * stride, I32X4) for b in range(BLOCKS)]
    while len(parts) > 1:
        parts = [parts[i].concat(parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def _nibbles_of_32(k: Kernel, packed: V) -> list[V]:
    """Quads of formats whose 16 bytes hold elements 0..15 in low, 16..31 in high nibbles."""
    pairs = [packed.pick([4 * b + s for s, b in per_quad(p)]) for p in (0, 1)]
    return [q & 0x0F0F0F0F for q in pairs] + [(q >> 4) & 0x0F0F0F0F for q in pairs]


def _fifth_bits(k: Kernel, address: V, stride: int) -> list[V]:
    """Bit 4 of every element from the eight 32-bit masks of Q5_0 and Q5_1, in quads."""
    masks = k.vector([k.load(address + b * stride, I32) for b in range(BLOCKS)]).twice()
    quads = []
    for p in range(4):
        four = (masks >> k.const([4 * s for s, _ in per_quad(p)], I32X16)) & 15
        # bit i of the four lands on bit 8 i + 4: the products' other bits miss the mask and never carry
        quads.append((four * 0x02040810) & 0x10101010)
    return quads


def _k_scales(k: Kernel, address: V) -> tuple[V, V]:
    """The eight 6-bit scales and minimums of Q4_K and Q5_K, from 12 bytes, as i32x8 each."""
    u0, u1, u2 = (k.load(address + 4 * i, I32) for i in range(3))
    scales = _eight(u0 & 0x3F3F3F3F, (u2 & 0x0F0F0F0F) | ((u0 >> 2) & 0x30303030))
    minimums = _eight(u1 & 0x3F3F3F3F, ((u2 >> 4) & 0x0F0F0F0F) | ((u1 >> 2) & 0x30303030))
    return scales, minimums


def _eight(low: V, high: V) -> V:
    """Eight bytes in two dwords as i32x8."""
    return (low.zext(I64) | (high.zext(I64) << 32)).bitcast(I8x8).zext(I32)


def even_odd(values: V) -> tuple[V, V]:
    """(2 b, 2 b + 1) of sixteen."""
    return values.pick(range(0, 16, 2)), values.pick(range(1, 16, 2))


F16x8 = type(F32X8)(F16, 8)
I8x8 = type(F32X8)(I8, 8)

# ---- formats with 32-element blocks


def _q4_0(k: Kernel, at: V) -> Unpacked:
    # [d f16][16 bytes]
    return Unpacked(_nibbles_of_32(k, blocks16(k, at + 2, 18)), _halves(k, at, 18))


def _q4_1(k: Kernel, at: V) -> Unpacked:
    # [d f16][m f16][16 bytes]; + m
    return Unpacked(_nibbles_of_32(k, blocks16(k, at + 4, 20)), _halves(k, at, 20), -_halves(k, at + 2, 20))


def _q5_0(k: Kernel, at: V) -> Unpacked:
    # [d f16][4 bytes of fifth bits][16 bytes]
    low, high = _nibbles_of_32(k, blocks16(k, at + 6, 22)), _fifth_bits(k, at + 2, 22)
    return Unpacked([a | b for a, b in zip(low, high, strict=True)], _halves(k, at, 22))


def _q5_1(k: Kernel, at: V) -> Unpacked:
    # [d f16][m f16][4 bytes of fifth bits][16 bytes]; + m
    low, high = _nibbles_of_32(k, blocks16(k, at + 8, 24)), _fifth_bits(k, at + 4, 24)
    quads = [a | b for a, b in zip(low, high, strict=True)]
    return Unpacked(quads, _halves(k, at, 24), -_halves(k, at + 2, 24))


def _q8_0(k: Kernel, at: V) -> Unpacked:
    # [d f16][32 signed bytes]; an 8 x 8 transposition of dwords in two rounds of two-source picks
    rows = [k.load(at + 2 + 34 * b, I32X8) for b in range(BLOCKS)]
    pairs = [rows[i].concat(rows[i + 1]) for i in range(0, BLOCKS, 2)]
    # after round one, vector (h, p) holds blocks 4 h .. 4 h + 3 at steps 2 p, 2 p + 1 for two p's
    quads = []
    mixed = {}
    for h in (0, 1):
        for p2 in (0, 1):
            index = [16 * (b // 2) + 8 * (b % 2) + s for s in range(4 * p2, 4 * p2 + 4) for b in range(4)]
            mixed[h, p2] = pairs[2 * h].pick(index, pairs[2 * h + 1])  # lane 4 (s % 4) + b
    for p in range(4):
        index = [16 * (b // 4) + 4 * (s % 4) + b % 4 for s, b in per_quad(p)]
        quads.append(mixed[0, p // 2].pick(index, mixed[1, p // 2]) ^ 0x80808080)
    return Unpacked(quads, _halves(k, at, 34))


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _iq4_nl(k: Kernel, at: V) -> Unpacked:
    # [d f16][16 bytes of indices]
    table = [value + 128 for value in _IQ4_VALUES]
    nibbles = _nibbles_of_32(k, blocks16(k, at + 2, 18))
    return Unpacked([k.table16(q, table) for q in nibbles], _halves(k, at, 18))


def _mxfp4(k: Kernel, at: V) -> Unpacked:
    # [exponent e][16 bytes of e2m1]; values are doubled, the scale is 2^(e - 128), subnormal for e < 2
    table = [value + 16 for value in _MXFP4_DOUBLED]
    nibbles = _nibbles_of_32(k, blocks16(k, at + 1, 17))
    e = k.vector([k.load(at + 17 * b, I8) for b in range(BLOCKS)]).zext(I32)
    small = e.compare("<", 2)
    bits = small.select(k.const(0x00200000, I32X8) << e, (e - 1) << 23)
    return Unpacked([k.table16(q, table) for q in nibbles], bits.bitcast(F32X8))


# ---- formats with 256-element blocks


def _nibbles_of_k(k: Kernel, address: V) -> list[V]:
    """Q4_K and Q5_K: 32 bytes hold block 2 c in low, 2 c + 1 in high nibbles."""
    packed = [k.load(address + 64 * i, I32X16) for i in (0, 1)]
    quads = []
    for p in range(4):
        dwords = packed[0].pick([8 * (b // 2) + s for s, b in per_quad(p)], packed[1])
        quads.append((dwords >> k.const([4 * (b % 2) for _, b in per_quad(p)], I32X16)) & 0x0F0F0F0F)
    return quads


def _two_halves(k: Kernel, address: V) -> tuple[V, V]:
    """d and dmin as f32x8."""
    both = k.load(address, type(F32X8)(F16, 2)).to_f32()
    return both.pick([0] * 8), both.pick([1] * 8)


def _q4_k(k: Kernel, at: V) -> Unpacked:
    # [d f16][dmin f16][12 bytes of scales][128 bytes]
    d, dmin = _two_halves(k, at)
    scales, minimums = _k_scales(k, at + 4)
    return Unpacked(_nibbles_of_k(k, at + 16), d * scales.to_f32(), dmin * minimums.to_f32())


def _q5_k(k: Kernel, at: V) -> Unpacked:
    # [d f16][dmin f16][12 bytes of scales][32 bytes of fifth bits: bit b for block b][128 bytes]
    d, dmin = _two_halves(k, at)
    scales, minimums = _k_scales(k, at + 4)
    high = k.load(at + 16, I32X8)
    quads = []
    for p, low in enumerate(_nibbles_of_k(k, at + 48)):
        bits = high.pick([s for s, _ in per_quad(p)]).rotl(k.const([(4 - b) % 32 for _, b in per_quad(p)], I32X16))
        quads.append(low | (bits & 0x10101010))
    return Unpacked(quads, d * scales.to_f32(), dmin * minimums.to_f32())


def _q6_k(k: Kernel, at: V) -> Unpacked:
    # [128 bytes ql][64 bytes qh][16 signed scales][d f16]; block b = 4 n + j
    ql = [k.load(at + 64 * i, I32X16) for i in (0, 1)]
    qh = k.load(at + 128, I32X16)
    quads = []
    for p in range(4):
        lanes = [(s, b // 4, b % 4) for s, b in per_quad(p)]
        low = ql[0].pick([16 * n + 8 * (j % 2) + s for s, n, j in lanes], ql[1])
        low = (low >> k.const([4 * (j // 2) for _, _, j in lanes], I32X16)) & 0x0F0F0F0F
        # bits 2 j, 2 j + 1 of each byte move to bits 4, 5; what crosses into a neighbour byte is masked
        high = qh.pick([8 * n + s for s, n, _ in lanes]).rotl(k.const([(4 - 2 * j) % 32 for _, _, j in lanes], I32X16))
        quads.append(low | (high & 0x30303030))
    sub = even_odd(k.load(at + 192, I8X16).sext(I32))
    return Unpacked(quads, half(k, at + 208).splat(8), None, sub)


def crumbs(k: Kernel, address: V) -> list[V]:
    """Q2_K and Q3_K: 64 bytes; block 4 n + j is bits 2 j, 2 j + 1 of bytes 32 n .. 32 n + 31."""
    packed = k.load(address, I32X16)
    quads = []
    for p in range(4):
        dwords = packed.pick([8 * (b // 4) + s for s, b in per_quad(p)])
        quads.append((dwords >> k.const([2 * (b % 4) for _, b in per_quad(p)], I32X16)) & 0x03030303)
    return quads


def _q2_k(k: Kernel, at: V) -> Unpacked:
    # [16 bytes: low nibble scale, high nibble minimum][64 bytes][d f16][dmin f16]
    d, dmin = _two_halves(k, at + 80)
    packed = k.load(at, I8X16)
    sub_scales = even_odd((packed & 15).zext(I32))
    sub_minimums = even_odd((packed >> 4).zext(I32))
    return Unpacked(crumbs(k, at + 16), d, dmin, sub_scales, sub_minimums)


def _q3_k(k: Kernel, at: V) -> Unpacked:
    # [32 bytes hmask: bit b for block b][64 bytes][12 bytes of scales][d f16]
    mask = k.load(at, I32X8)
    quads = []
    for p, low in enumerate(crumbs(k, at + 32)):
        bits = mask.pick([s for s, _ in per_quad(p)]).rotl(k.const([(2 - b) % 32 for _, b in per_quad(p)], I32X16))
        quads.append(low | (bits & 0x04040404))
    a0, a1, a2 = (k.load(at + 96 + 4 * i, I32) for i in range(3))
    words = [
        (a0 & 0x0F0F0F0F) | ((a2 << 4) & 0x30303030),
        (a1 & 0x0F0F0F0F) | ((a2 << 2) & 0x30303030),
        ((a0 >> 4) & 0x0F0F0F0F) | (a2 & 0x30303030),
        ((a1 >> 4) & 0x0F0F0F0F) | ((a2 >> 2) & 0x30303030),
    ]
    sub = even_odd(k.vector(words).bitcast(I8X16).zext(I32) - 32)
    return Unpacked(quads, half(k, at + 108).splat(8), None, sub)


def _iq4_xs(k: Kernel, at: V) -> Unpacked:
    # [d f16][scales_h u16][4 bytes scales_l][128 bytes: 16 bytes of indices per block]
    table = [value + 128 for value in _IQ4_VALUES]
    packed = [k.load(at + 8 + 64 * i, I32X16) for i in (0, 1)]
    nibbles = _nibbles_of_32(k, packed[0].concat(packed[1]))
    low = k.load(at + 4, I32).splat(8) >> k.const([4 * b for b in range(8)], I32X8)
    high = k.load(at + 2, I16).zext(I32).splat(8) >> k.const([2 * b for b in range(8)], I32X8)
    scales = ((low & 15) | ((high & 3) << 4)) - 32
    return Unpacked([k.table16(q, table) for q in nibbles], half(k, at).splat(8) * scales.to_f32())


PLAIN_FORMATS: dict[str, DotFormat] = {
    f.name: f
    for f in (
        DotFormat("q4_0", 8 * 18, _q4_0, offset=8),
        DotFormat("q4_1", 8 * 20, _q4_1, has_minimum=True),
        DotFormat("q5_0", 8 * 22, _q5_0, offset=16),
        DotFormat("q5_1", 8 * 24, _q5_1, has_minimum=True),
        DotFormat("q8_0", 8 * 34, _q8_0, offset=128),
        DotFormat("iq4_nl", 8 * 18, _iq4_nl, offset=128),
        DotFormat("mxfp4", 8 * 17, _mxfp4, offset=16),
        DotFormat("q2_k", 84, _q2_k, per_16=True, has_minimum=True),
        DotFormat("q3_k", 110, _q3_k, offset=4, per_16=True),
        DotFormat("q4_k", 144, _q4_k, has_minimum=True),
        DotFormat("q5_k", 176, _q5_k, has_minimum=True),
        DotFormat("q6_k", 210, _q6_k, offset=32, per_16=True),
        DotFormat("iq4_xs", 136, _iq4_xs, offset=128),
    )
}
