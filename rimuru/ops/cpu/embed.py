"""Rows of an embedding table in any format, as float32."""

from __future__ import annotations

import numpy as np
from numba import njit

from rimuru.ops.base import Weight
from rimuru.ops.cpu import dot
from rimuru.ops.cpu.dot_kernels import MINIMUM_AT, PANEL_BYTES, SCALE_AT, SUB_MINIMUM_AT, SUB_SCALE_AT
from rimuru.ops.cpu.simd_calls import call, f32_at, f64_at, fetch_add, i32_at, i64_at, u8_at
from rimuru.ops.cpu.simd_launch import address_of, launch, workspace
from rimuru.ops.cpu.work import Worker

(
    _COUNTER, _N_TOKENS, _IDS, _TABLE, _ROW_BYTES, _N_IN, _OUT, _OUT_STRIDE, _EXPAND_FN, _OFFSET, _IS_FLOAT, _PER_16,
    _HAS_MINIMUM, _FLOAT_SUBS, _SCRATCH, _SCRATCH_BYTES, _CHUNK, _SCALE,
) = range(18)  # fmt: skip
_HEADER = 18


@njit(cache=True, nogil=True, fastmath=False)
def _decode_superblock(panel, offset, per_16, has_minimum, float_subs, n, factor, out):  # type: ignore[no-untyped-def]
    """First n weights of a panel record (dot_kernels.py), times factor, in the order of the row."""
    quants = u8_at(panel, 256)
    scales = f32_at(panel + SCALE_AT, 8)
    minimums = f32_at(panel + MINIMUM_AT, 8)
    sub_scales = i32_at(panel + SUB_SCALE_AT, 16)
    float_sub_scales = f32_at(panel + SUB_SCALE_AT, 16)
    sub_minimums = i32_at(panel + SUB_MINIMUM_AT, 16)
    y = f32_at(out, n)
    zero = np.float32(0.0)
    for i in range(n):
        block, step, element = i // 32, i % 32 // 4, i % 4
        half = step // 4
        scale = scales[block]
        minimum = minimums[block] if has_minimum else zero
        if per_16:
            sub = half * 8 + block
            scale = scale * (float_sub_scales[sub] if float_subs else np.float32(sub_scales[sub]))
            if has_minimum:
                minimum = minimum * np.float32(sub_minimums[half * 8 + block])
        value = scale * np.float32(np.int32(quants[step * 32 + block * 4 + element]) - offset)
        y[i] = (value - minimum if has_minimum else value) * factor


@Worker
def _embed_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, _HEADER)
    factor = np.float32(f64_at(context, _HEADER)[_SCALE])
    panel = c[_SCRATCH] + index * c[_SCRATCH_BYTES]
    ids = i32_at(c[_IDS], c[_N_TOKENS])
    n_in = c[_N_IN]
    while True:
        first = fetch_add(context, c[_CHUNK])
        if first >= c[_N_TOKENS]:
            return
        for t in range(first, min(first + c[_CHUNK], c[_N_TOKENS])):
            out = c[_OUT] + t * c[_OUT_STRIDE]
            call(c[_EXPAND_FN], (c[_TABLE] + ids[t] * c[_ROW_BYTES], c[_ROW_BYTES], 1, n_in, panel))
            if c[_IS_FLOAT] != 0:
                row, y = f32_at(panel, n_in), f32_at(out, n_in)
                for i in range(n_in):
                    y[i] = row[i] * factor
            else:
                for s in range((n_in + 255) // 256):
                    _decode_superblock(
                        panel + s * PANEL_BYTES, c[_OFFSET], c[_PER_16] != 0, c[_HAS_MINIMUM] != 0,
                        c[_FLOAT_SUBS] != 0, min(256, n_in - s * 256), factor, out + s * 1024,
                    )  # fmt: skip


_PARALLEL_ELEMENTS = 1 << 17


def embed(table: Weight, token_ids: np.ndarray, scale: float, out: np.ndarray) -> None:
    """out[t] = scale * dequantised row token_ids[t] of table. token_ids int32 [T], out float32 [T, d]."""
    kernels = dot.kernels(table.format.name)
    n_tokens = len(token_ids)
    n_bytes = (kernels.panel_row_bytes(table.n_in) + 63) // 64 * 64
    space = workspace()
    space.context[:_SCALE] = (
        0, n_tokens, address_of(token_ids), address_of(table.data), table.data.strides[0], table.n_in, address_of(out),
        out.strides[0], kernels.expand, kernels.offset, kernels.is_float, kernels.per_16, kernels.has_minimum,
        kernels.float_sub_scales, space.reserve(n_bytes), n_bytes, max(1, n_tokens // 16),
    )  # fmt: skip
    space.context_f64[_SCALE] = scale
    launch(_embed_worker.address, space.context_address, n_tokens * table.n_in >= _PARALLEL_ELEMENTS)
