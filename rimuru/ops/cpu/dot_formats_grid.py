"""How formats made of grids, ternary digits and sub-scaled 4-bit floats look to the kernels (see dot_formats.py).

A grid code stands for 8 weights, the two steps of quad p of a block (group p), or in IQ3 for the 4 weights of one lane.
Grids are tables in the code, with the format's offset added to the levels, so a sign turns a byte t into 2 offset - t.
Codes are read and looked up one by one: on the processors at hand that beats the gather instructions by a third to two
thirds, and taking codes out of vectors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rimuru.formats.quants_grid import GRID_OF, grid
from rimuru.formats.quants_ref_grid import E2M1_DOUBLED
from rimuru.ops.cpu.dot_formats import BLOCKS, DotFormat, Unpacked, crumbs, even_odd, half, per_quad
from rimuru.ops.cpu.simd import F32X8, I8, I8X16, I8X64, I16, I32, I32X4, I32X8, I32X16, I64, Kernel, V, ir

SIGNED_OFFSET = 64
"""Of the formats with signs: more than their largest level, 62."""
IQ1_OFFSET = 16
"""IQ1 weights are eighths: 8 times the level -1, 0 or 1, plus or minus 1."""

I16X8, I16X32 = ir.VectorType(I16, 8), ir.VectorType(I16, 32)
I8X8 = ir.VectorType(I8, 8)
_TERNARY_OFFSET, _NVFP4_OFFSET = 1, 16


# ---- pieces


def _look_up(k: Kernel, name: str, codes: Sequence[V], factor: int, offset: int) -> V:
    """A quad of grid levels times factor plus offset. codes, i64: of a group of each block; in IQ3 of each lane."""
    table_name = GRID_OF[name]
    points = (grid(table_name).astype(int) * factor + offset).astype("u1")
    element, n_bytes = (I32, 4) if points.shape[1] == 4 else (I64, 8)
    table = k.constants(f"grid_{table_name}", points.view(f"<u{n_bytes}").ravel().tolist(), element)
    found = k.vector([k.load(table + code * n_bytes, element) for code in codes])
    return found if element == I32 else found.bitcast(I32X16).pick([*range(0, 16, 2), *range(1, 16, 2)])


def _codes(
    k: Kernel, addresses: Sequence[V], high: Sequence[V] | None = None, shift: int = 0, mask: int = 0
) -> list[V]:
    """Bytes at addresses as numbers, with bits of the words `high`, shifted left by `shift`, above them."""
    low = [k.load(address, I8).zext(I64) for address in addresses]
    if high is None:
        return low
    moved = [word << shift if shift >= 0 else word >> -shift for word in high]
    return [byte | (word & mask) for byte, word in zip(low, moved, strict=True)]


def _words(k: Kernel, address: V, element: ir.Type) -> list[V]:
    """A number of each block, as i64 scalars."""
    return [k.load(address + b * (element.width // 8), element).zext(I64) for b in range(BLOCKS)]


def _signed(k: Kernel, quad: V, signs: V, p: int) -> V:
    """Levels with their signs: bit e of byte p of dword b of `signs` (i32x8) makes element e of the group negative."""
    by_element = signs.twice().bitcast(I8X64).pick([4 * lane + p for lane in range(16) for _ in range(4)])
    selector = k.const([1 << (4 * (lane // 8) + i) for lane in range(16) for i in range(4)], I8X64)
    levels = quad.bitcast(I8X64)
    negative = (by_element & selector).compare("!=", 0)
    return negative.select(k.const(2 * SIGNED_OFFSET, I8X64) - levels, levels).bitcast(I32X16)


def _even_signs(index: V) -> V:
    """Four 7-bit sign indices in the bytes of each dword, with bit 7 set where the number of set bits is odd."""
    parity = index ^ (index >> 4)  # what comes from the next byte lands in the upper nibble, and is not used
    parity = parity ^ ((parity & 0x0F0F0F0F) >> 2)
    parity = parity ^ ((parity & 0x03030303) >> 1)
    return index | ((parity & 0x01010101) << 7)


def _spread_sevens(words: V) -> V:
    """The lower 28 bits of each dword as four bytes of 7 bits."""
    parts = [(words << i) & (0x7F << (8 * i)) for i in range(4)]
    return parts[0] | parts[1] | (parts[2] | parts[3])


def _second_dwords(k: Kernel, address: V) -> V:
    """The second one of each block's two dwords, i32x8."""
    return even_odd(k.load(address, I32X16))[1]


