"""An activation in 8 bits, as the dot kernels read it: one record per 256 elements (eight blocks of 32).

    byte   0  256 signed bytes, [8 steps][8 blocks][4 elements]: element 32 b + 4 s + i at 32 s + 4 b + i
         256  8 scales, float32: amax of the block / 127
         288  8 sums, int32, of the block's signed bytes
         320  16 sums, int32: of elements 0..15 of each block, then of elements 16..31

Sums are integers, so no activation overflows them. Blocks behind the end of a row are zero.
"""

from __future__ import annotations

from rimuru.ops.cpu.dot_formats import BLOCKS
from rimuru.ops.cpu.simd import F32X16, I8, I8X32, I32, I32X8, I32X16, Kernel, V

QUANTS_AT, SCALES_AT, SUMS32_AT, SUMS16_AT = 0, 256, 288, 320
RECORD_BYTES = 384

_SMALLEST_AMAX = 1e-30
"""Blocks below this are zero: 127 / amax would overflow, and no weight makes them matter."""


def record_row_bytes(n_in: int) -> int:
    """Bytes of a token's records for a row of n_in elements."""
    return (n_in + 255) // 256 * RECORD_BYTES


def emit_quantize(k: Kernel, x: V, record_row: V, n_valid_blocks: V, first_block: V, end_block: V) -> None:
    """Blocks first..end of a token's records from float32 at x (the first block's element 0).

    Blocks from n_valid_blocks on are filled with zeros. Infinite or NaN elements make the block's scale so.
    """
    zeros = k.scratch(128)
    k.store(k.const(0.0, F32X16), zeros)
    k.store(k.const(0.0, F32X16), zeros + 64)
    with k.loop(end_block, start=first_block) as block:
        source = block.compare("<", n_valid_blocks).select(x + (block - first_block) * 128, zeros)
        values = [k.load(source + 64 * h, F32X16) for h in (0, 1)]
        # magnitudes of floats are ordered like their bits, NaN on top
        peaks = [k.call_named("llvm.vector.reduce.umax.v16i32", I32, v.bitcast(I32X16) & 0x7FFFFFFF) for v in values]
        amax = peaks[0].compare(">", peaks[1]).select(peaks[0], peaks[1]).bitcast(F32X16.element)
        zero = k.const(0.0, amax.type)
        inverse = amax.compare(">=", _SMALLEST_AMAX).select(k.const(127.0, amax.type) / amax, zero).splat(16)
        scale = amax.compare("<", _SMALLEST_AMAX).select(zero, amax / 127.0)
        record = record_row + (block >> 3) * RECORD_BYTES
        lane = (block & (BLOCKS - 1)) * 4
        sums = []
        rounded = []
        for h, v in enumerate(values):
            q = k.intrinsic("llvm.roundeven", F32X16, v * inverse).to_i32_saturating()
            rounded.append(q.trunc(I8))
            sums.append(k.call_named("llvm.vector.reduce.add.v16i32", I32, q))
            k.store(sums[h], record + lane + SUMS16_AT + 32 * h)
        steps = rounded[0].concat(rounded[1]).bitcast(I32X8)
        assert rounded[0].concat(rounded[1]).type == I8X32
        for s in range(8):
            k.store(steps.lane(s), record + lane + QUANTS_AT + 32 * s)
        k.store(scale, record + lane + SCALES_AT)
        k.store(sums[0] + sums[1], record + lane + SUMS32_AT)
