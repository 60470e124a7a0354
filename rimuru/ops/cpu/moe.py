"""The routed experts of a layer in one launch.

Pairs (token, slot) are grouped by expert. Two kinds of tasks, taken in order from one counter:

    up    (group, up to 64 of its tokens, 64 rows)     gate and up rows -> activation -> hidden, in 8 bits
    down  (group, up to 64 of its tokens, 128 rows)    down rows . hidden -> scratch.out[token * k + slot]

A down task waits until its group's up tasks are done. All up tasks come first, so whoever waits does so for a task that
somebody is already working on: there is no deadlock, and with several experts hardly any waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from rimuru.arch.spec import MoeSpec
from rimuru.memory.specs import ProjectionLayout
from rimuru.ops.base import Act, ExpertTable, MoeScratch
from rimuru.ops.cpu import dot, dot_activations
from rimuru.ops.cpu.matmul import PANEL_ROWS, panel_products, scratch_bytes
from rimuru.ops.cpu.quantize_record import record_row_bytes
from rimuru.ops.cpu.simd_calls import (
    call,
    f32_at,
    f64_at,
    fetch_add,
    i32_at,
    i64_at,
    load_atomic,
    pause,
    u8_at,
)
from rimuru.ops.cpu.simd_launch import address_of, aligned_empty, launch, workspace
from rimuru.ops.cpu.work import Worker

TILE_TOKENS = 128
UP_ROWS = 64
DOWN_ROWS = 64
_BUFFER_FLOATS = TILE_TOKENS * DOWN_ROWS + PANEL_ROWS  # the last tile of a panel writes up to 4 rows

# ---- context: header, then the descriptions of gate, up, down
(
    _COUNTER, _N_TASKS, _N_UP_TASKS, _N_GROUPS, _N_TOKENS, _TOP_K, _N_EXPERTS, _IDS, _ACTIVE, _ADDRESSES, _N_PAGES,
    _GATED, _N_FF, _N_OUT, _HIDDEN, _HIDDEN_BYTES, _OUT, _GROUPS, _GROUP_OF, _PAIRS, _QUANTIZE, _GLU,
    _SCRATCH, _SCRATCH_BYTES,
) = range(24)  # fmt: skip
_HEADER = 24
(
    _ROW_BYTES, _ROWS_PER_PAGE, _FIRST_PAGE, _N_IN, _BIAS, _BIAS_BYTES, _X, _X_STRIDE,
    _ROWS_FN, _EXPAND_FN, _TILE_1, _TILE_2, _TILE_4, _OFFSET, _PANEL_ROW_BYTES, _IS_FLOAT, _FACTOR,
) = range(17)  # fmt: skip
_PROJECTION = 17
_GATE, _UP, _DOWN = range(3)

# ---- a group: [expert, first pair, pairs, first up task, first down task, up tasks done, up tasks]
_EXPERT, _FIRST_PAIR, _N_PAIRS, _FIRST_UP, _FIRST_DOWN, _DONE, _UP_TASKS = range(7)
_GROUP = 8


@dataclass(slots=True)
class _Private:
    hidden: np.ndarray  # uint8 [pairs, bytes]: 8-bit records or float32, as the down projection's format needs
    groups: np.ndarray  # int64 [n_experts, _GROUP]
    group_of: np.ndarray  # int64 [n_experts]
    pairs: np.ndarray  # int64 [pairs]: token * k + slot, by group


@njit(cache=True, nogil=True, fastmath=False)
def _group_pairs(context):  # type: ignore[no-untyped-def]
    """Counting sort of the pairs by expert, and the numbering of tasks."""
    c = i64_at(context, _HEADER)
    n_pairs = c[_N_TOKENS] * c[_TOP_K]
    n_experts = c[_N_EXPERTS]
    ids = i32_at(c[_IDS], n_pairs)
    groups = i64_at(c[_GROUPS], n_experts * _GROUP).reshape(n_experts, _GROUP)
    pairs = i64_at(c[_PAIRS], n_pairs)
    group_of = i64_at(c[_GROUP_OF], n_experts)  # holds the experts' counts first
    for e in range(n_experts):
        group_of[e] = 0
    for i in range(n_pairs):
        if 0 <= ids[i] < n_experts and (c[_ACTIVE] == 0 or u8_at(c[_ACTIVE], n_experts)[ids[i]] != 0):
            group_of[ids[i]] += 1
    n_groups = 0
    first = 0
    for e in range(n_experts):
        n = group_of[e]
        group_of[e] = n_groups if n > 0 else -1
        if n > 0:
            g = groups[n_groups]
            g[_EXPERT], g[_FIRST_PAIR], g[_N_PAIRS] = e, first, 0
            n_groups += 1
            first += n
    for i in range(n_pairs):
        if 0 <= ids[i] < n_experts and group_of[ids[i]] >= 0:
            g = groups[group_of[ids[i]]]
            pairs[g[_FIRST_PAIR] + g[_N_PAIRS]] = i
            g[_N_PAIRS] += 1
    n_up_chunks = (c[_N_FF] + UP_ROWS - 1) // UP_ROWS
    n_down_chunks = (c[_N_OUT] + DOWN_ROWS - 1) // DOWN_ROWS
    n_up = 0
    n_down = 0
    for i in range(n_groups):
        g = groups[i]
        n_tiles = (g[_N_PAIRS] + TILE_TOKENS - 1) // TILE_TOKENS
        g[_FIRST_UP], g[_FIRST_DOWN], g[_DONE], g[_UP_TASKS] = n_up, n_down, 0, n_tiles * n_up_chunks
        n_up += n_tiles * n_up_chunks
        n_down += n_tiles * n_down_chunks
    c[_N_GROUPS], c[_N_UP_TASKS], c[_N_TASKS] = n_groups, n_up, n_up + n_down


@njit(cache=True, nogil=True, fastmath=False)
def _find_group(c, task, column):  # type: ignore[no-untyped-def]
    """Address of the group that a task (numbered from 0 within its kind) belongs to."""
    low, high = 0, c[_N_GROUPS] - 1
    while low < high:
        middle = (low + high + 1) // 2
        if i64_at(c[_GROUPS] + middle * _GROUP * 8, _GROUP)[column] <= task:
            low = middle
        else:
            high = middle - 1
    return c[_GROUPS] + low * _GROUP * 8


@njit(cache=True, nogil=True, fastmath=False)
def _project(c, p, expert, first, n_rows, tokens, n_tokens, out, stride, panel):  # type: ignore[no-untyped-def]
    """out[t][r] = row first + r of a projection . x[tokens[t]], times its factor, plus its bias. stride in bytes.

    Rows are found through the expert's pages, which need not be neighbours.
    """
    pages = i64_at(c[_ADDRESSES] + expert * c[_N_PAGES] * 8, c[_N_PAGES])
    step = n_rows if n_tokens == 1 else PANEL_ROWS
    for r0 in range(0, n_rows, step):
        n = min(step, n_rows - r0)
        r = 0
        while r < n:
            page, in_page = divmod(first + r0 + r, p[_ROWS_PER_PAGE])
            m = min(n - r, p[_ROWS_PER_PAGE] - in_page)
            w = pages[p[_FIRST_PAGE] + page] + in_page * p[_ROW_BYTES]
            if n_tokens == 1:
                call(p[_ROWS_FN], (w, p[_ROW_BYTES], m, i64_at(tokens, 1)[0], p[_N_IN], out + (r0 + r) * 4))
            else:
                call(p[_EXPAND_FN], (w, p[_ROW_BYTES], m, p[_N_IN], panel + r * p[_PANEL_ROW_BYTES]))
            r += m
        if n_tokens > 1:
            panel_products(
                panel, p[_PANEL_ROW_BYTES], n, p[_N_IN], tokens, n_tokens, out + r0 * 4, stride,
                p[_OFFSET], p[_TILE_1], p[_TILE_2], p[_TILE_4],
            )  # fmt: skip
    if p[_FACTOR] != 0:
        factor = f32_at(p[_FACTOR] + expert * 4, 1)[0]
        for t in range(n_tokens):
            row = f32_at(out + t * stride, n_rows)
            for r in range(n_rows):
                row[r] *= factor
    if p[_BIAS] != 0:
        bias = f32_at(p[_BIAS] + expert * p[_BIAS_BYTES] + first * 4, n_rows)
        for t in range(n_tokens):
            row = f32_at(out + t * stride, n_rows)
            for r in range(n_rows):
                row[r] += bias[r]


@njit(cache=True, nogil=True, fastmath=False)
def _copy(target, source, n):  # type: ignore[no-untyped-def]
    a, b = f32_at(target, n), f32_at(source, n)
    for i in range(n):  # an assignment of slices would compile checks and their texts
        a[i] = b[i]


@njit(cache=True, nogil=True, fastmath=False)
def _projection(context, which):  # type: ignore[no-untyped-def]
    return i64_at(context + (_HEADER + which * _PROJECTION) * 8, _PROJECTION)


@njit(cache=True, nogil=True, fastmath=False)
def _up_task(context, c, task, scratch):  # type: ignore[no-untyped-def]
    group_at = _find_group(c, task, _FIRST_UP)
    g = i64_at(group_at, _GROUP)
    n_chunks = (c[_N_FF] + UP_ROWS - 1) // UP_ROWS
    tile, chunk = divmod(task - g[_FIRST_UP], n_chunks)
    first = chunk * UP_ROWS
    n_rows = min(UP_ROWS, c[_N_FF] - first)
    n_tokens = min(TILE_TOKENS, g[_N_PAIRS] - tile * TILE_TOKENS)
    pairs = i64_at(c[_PAIRS] + (g[_FIRST_PAIR] + tile * TILE_TOKENS) * 8, n_tokens)
    tokens = i64_at(scratch, TILE_TOKENS)
    gate_values = scratch + TILE_TOKENS * 8
    up_values = gate_values + _BUFFER_FLOATS * 4
    panel = up_values + _BUFFER_FLOATS * 4
    stride = UP_ROWS * 4
    for which, values in ((_GATE, gate_values), (_UP, up_values)):
        if which == _UP or c[_GATED] != 0:
            p = _projection(context, which)
            for i in range(n_tokens):
                tokens[i] = p[_X] + pairs[i] // c[_TOP_K] * p[_X_STRIDE]
            _project(c, p, g[_EXPERT], first, n_rows, scratch, n_tokens, values, stride, panel)
    call(c[_GLU], (gate_values, up_values, up_values, (n_tokens - 1) * UP_ROWS + n_rows))
    is_float = _projection(context, _DOWN)[_IS_FLOAT] != 0
    last = first + n_rows == c[_N_FF]
    for i in range(n_tokens):
        hidden = c[_HIDDEN] + pairs[i] * c[_HIDDEN_BYTES]
        if is_float:
            _copy(hidden + first * 4, up_values + i * stride, n_rows)
        else:
            end = (c[_N_FF] + 255) // 256 * 8 if last else (first + n_rows) // 32
            call(c[_QUANTIZE], (up_values + i * stride, hidden, c[_N_FF] // 32, first // 32, end))
    fetch_add(group_at + _DONE * 8, 1)


@njit(cache=True, nogil=True, fastmath=False)
def _down_task(context, c, task, scratch):  # type: ignore[no-untyped-def]
    group_at = _find_group(c, task, _FIRST_DOWN)
    g = i64_at(group_at, _GROUP)
    n_chunks = (c[_N_OUT] + DOWN_ROWS - 1) // DOWN_ROWS
    tile, chunk = divmod(task - g[_FIRST_DOWN], n_chunks)
    first = chunk * DOWN_ROWS
    n_rows = min(DOWN_ROWS, c[_N_OUT] - first)
    n_tokens = min(TILE_TOKENS, g[_N_PAIRS] - tile * TILE_TOKENS)
    pairs = i64_at(c[_PAIRS] + (g[_FIRST_PAIR] + tile * TILE_TOKENS) * 8, n_tokens)
    tokens = i64_at(scratch, TILE_TOKENS)
    values = scratch + TILE_TOKENS * 8
    panel = values + 2 * _BUFFER_FLOATS * 4
    p = _projection(context, _DOWN)
    for i in range(n_tokens):
        tokens[i] = c[_HIDDEN] + pairs[i] * c[_HIDDEN_BYTES]
    while load_atomic(group_at + _DONE * 8) < g[_UP_TASKS]:
        pause()
    _project(c, p, g[_EXPERT], first, n_rows, scratch, n_tokens, values, DOWN_ROWS * 4, panel)
    for i in range(n_tokens):
        _copy(c[_OUT] + (pairs[i] * c[_N_OUT] + first) * 4, values + i * DOWN_ROWS * 4, n_rows)


@Worker
def _experts_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, _HEADER)
    scratch = c[_SCRATCH] + index * c[_SCRATCH_BYTES]
    while True:
        task = fetch_add(context, 1)
        if task >= c[_N_TASKS]:
            return
        if task < c[_N_UP_TASKS]:
            _up_task(context, c, task, scratch)
        else:
            _down_task(context, c, task - c[_N_UP_TASKS], scratch)


def moe_scratch(max_tokens: int, spec: MoeSpec, n_in: int) -> MoeScratch:
    """Everything the expert kernels need for up to max_tokens tokens of input width n_in."""
    n_pairs, row_bytes = max_tokens * spec.top_k, _hidden_row_bytes(spec)
    private = _Private(
        aligned_empty(n_pairs * row_bytes).reshape(n_pairs, row_bytes),
        np.zeros((spec.n_experts, _GROUP), np.int64),
        np.zeros(spec.n_experts, np.int64),
        np.zeros(n_pairs, np.int64),
    )
    return MoeScratch(np.zeros((n_pairs, n_in), np.float32), private)


def moe_scratch_bytes(max_tokens: int, spec: MoeSpec, n_in: int) -> int:
    """See Ops.moe_scratch_bytes."""
    return max_tokens * spec.top_k * (_hidden_row_bytes(spec) + 8 + 4 * n_in) + spec.n_experts * 8 * (_GROUP + 1)


def _hidden_row_bytes(spec: MoeSpec) -> int:
    """Bytes of one row of the experts' hidden activations: records of 8-bit blocks, or float32."""
    return max(record_row_bytes(spec.width), -(-spec.width // 16) * 64)


def _describe(p: ProjectionLayout, table: ExpertTable, x: Act | None) -> list[int]:
    """A projection's fields of the context. x None: its input is the hidden buffer, found by pair."""
    kernels = dot.kernels(p.format.name)
    source, stride = 0, 0
    if x is not None:
        array = x.f32 if kernels.is_float else x.quant.records
        source, stride = address_of(array), array.strides[0]
    bias, factors = table.biases.get(p.name), table.factors.get(p.name)
    tiles = kernels.tiles
    return [
        p.row_bytes, p.rows_per_page, p.first_page, p.n_in, 0 if bias is None else address_of(bias),
        0 if bias is None else bias.strides[0], source, stride, kernels.rows, kernels.expand, tiles[0], tiles[1],
        tiles[2] if len(tiles) > 2 else 0, kernels.offset, kernels.panel_row_bytes(p.n_in), kernels.is_float,
        0 if factors is None else address_of(factors),
    ]  # fmt: skip


def moe_experts(
    x: Act, ids: np.ndarray, table: ExpertTable, active: np.ndarray | None, spec: MoeSpec, scratch: MoeScratch
) -> None:
    """For every (token, slot) whose expert is active: scratch.out[t * k + slot] = expert(x[t]); see ops/base.py.

    ids int32 [T, k] contiguous; active bool [n_experts]; biases and factors float32.
    """
    gate, up, down = (table.layout.projection(name) for name in ("gate", "up", "down"))
    if up is None or down is None:
        raise ValueError(f"block {table.layout.layer}: experts need an up and a down projection")
    ids = np.ascontiguousarray(ids, np.int32)
    n_tokens, top_k = ids.shape
    private: _Private = scratch.private
    n_bytes = TILE_TOKENS * 8 + 2 * _BUFFER_FLOATS * 4 + scratch_bytes(max(up.n_in, down.n_in))
    space = workspace()
    fields = [
        0, 0, 0, 0, n_tokens, top_k, table.layout.n_experts, address_of(ids),
        0 if active is None else address_of(active), address_of(table.addresses),
        table.addresses.strides[0] // 8,
        gate is not None, up.n_rows, down.n_rows, address_of(private.hidden), private.hidden.strides[0],
        address_of(scratch.out), address_of(private.groups), address_of(private.group_of),
        address_of(private.pairs), dot.quantizer(),
        dot_activations.glu_kernel(spec.activation, gate is not None), space.reserve(n_bytes), n_bytes,
        *_describe(up if gate is None else gate, table, x),
        *_describe(up, table, x),
        *_describe(down, table, None),
    ]  # fmt: skip
    space.context[: len(fields)] = fields
    _group_pairs(space.context_address)
    launch(_experts_worker.address, space.context_address, space.context[_N_TASKS] > 1)


# ---- combine
(
    _C_COUNTER, _C_N_TOKENS, _C_TOP_K, _C_WIDTH, _C_VALUES, _C_WEIGHTS, _C_WEIGHT_STRIDE, _C_OUT, _C_OUT_STRIDE,
    _C_ADD, _C_CHUNK, _C_SCALE,
) = range(12)  # fmt: skip
_C_HEADER = 12


@Worker
def _combine_worker(context, index):  # type: ignore[no-untyped-def]
    c = i64_at(context, _C_HEADER)
    scale = np.float32(f64_at(context, _C_HEADER)[_C_SCALE])
    k, width = c[_C_TOP_K], c[_C_WIDTH]
    piece = np.empty(256, np.float32)
    while True:
        start = fetch_add(context, c[_C_CHUNK])
        if start >= c[_C_N_TOKENS]:
            return
        for t in range(start, min(start + c[_C_CHUNK], c[_C_N_TOKENS])):
            weights = f32_at(c[_C_WEIGHTS] + t * c[_C_WEIGHT_STRIDE], k)
            for first in range(0, width, 256):
                n = min(256, width - first)
                for i in range(n):
                    piece[i] = np.float32(0.0)
                for slot in range(k):
                    values = f32_at(c[_C_VALUES] + ((t * k + slot) * width + first) * 4, n)
                    weight = weights[slot]
                    for i in range(n):
                        piece[i] += weight * values[i]
                out = f32_at(c[_C_OUT] + t * c[_C_OUT_STRIDE] + first * 4, n)
                if c[_C_ADD] != 0:
                    for i in range(n):
                        out[i] += scale * piece[i]
                else:
                    for i in range(n):
                        out[i] = scale * piece[i]


_PARALLEL_VALUES = 1 << 17


def moe_combine(scratch: MoeScratch, weights: np.ndarray, out: np.ndarray, add: bool, scale: float) -> None:
    """out[t] (+)= scale * sum over slots, in order, of weights[t, slot] * scratch.out[t * k + slot]. out [T, w]."""
    n_tokens, top_k = weights.shape
    width = scratch.out.shape[1]
    space = workspace()
    space.context[:_C_SCALE] = (
        0, n_tokens, top_k, width, address_of(scratch.out), address_of(weights), weights.strides[0], address_of(out),
        out.strides[0], add, max(1, n_tokens // 16),
    )  # fmt: skip
    space.context_f64[_C_SCALE] = scale
    launch(_combine_worker.address, space.context_address, n_tokens * top_k * width >= _PARALLEL_VALUES)
