"""Matrix products with weights in their file format: y = W x for one token, and for many.

One token: every row is read once, straight from its packed bytes. Many tokens: 16 rows at a time are expanded to bytes
in a buffer that stays in the core's cache, and all tokens are multiplied with them in register tiles. Both give the
same bits for a (row, token), whatever the batch and the number of cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from rimuru.ops.base import Act, Weight
from rimuru.ops.cpu import dot
from rimuru.ops.cpu.quantize import quantize_act
from rimuru.ops.cpu.simd_calls import call, f32_at, f64_at, fetch_add, i64_at
from rimuru.ops.cpu.simd_launch import CONTEXT_FIELDS, address_of, launch, threads, workspace
from rimuru.ops.cpu.work import Worker
from rimuru.ops.factors import with_factors

PANEL_ROWS = 16
TILE_TOKENS = 64
"""Tokens between two visits of a panel: 64 records of a row of 2048 are 192 KiB, a part of the L2 cache."""
MAX_CHUNK_ROWS = 1024

# ---- context of the worker: header, then one job per matrix
_COUNTER, _N_CHUNKS, _N_JOBS, _N_TOKENS, _SCALE, _ROW_SCALE, _ADD, _SCRATCH, _SCRATCH_BYTES, _PLAIN = range(10)
_HEADER = 10
(
    _W, _ROW_BYTES, _N_ROWS, _N_IN, _OUT, _OUT_STRIDE, _BIAS, _X, _X_STRIDE, _CHUNK_ROWS, _FIRST_CHUNK,
    _ROWS_FN, _EXPAND_FN, _TILE_1, _TILE_2, _TILE_4, _OFFSET, _PANEL_ROW_BYTES,
) = range(18)  # fmt: skip
_JOB = 18


@njit(cache=True, nogil=True, fastmath=False)
def panel_products(panel, panel_row_bytes, n_rows, n_in, tokens, n_tokens, out, out_stride, offset, tile_1, tile_2, tile_4):  # type: ignore[no-untyped-def]  # fmt: skip # noqa: E501
    """out[t][r] = panel row r . x[tokens[t]] for n_rows rounded up to 4. Addresses; tile_4 may be 0."""
    t = 0
    while t < n_tokens:
        left = n_tokens - t
        if left >= 4 and tile_4 != 0:
            n, tile = 4, tile_4
        elif left >= 2:
            n, tile = 2, tile_2
        else:
            n, tile = 1, tile_1
        call(tile, (panel, panel_row_bytes, n_rows, n_in, tokens + 8 * t, out + t * out_stride, out_stride, offset))
        t += n


@njit(cache=True, nogil=True, fastmath=False)
def _finish(values, n_rows, out, bias, factor, add):  # type: ignore[no-untyped-def]
    """out[r] (+)= factor * (values[r] + bias[r]); addresses of float32, bias may be 0."""
    v = f32_at(values, n_rows)
    y = f32_at(out, n_rows)
    if bias != 0:
        b = f32_at(bias, n_rows)
        if add:
            for r in range(n_rows):
                y[r] += (v[r] + b[r]) * factor
        else:
            for r in range(n_rows):
                y[r] = (v[r] + b[r]) * factor
    elif add:
        for r in range(n_rows):
            y[r] += v[r] * factor
    else:
        for r in range(n_rows):
            y[r] = v[r] * factor


@njit(cache=True, nogil=True, fastmath=False)
def _factor(c, context, t):  # type: ignore[no-untyped-def]
    scale = np.float32(f64_at(context, _HEADER)[_SCALE])
    return scale * f32_at(c[_ROW_SCALE], t + 1)[t] if c[_ROW_SCALE] != 0 else scale


@njit(cache=True, nogil=True, fastmath=False)
def _one_token(c, job, context, first, n_rows, scratch):  # type: ignore[no-untyped-def]
    out = job[_OUT] + first * 4
    target = out if c[_PLAIN] else scratch
    call(job[_ROWS_FN], (job[_W] + first * job[_ROW_BYTES], job[_ROW_BYTES], n_rows, job[_X], job[_N_IN], target))
    if not c[_PLAIN]:
        bias = job[_BIAS] + first * 4 if job[_BIAS] != 0 else 0
        _finish(scratch, n_rows, out, bias, _factor(c, context, 0), c[_ADD] != 0)


@njit(cache=True, nogil=True, fastmath=False)
def _many_tokens(c, job, context, first, n_rows, scratch):  # type: ignore[no-untyped-def]
    tokens = i64_at(scratch, TILE_TOKENS)
    values = scratch + TILE_TOKENS * 8
    panel = values + TILE_TOKENS * PANEL_ROWS * 4
    step = PANEL_ROWS if c[_N_TOKENS] > 4 else 4  # one register tile is enough where few tokens visit it
    for r in range(first, first + n_rows, step):
        n = min(step, first + n_rows - r)
        call(job[_EXPAND_FN], (job[_W] + r * job[_ROW_BYTES], job[_ROW_BYTES], n, job[_N_IN], panel))
        bias = job[_BIAS] + r * 4 if job[_BIAS] != 0 else 0
        for t0 in range(0, c[_N_TOKENS], TILE_TOKENS):
            n_tokens = min(TILE_TOKENS, c[_N_TOKENS] - t0)
            for t in range(n_tokens):
                tokens[t] = job[_X] + (t0 + t) * job[_X_STRIDE]
            panel_products(
                panel, job[_PANEL_ROW_BYTES], n, job[_N_IN], scratch, n_tokens, values, PANEL_ROWS * 4,
                job[_OFFSET], job[_TILE_1], job[_TILE_2], job[_TILE_4],
            )  # fmt: skip
            for t in range(n_tokens):
                out = job[_OUT] + (t0 + t) * job[_OUT_STRIDE] + r * 4
                _finish(values + t * PANEL_ROWS * 4, n, out, bias, _factor(c, context, t0 + t), c[_ADD] != 0)


@Worker
def _linear_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, _HEADER)
    scratch = c[_SCRATCH] + index * c[_SCRATCH_BYTES]
    while True:
        chunk = fetch_add(context, 1)
        if chunk >= c[_N_CHUNKS]:
            return
        i = c[_N_JOBS] - 1
        while i64_at(context + (_HEADER + i * _JOB) * 8, _JOB)[_FIRST_CHUNK] > chunk:
            i -= 1
        job = i64_at(context + (_HEADER + i * _JOB) * 8, _JOB)
        first = (chunk - job[_FIRST_CHUNK]) * job[_CHUNK_ROWS]
        n_rows = min(job[_CHUNK_ROWS], job[_N_ROWS] - first)
        if c[_N_TOKENS] == 1:
            _one_token(c, job, context, first, n_rows, scratch)
        else:
            _many_tokens(c, job, context, first, n_rows, scratch)


def scratch_bytes(n_in: int) -> int:
    """Bytes of a core's buffers for rows of n_in elements."""
    widest = max((n_in + 15) // 16 * 64, (n_in + 255) // 256 * 448)
    return TILE_TOKENS * 8 + TILE_TOKENS * PANEL_ROWS * 4 + PANEL_ROWS * widest


def chunk_rows(n_rows: int, n_workers: int) -> int:
    """Rows that a core takes at a time: several chunks a core, whole panels, never more than MAX_CHUNK_ROWS."""
    wanted = n_rows // (8 * n_workers) // PANEL_ROWS * PANEL_ROWS
    return max(PANEL_ROWS, min(wanted, MAX_CHUNK_ROWS))


_SMALL_WORK = 1 << 17
"""Weights times tokens below which waking other cores costs more than it saves."""


@with_factors
def linear(
    x: Act,
    weights: Sequence[Weight],
    outs: Sequence[np.ndarray],
    biases: Sequence[np.ndarray | None] | None = None,
    add: bool = False,
    scale: float = 1.0,
    row_scale: np.ndarray | None = None,
) -> None:
    """outs[i] (+)= scale * row_scale[t] * (weights[i] x + biases[i]); see ops/base.py.

    outs[i] float32 [T, n_out_i], contiguous in the last axis; all matrices have x's width.
    """
    n_tokens, n_in = x.f32.shape
    n_workers = threads()
    fields: list[int] = []
    n_chunks = 0
    work = 0
    has_bias = False
    for i, weight in enumerate(weights):
        bias = biases[i] if biases is not None else None
        has_bias = has_bias or bias is not None
        source = x.f32 if weight.format.is_float else x.quant.records
        rows = chunk_rows(weight.n_out, n_workers)
        fields += (
            address_of(weight.data), weight.data.strides[0], weight.n_out, n_in, address_of(outs[i]),
            outs[i].strides[0], 0 if bias is None else address_of(bias), address_of(source), source.strides[0], rows,
            n_chunks, *_kernel_fields(weight),
        )  # fmt: skip
        n_chunks += -(-weight.n_out // rows)
        work += weight.n_out
    plain = not add and scale == 1.0 and row_scale is None and not has_bias
    head = (n_chunks, len(weights), n_tokens, 0 if row_scale is None else address_of(row_scale), add, plain)
    _run(fields, head, n_in, scale, work * n_in * n_tokens >= _SMALL_WORK)


def _kernel_fields(weight: Weight) -> tuple[int, ...]:
    """The fields of a job from _ROWS_FN on."""
    kernels = dot.kernels(weight.format.name)
    tiles = kernels.tiles
    return (
        kernels.rows, kernels.expand, tiles[0], tiles[1], tiles[2] if len(tiles) > 2 else 0, kernels.offset,
        kernels.panel_row_bytes(weight.n_in),
    )  # fmt: skip


def _run(fields: Sequence[int] | np.ndarray, head: tuple[int, ...], n_in: int, scale: float, parallel: bool) -> None:
    """Launch jobs. head: chunks, jobs, tokens, address of row_scale or 0, add, plain."""
    space = workspace()
    n_chunks, n_jobs, n_tokens, row_scale, add, plain = head
    n_bytes = max(scratch_bytes(n_in), MAX_CHUNK_ROWS * 4)
    context = space.context
    context[:_HEADER] = (
        0, n_chunks, n_jobs, n_tokens, 0, row_scale, add, space.reserve(n_bytes), n_bytes, plain,
    )  # fmt: skip
    space.context_f64[_SCALE] = scale
    context[_HEADER : _HEADER + len(fields)] = fields
    launch(_linear_worker.address, space.context_address, parallel)


_MAX_JOBS = (CONTEXT_FIELDS - _HEADER) // _JOB


def head_linear(x: np.ndarray, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
    """See `Ops.head_linear`: one job a head, many in a launch. Fills `out.f32` only."""
    n_tokens, n_in, n_out = x.shape[0], weight.n_in, weight.n_out // n_head
    inputs = x.reshape(n_tokens, n_head, -1)
    outputs = out.f32[:n_tokens].reshape(n_tokens, n_head, -1)
    outputs[:, :, n_out:] = inputs[:, :, n_in:]
    heads.f32[: n_tokens * n_head].reshape(inputs.shape[0], n_head, n_in)[...] = inputs[:, :, :n_in]
    if weight.format.is_float:
        source = heads.f32
    else:
        quantize_act(heads, n_tokens * n_head)
        source = heads.quant.records
    # Each call of a kernel has its price, so a head is cut only where heads are too few for all cores.
    rows = min(max(PANEL_ROWS, n_out // max(1, 8 * threads() // n_head) // PANEL_ROWS * PANEL_ROWS), MAX_CHUNK_ROWS)
    chunks = -(-n_out // rows)
    jobs = np.empty((n_head, _JOB), np.int64)
    head = np.arange(n_head)
    jobs[:, _W] = address_of(weight.data) + head * n_out * weight.data.strides[0]
    jobs[:, _OUT] = address_of(outputs) + head * outputs.strides[1]
    jobs[:, _X] = address_of(source) + head * source.strides[0]
    jobs[:, _X_STRIDE] = n_head * source.strides[0]
    jobs[:, (_ROW_BYTES, _N_ROWS, _N_IN, _OUT_STRIDE)] = weight.data.strides[0], n_out, n_in, outputs.strides[0]
    jobs[:, (_BIAS, _CHUNK_ROWS)] = 0, rows
    jobs[:, _FIRST_CHUNK] = head % _MAX_JOBS * chunks
    jobs[:, _ROWS_FN:] = _kernel_fields(weight)
    plain = weight.factor == 1.0
    for first in range(0, n_head, _MAX_JOBS):
        part = jobs[first : first + _MAX_JOBS]
        n_jobs = len(part)
        parallel = n_jobs * n_out * n_in * n_tokens >= _SMALL_WORK
        head_fields = (n_jobs * chunks, n_jobs, n_tokens, 0, 0, plain)
        _run(part.reshape(-1), head_fields, n_in, weight.factor, parallel)