def _bytes_as_i32(k: Kernel, address: V) -> V:
    return k.load(address, I8X8).zext(I32)


def _nibble_scales(k: Kernel, address: V) -> tuple[V, V]:
    """1 + 2 s of the 16 steps s in 8 bytes of nibbles: of elements 0..15 and of 16..31 of each block."""
    packed = _bytes_as_i32(k, address)
    return (packed & 15) * 2 + 1, (packed >> 4) * 2 + 1


def _scale(k: Kernel, address: V, factor: float) -> V:
    return (half(k, address) * factor).splat(8)


# ---- IQ2 and IQ3


def _signed_quads(k: Kernel, name: str, codes: Callable[[int], list[V]], signs: V) -> list[V]:
    return [_signed(k, _look_up(k, name, codes(p), 1, SIGNED_OFFSET), signs, p) for p in range(4)]


def _iq2_xxs(k: Kernel, at: V) -> Unpacked:
    # [d f16][8 x (4 codes, u32: 4 x 7-bit sign index, 4-bit step)]
    words = _second_dwords(k, at + 2)
    signs = _even_signs(_spread_sevens(words))

    def codes(p: int) -> list[V]:
        return _codes(k, [at + (2 + 8 * b + p) for b in range(BLOCKS)])

    quads = _signed_quads(k, "iq2_xxs", codes, signs)
    return Unpacked(quads, _scale(k, at, 0.125) * ((words >> 28) * 2 + 1).to_f32())


def _iq2_xs(k: Kernel, at: V) -> Unpacked:
    # [d f16][32 x u16: 9-bit code, 7-bit sign index][8 bytes of steps]
    first, second = even_odd(k.load(at + 2, I32X16))
    low = ((first >> 9) & 0x7F) | ((first >> 17) & 0x7F00)
    signs = _even_signs(low | ((second << 7) & 0x7F0000) | ((second >> 1) & 0x7F000000))

    def codes(p: int) -> list[V]:
        return [k.load(at + (2 + 8 * b + 2 * p), I16).zext(I64) & 511 for b in range(BLOCKS)]

    return Unpacked(_signed_quads(k, "iq2_xs", codes, signs), _scale(k, at, 0.125), None, _nibble_scales(k, at + 66))


def _iq2_s(k: Kernel, at: V) -> Unpacked:
    # [d f16][32 bytes: low 8 bits of the code][32 sign bytes][8 bytes: high 2 bits][8 bytes of steps]
    high = _words(k, at + 66, I8)

    def codes(p: int) -> list[V]:
        return _codes(k, [at + (2 + 4 * b + p) for b in range(BLOCKS)], high, 8 - 2 * p, 0x300)

    quads = _signed_quads(k, "iq2_s", codes, k.load(at + 34, I32X8))
    return Unpacked(quads, _scale(k, at, 0.125), None, _nibble_scales(k, at + 74))


def _iq3_xxs(k: Kernel, at: V) -> Unpacked:
    # [d f16][64 codes][8 x u32: 4 x 7-bit sign index, 4-bit step]
    words = k.load(at + 66, I32X8)

    def codes(p: int) -> list[V]:
        return _codes(k, [at + (2 + 8 * b + s) for s, b in per_quad(p)])

    quads = _signed_quads(k, "iq3_xxs", codes, _even_signs(_spread_sevens(words)))
    return Unpacked(quads, _scale(k, at, 0.25) * ((words >> 28) * 2 + 1).to_f32())


