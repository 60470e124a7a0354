"""Convolutions and recurrences on the CPU: sequences and heads are spread over the threads (see recurrent_heads.py)."""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.base.errors import AuditError
from rimuru.ops.base import Array, StateLayer, Step
from rimuru.ops.cpu.lanes import take_number
from rimuru.ops.cpu.recurrent_heads import conv_item, delta_head, mamba1_block, mamba2_head
from rimuru.ops.cpu.simd_calls import i64_at
from rimuru.ops.cpu.work import FIELDS, NO_FLOATS, Worker, flags, integers, matrix, real, run, vector

_CHANNELS = 256
"""Channels of a work item of the convolution and of Mamba1."""
_PARALLEL_WORK = 1 << 17
"""Multiplications below which starting threads costs more than it brings."""


@Worker
def _conv_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, FIELDS)
    u, out, weight, bias = matrix(c, 0), matrix(c, 1), matrix(c, 2), vector(c, 3)
    query_start, pages, fresh = integers(c, 4), integers(c, 5), flags(c, 6)
    base, page_bytes, column, silu = c[22], c[23], c[24], c[25] != 0
    n_blocks = (weight.shape[0] + _CHANNELS - 1) // _CHANNELS
    item = take_number(context)
    while item < n_blocks * (query_start.shape[0] - 1):
        seq, start = item // n_blocks, item % n_blocks * _CHANNELS
        conv_item(
            u, weight, bias, silu, query_start[seq, 0], query_start[seq + 1, 0],
            base + np.int64(pages[seq, column]) * page_bytes, page_bytes, fresh[seq] != 0, start,
            min(weight.shape[0], start + _CHANNELS), out,
        )  # fmt: skip
        item = take_number(context)


def conv_update(
    u: Array, weight: Array, bias: Array | None, silu: bool, step: Step, state: StateLayer, out: Array
) -> None:
    """See `Ops.conv_update`. u and out must not overlap."""
    if state.conv is None:
        raise AuditError("conv_update was called for a layer without a convolution state")
    run(
        _conv_worker,
        (
            u, out, weight, NO_FLOATS if bias is None else bias, step.query_start, step.conv_pages,
            step.fresh_state.view(np.uint8),
        ),
        (state.pool_base, state.conv.page_bytes, state.conv_column, silu),
        u.size * weight.shape[1] > _PARALLEL_WORK,
    )  # fmt: skip


def _recur(
    worker: Worker,
    arrays: tuple[Array, ...],
    step: Step,
    state: StateLayer,
    numbers: tuple[int | float, ...],
    work: int,
) -> None:
    """Run a recurrence. Context: 8 arrays (unused ones empty), query_start, pages, fresh; base, page bytes, column."""
    if state.ssm is None:
        raise AuditError("a recurrence was called for a layer without a recurrent state")
    padded = (*arrays, *[NO_FLOATS] * (8 - len(arrays)))
    run(
        worker,
        (*padded, step.query_start, step.ssm_pages, step.fresh_state.view(np.uint8)),
        (state.pool_base, state.ssm.page_bytes, state.ssm_column, *numbers),
        work > _PARALLEL_WORK,
    )


@Worker
def _delta_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, FIELDS)
    qkv, out, beta, alpha = matrix(c, 0), matrix(c, 1), matrix(c, 2), matrix(c, 3)
    a, dt_bias = vector(c, 4), vector(c, 5)
    query_start, pages, fresh = integers(c, 8), integers(c, 9), flags(c, 10)
    n_key, n_value, dim, tiled, eps = c[37], c[38], c[39], c[40] != 0, real(context, 41)
    item = take_number(context)
    while item < n_value * (query_start.shape[0] - 1):
        seq, head = item // n_value, item % n_value
        key_head = head % n_key if tiled else head // (n_value // n_key)
        address = c[34] + np.int64(pages[seq, c[36]]) * c[35] + head * dim * dim * 4
        delta_head(
            qkv, beta, alpha, a[head], dt_bias[head], head, key_head, n_key, dim, eps, query_start[seq, 0],
            query_start[seq + 1, 0], address, fresh[seq] != 0, out,
        )  # fmt: skip
        item = take_number(context)


def delta_net(
    qkv: Array,
    beta: Array,
    alpha: Array,
    a: Array,
    dt_bias: Array,
    spec: DeltaNetSpec,
    eps: float,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    """See `Ops.delta_net`."""
    _recur(
        _delta_worker,
        (qkv, out, beta, alpha, a.reshape(-1), dt_bias),
        step,
        state,
        (spec.n_key_heads, spec.n_value_heads, spec.head_dim, spec.head_order == "tiled", float(eps)),
        qkv.shape[0] * spec.n_value_heads * spec.head_dim**2,
    )


@Worker
def _mamba2_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, FIELDS)
    xbc, out, dt, a, d, dt_bias = matrix(c, 0), matrix(c, 1), matrix(c, 2), vector(c, 3), vector(c, 4), vector(c, 5)
    query_start, pages, fresh = integers(c, 8), integers(c, 9), flags(c, 10)
    n_heads, dim, size = c[37], c[39], c[40]
    item = take_number(context)
    while item < n_heads * (query_start.shape[0] - 1):
        seq, head = item // n_heads, item % n_heads
        address = c[34] + np.int64(pages[seq, c[36]]) * c[35] + head * dim * size * 4
        mamba2_head(
            xbc, dt, a[head], d[head], dt_bias[head], head, n_heads, c[38], dim, size, query_start[seq, 0],
            query_start[seq + 1, 0], address, fresh[seq] != 0, out,
        )  # fmt: skip
        item = take_number(context)


def mamba2(
    xbc: Array,
    dt: Array,
    a: Array,
    d: Array,
    dt_bias: Array,
    spec: Mamba2Spec,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    """See `Ops.mamba2`."""
    _recur(
        _mamba2_worker,
        (xbc, out, dt, a.reshape(-1), d.reshape(-1), dt_bias),
        step,
        state,
        (spec.n_heads, spec.n_groups, spec.inner_size // spec.n_heads, spec.state_size),
        xbc.shape[0] * spec.inner_size * spec.state_size,
    )


@Worker
def _mamba1_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, FIELDS)
    x, out, dt, b, c_rows = matrix(c, 0), matrix(c, 1), matrix(c, 2), matrix(c, 3), matrix(c, 4)
    a, d = matrix(c, 5), vector(c, 6)
    query_start, pages, fresh = integers(c, 8), integers(c, 9), flags(c, 10)
    channels, size = a.shape
    n_blocks = (channels + _CHANNELS - 1) // _CHANNELS
    item = take_number(context)
    while item < n_blocks * (query_start.shape[0] - 1):
        seq, start = item // n_blocks, item % n_blocks * _CHANNELS
        address = c[34] + np.int64(pages[seq, c[36]]) * c[35] + start * size * 4
        mamba1_block(
            x, dt, b, c_rows, a, d, start, min(channels, start + _CHANNELS), query_start[seq, 0],
            query_start[seq + 1, 0], address, fresh[seq] != 0, out,
        )  # fmt: skip
        item = take_number(context)


def mamba1(
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    a: Array,
    d: Array,
    spec: Mamba1Spec,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    """See `Ops.mamba1`."""
    work = x.shape[0] * spec.inner_size * spec.state_size
    _recur(_mamba1_worker, (x, out, dt, b, c, a, d), step, state, (), work)