def _iq3_s(k: Kernel, at: V) -> Unpacked:
    # [d f16][64 bytes: low 8 bits of the code][8 bytes: bit s for step s][32 sign bytes][4 bytes of steps]
    high = _words(k, at + 66, I8)

    def codes(p: int) -> list[V]:
        found = []
        for s in (2 * p, 2 * p + 1):
            found += _codes(k, [at + (2 + 8 * b + s) for b in range(BLOCKS)], high, 8 - s, 0x100)
        return found

    quads = _signed_quads(k, "iq3_s", codes, k.load(at + 74, I32X8))
    steps = (k.load(at + 106, I32).splat(8) >> k.const([4 * b for b in range(8)], I32X8)) & 15
    return Unpacked(quads, _scale(k, at, 1.0) * (steps * 2 + 1).to_f32())


# ---- IQ1


def _shifted(k: Kernel, name: str, codes: list[V], negative: V) -> V:
    """A quad of IQ1 eighths; negative i32x8: 1 where the group's shift is minus one eighth."""
    quad = _look_up(k, name, codes, 8, IQ1_OFFSET)
    # +1 or -1 in every byte; bytes are 8, 16 or 24, so nothing is borrowed
    return quad + negative.compare("!=", 0).select(-0x01010101, k.const(0x01010101, I32X8)).twice()


def _iq1_s(k: Kernel, at: V) -> Unpacked:
    # [d f16][32 bytes: low 8 bits of the code][8 x u16: 4 x high 3 bits, 3-bit step, sign of the shift]
    high = _words(k, at + 34, I16)
    words = k.load(at + 34, I16X8).zext(I32)
    quads = []
    for p in range(4):
        codes = _codes(k, [at + (2 + 4 * b + p) for b in range(BLOCKS)], high, 8 - 3 * p, 0x700)
        quads.append(_shifted(k, "iq1_s", codes, words >> 15))
    return Unpacked(quads, _scale(k, at, 0.125) * (((words >> 12) & 7) * 2 + 1).to_f32())


def _iq1_m(k: Kernel, at: V) -> Unpacked:
    # [32 bytes: low 8 bits of the code][16 bytes: nibbles of 3 high bits and the sign of the shift]
    # [4 x u16: 4 x 3-bit step, a nibble of d]
    high = _words(k, at + 32, I16)
    words = k.load(at + 32, I16X8).zext(I32)
    quads = []
    for p in range(4):
        codes = _codes(k, [at + (4 * b + p) for b in range(BLOCKS)], high, 8 - 4 * p, 0x700)
        quads.append(_shifted(k, "iq1_m", codes, (words >> (4 * p + 3)) & 1))
    packed = k.load(at + 48, I64)
    d_bits = (packed >> 12) & 0xF | (packed >> 24) & 0xF0 | (packed >> 36) & 0xF00 | (packed >> 48) & 0xF000
    d = d_bits.trunc(I16).bitcast(ir.HalfType()).to_f32() * 0.125
    steps = packed.splat(8) >> k.const([16 * (b // 2) + 6 * (b % 2) for b in range(8)], ir.VectorType(I64, 8))
    first, second = (((steps >> shift) & 7).trunc(I32) * 2 + 1 for shift in (0, 3))
    return Unpacked(quads, d.splat(8), None, (first, second))


# ---- ternary


def _tq1_0(k: Kernel, at: V) -> Unpacked:
    # [48 bytes of 5 ternary digits][4 bytes of 4 digits][d f16]: block b < 5 is digit b of bytes 0..31, the rest digits
    # 0..4 of bytes 32..47, then digits 0..3 of the last four
    dwords = k.load(at, I32X8).concat(k.load(at + 32, I32X4).concat(k.load(at + 48, I32).splat(4)))

    def place(s: int, b: int) -> tuple[int, int]:
        """(dword, digit) of a step of a block."""
        if b < 5:
            return s, b
        run = 2 * (b - 5) + s // 4  # of 16 elements
        return (8 + s % 4, run) if run < 5 else (12, s % 4)

    quads = []
    for p in range(4):
        places = [place(s, b) for s, b in per_quad(p)]
        bytes_ = dwords.pick([dword for dword, _ in places]).bitcast(I16X32)
        power = k.const([3**digit for _, digit in places for _ in range(2)], I16X32)
        # digit = high byte of 3 * (byte * 3^i modulo 256), for the lower and the upper byte of each 16 bits
        lower = (((bytes_ & 255) * power) & 255) * 3 >> 8
        upper = (((bytes_ >> 8) * power) & 255) * 3 & 0xFF00
        quads.append((lower | upper).bitcast(I32X16))
    return Unpacked(quads, half(k, at + 52).splat(8))


def _tq2_0(k: Kernel, at: V) -> Unpacked:
    # [64 bytes][d f16]; codes lie as in Q2_K
    return Unpacked(crumbs(k, at), half(k, at + 64).splat(8))


# ---- NVFP4


def _nvfp4(k: Kernel, at: V) -> Unpacked:
    # 4 x [4 scales u8][32 bytes: for 16 elements 8 bytes, elements 0..7 in low, 8..15 in high nibbles]
    table = [int(value) + _NVFP4_OFFSET for value in E2M1_DOUBLED]
    parts = [k.load(at + 36 * c + 4, I32X8) for c in range(4)]
    packed = [parts[0].concat(parts[1]), parts[2].concat(parts[3])]  # dword 8 c + 4 (b % 2) + 2 half + (s % 2)
    quads = []
    for p in range(4):
        index = [4 * b + 2 * (s // 4) + s % 2 for s, b in per_quad(p)]
        nibbles = (packed[0].pick(index, packed[1]) >> (4 * (p % 2))) & 0x0F0F0F0F
        quads.append(k.table16(nibbles, table))
    codes = k.vector([k.load(at + 36 * c, I32) for c in range(4)]).bitcast(I8X16).zext(I32)
    return Unpacked(quads, k.const(0.5, F32X8), None, even_odd(_ue4m3(k, codes)))


def _ue4m3(k: Kernel, codes: V) -> V:
    """Values of 16 scale bytes: 4 bits of exponent with bias 7, 3 of mantissa; 0x7F is zero."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).bitcast(ir.VectorType(F32X8.element, 16))
    value = exponent.compare("==", 0).select(mantissa.to_f32() * 2.0**-9, normal)
    return codes.compare("==", 0x7F).select(0.0, value)


GRID_FORMATS: dict[str, DotFormat] = {
    f.name: f
    for f in (
        DotFormat("iq1_s", 50, _iq1_s, offset=IQ1_OFFSET),
        DotFormat("iq1_m", 56, _iq1_m, offset=IQ1_OFFSET, per_16=True),
        DotFormat("iq2_xxs", 66, _iq2_xxs, offset=SIGNED_OFFSET),
        DotFormat("iq2_xs", 74, _iq2_xs, offset=SIGNED_OFFSET, per_16=True),
        DotFormat("iq2_s", 82, _iq2_s, offset=SIGNED_OFFSET, per_16=True),
        DotFormat("iq3_xxs", 98, _iq3_xxs, offset=SIGNED_OFFSET),
        DotFormat("iq3_s", 110, _iq3_s, offset=SIGNED_OFFSET),
        DotFormat("tq1_0", 54, _tq1_0, offset=_TERNARY_OFFSET),
        DotFormat("tq2_0", 66, _tq2_0, offset=_TERNARY_OFFSET),
        DotFormat("nvfp4", 4 * 36, _nvfp4, offset=_NVFP4_OFFSET, per_16=True, float_sub_scales=True),
    )
}
