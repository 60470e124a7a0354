"""Paged causal attention on the CPU.

Positions are cut into spans of SPAN, spans into blocks of 64, always at the same absolute positions. A span's softmax
is formed block by block and merged into the result of the spans before it. Both orders are fixed, so a token's result
does not depend on the batch, the prefill pieces, the number of threads or where pages lie. Few work items (one long
sequence) are split at spans over the threads; many are not: the arithmetic is the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rimuru.ops.base import Act, Array, KvLayer, Step
from rimuru.ops.cpu.attention_tiles import BLOCK, ROWS, fold_block, widen
from rimuru.ops.cpu.lanes import W, exp, take_number
from rimuru.ops.cpu.pointwise import copy_row, sigmoid
from rimuru.ops.cpu.simd_calls import i64_at
from rimuru.ops.cpu.simd_launch import threads
from rimuru.ops.cpu.work import FIELDS, NO_FLOATS, Worker, integers, matrix, real, run, vector

SPAN = 1024
_TILE_ROWS = 64
_PARALLEL_WORK = 1 << 19
"""Multiplications below which starting threads costs more than it brings."""
ELEMENTS = {"f32": 0, "f16": 1, "bf16": 2}


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _gather(geometry, pages, head, values, first, last, padded, target):  # type: ignore[no-untyped-def]
    """Widen the keys (or values) of positions first .. last - 1 into float rows of `padded` at an address."""
    base, page_bytes, page_tokens, n_head_kv, key_dim, value_dim, element = geometry
    size = 4 if element == 0 else 2
    dim = value_dim if values else key_dim
    part = n_head_kv * page_tokens * key_dim * size if values else 0
    position = first
    while position < last:
        slot = position % page_tokens
        count = min(last - position, page_tokens - slot)
        page = np.int64(pages[position // page_tokens])
        source = base + page * page_bytes + part + (head * page_tokens + slot) * dim * size
        place = target + (position - first) * padded * 4
        if dim == padded:
            widen(source, place, count * dim, element)
        else:
            for i in range(count):
                widen(source + i * dim * size, place + i * padded * 4, dim, element)
        position += count


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _clear(sums, stats):  # type: ignore[no-untyped-def]
    sums[:] = 0.0
    stats[:, 0] = -np.inf
    stats[:, 1] = 0.0
    stats[:, 2] = 1.0


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _attend_span(  # type: ignore[no-untyped-def]
    geometry, pages, head, visible, n_rows, key_padded, value_padded, start, stop, buffers, sums, stats, bounds
):
    """Softmax and value sums of a tile over the positions of one span that any of its rows sees.

    visible int64 [n_rows, 2]: positions that each row sees. Writes sums [rows, value_padded], stats [rows, 4].
    buffers: the tile's queries, keys, values and scores, padded.
    """
    # The arrays live in the caller: Numba frees an array after its last use, whoever still holds its address.
    queries, keys = buffers[0].ctypes.data, buffers[1].ctypes.data
    values, scores = buffers[2].ctypes.data, buffers[3].ctypes.data
    _clear(sums, stats)
    for block in range(start // BLOCK, (stop + BLOCK - 1) // BLOCK):
        origin = block * BLOCK
        first, last = max(start, origin), min(stop, origin + BLOCK)
        key_place = keys + (first - origin) * key_padded * 4
        _gather(geometry, pages, head, False, first, last, key_padded, key_place)
        if geometry[5] > 0:
            value_place = values + (first - origin) * value_padded * 4
            _gather(geometry, pages, head, True, first, last, value_padded, value_place)
        else:
            for i in range(last - first):  # MLA: a key begins with its value
                source = key_place + i * key_padded * 4
                widen(source, values + (first - origin + i) * value_padded * 4, value_padded, 0)
        for row in range(n_rows):
            bounds[row, 0] = max(first, visible[row, 0]) - origin
            bounds[row, 1] = min(last, visible[row, 1]) - origin
        fold_block(
            n_rows, queries, keys, values, scores, sums.ctypes.data, stats.ctypes.data,
            first - origin, last - origin, bounds, key_padded, value_padded,
        )  # fmt: skip


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _merge(n_rows, total, total_stats, sums, stats):  # type: ignore[no-untyped-def]
    """Add a span's sums to the sums of the spans before it."""
    for row in range(n_rows):
        if stats[row, 1] == 0.0:
            continue
        largest = max(total_stats[row, 0], stats[row, 0])
        old, new = exp(total_stats[row, 0] - largest), exp(stats[row, 0] - largest)
        total_stats[row, 0] = largest
        total_stats[row, 1] = total_stats[row, 1] * old + stats[row, 1] * new
        for i in range(total.shape[1]):
            total[row, i] = total[row, i] * old + sums[row, i] * new


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _finish(q, out, tile, head, n_heads, q_stride, key_dim, width, gated, sinks, total, stats):  # type: ignore[no-untyped-def]
    """Divide by the softmax's sum (with the sink), apply the output gate, store the rows of a tile."""
    for row in range((tile[1] - tile[0]) * n_heads):
        token, query_head = tile[0] + row // n_heads, head + row % n_heads
        factor, denominator = np.float32(1.0), stats[row, 1]
        if sinks.size > 0:
            largest = max(stats[row, 0], sinks[query_head])
            factor = exp(stats[row, 0] - largest)
            denominator = denominator * factor + exp(sinks[query_head] - largest)
        factor = factor / denominator
        target, start = out[token, query_head * width : (query_head + 1) * width], query_head * q_stride + key_dim
        for i in range(width):
            target[i] = total[row, i] * factor
        if gated:
            gate = q[token, start : start + width]
            for i in range(width):
                target[i] *= sigmoid(gate[i])


@Worker
def _worker(context, index):  # type: ignore[no-untyped-def]
    """Take work items until none is left. Split items leave their sums in `partial`, others go over all their spans.

    items int64 [n, 6]: sequence, token rows (2), first query head, spans (2).
    """
    c = i64_at(context, FIELDS)
    item = take_number(context)
    if item >= c[2]:
        return
    items = i64_at(c[1], c[2] * 6).reshape(-1, 6)
    q, out, positions, tables = matrix(c, 1), matrix(c, 2), integers(c, 3), integers(c, 4)
    sinks, all_partial, all_stats = vector(c, 5), matrix(c, 6), matrix(c, 7)
    n_head, n_heads, q_stride, window, width = c[25], c[26], c[27], c[28], c[29]
    gated, split, n_max = c[30] != 0, c[31] != 0, c[32]
    geometry = (c[33], c[34], c[35], c[36], c[37], c[38], c[39])
    scale, key_dim = real(context, 40), c[37]
    key_padded, value_padded = (key_dim + W - 1) // W * W, (width + W - 1) // W * W
    buffers = (
        np.empty((n_max, key_padded), np.float32), np.empty((BLOCK, key_padded), np.float32),
        np.empty((BLOCK, value_padded), np.float32), np.empty((n_max, BLOCK), np.float32),
    )  # fmt: skip
    if key_padded != key_dim:  # the padding takes part in the products
        buffers[0][:] = np.float32(0.0)
        buffers[1][:] = np.float32(0.0)
    sums, total = np.empty((n_max, value_padded), np.float32), np.empty((n_max, value_padded), np.float32)
    stats, total_stats = np.empty((n_max, 4), np.float32), np.empty((n_max, 4), np.float32)
    visible, bounds = np.empty((n_max, 2), np.int64), np.empty((n_max, 2), np.int64)
    while item < c[2]:
        tile, head = (items[item, 1], items[item, 2]), items[item, 3]
        n_rows = (tile[1] - tile[0]) * n_heads
        for row in range(n_rows):
            token, start = tile[0] + row // n_heads, (head + row % n_heads) * q_stride
            query = q[token, start : start + key_dim]
            for i in range(key_dim):
                buffers[0][row, i] = query[i] * scale
            visible[row, 1] = positions[token, 0] + 1
            visible[row, 0] = max(0, visible[row, 1] - window) if window > 0 else 0
        _clear(total, total_stats)
        for span in range(items[item, 4], items[item, 5]):
            low, high = max(span * SPAN, visible[0, 0]), min((span + 1) * SPAN, visible[n_rows - 1, 1])
            _attend_span(
                geometry, tables[items[item, 0]], head // (n_head // geometry[3]), visible, n_rows, key_padded,
                value_padded, low, high, buffers, sums, stats, bounds,
            )  # fmt: skip
            if split:
                copy_row(all_partial[item * n_max : (item + 1) * n_max].reshape(-1), sums.reshape(-1))
                copy_row(all_stats[item * n_max : (item + 1) * n_max].reshape(-1), stats.reshape(-1))
            else:
                _merge(n_rows, total, total_stats, sums, stats)
        if not split:
            _finish(q, out, tile, head, n_heads, q_stride, key_dim, width, gated, sinks, total, total_stats)
        item = take_number(context)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _join(items, q, out, n_heads, q_stride, key_dim, width, gated, sinks, partial, stats):  # type: ignore[no-untyped-def]
    """Merge the spans of split items, which lie behind each other, and finish. partial [items, rows, padded width]."""
    total, total_stats = np.empty_like(partial[0]), np.empty_like(stats[0])
    item = 0
    while item < items.shape[0]:
        _clear(total, total_stats)
        tile, head = (items[item, 1], items[item, 2]), items[item, 3]
        while item < items.shape[0] and items[item, 1] == tile[0] and items[item, 3] == head:
            _merge((tile[1] - tile[0]) * n_heads, total, total_stats, partial[item], stats[item])
            item += 1
        _finish(q, out, tile, head, n_heads, q_stride, key_dim, width, gated, sinks, total, total_stats)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _list_items(query_start, positions, n_head, n_heads, tile_tokens, window, split, items):  # type: ignore[no-untyped-def]
    """Fill items (see `_worker`); returns their number."""
    count = 0
    for seq in range(query_start.size - 1):
        for first in range(query_start[seq], query_start[seq + 1], tile_tokens):
            last = min(first + tile_tokens, query_start[seq + 1])
            low = max(0, positions[first] + 1 - window) // SPAN if window > 0 else 0
            high = positions[last - 1] // SPAN + 1
            for head in range(0, n_head, n_heads):
                for span in range(low, high if split else low + 1):
                    item = items[count]
                    item[0], item[1], item[2], item[3] = seq, first, last, head
                    item[4], item[5] = span, span + 1 if split else high
                    count += 1
    return count


def attention(
    q: Array,
    n_head: int,
    q_stride: int,
    gated: bool,
    step: Step,
    kv: KvLayer,
    scale: float,
    window: int | None,
    sinks: Array | None,
    out: Act,
) -> None:
    """See `Ops.attention`. A group with value_dim 0 (MLA) takes the first out-width elements of a key as its value."""
    group = kv.group
    n_tokens = q.shape[0]
    if n_tokens == 0:
        return
    width = out.f32.shape[1] // n_head
    n_heads = _heads_of_item(n_head // group.n_head_kv)
    tile_tokens = max(1, _TILE_ROWS // n_heads)
    bound = window or 0
    longest = int(step.context_len.max())
    seen = min(longest, bound or longest)
    parallel = n_tokens * n_head * seen * (group.key_dim + width) > _PARALLEL_WORK
    scope = (step.query_start, step.positions, n_head, n_heads, tile_tokens, bound)
    most = (n_tokens // tile_tokens + step.context_len.size) * (n_head // n_heads)
    items = np.empty((most, 6), np.int64)
    n_items = _list_items(*scope, False, items)
    split = parallel and seen > SPAN and n_items < 2 * threads()
    if split:
        items = np.empty((most * (longest // SPAN + 2), 6), np.int64)
        n_items = _list_items(*scope, True, items)
    items = items[:n_items]
    n_rows = -(-min(tile_tokens, n_tokens) * n_heads // ROWS) * ROWS
    partial = np.empty((len(items) if split else 0, n_rows, -(-width // W) * W), np.float32)
    stats = np.empty((len(partial), n_rows, 4), np.float32)
    sinks = NO_FLOATS.reshape(-1) if sinks is None else sinks
    run(
        _worker,
        (
            items, q, out.f32, step.positions, step.kv_pages[kv.group_index], sinks,
            partial.reshape(-1, partial.shape[2]), stats.reshape(-1, 4),
        ),
        (n_head, n_heads, q_stride, bound, width, gated, split, n_rows, *geometry(kv), float(scale)),
        parallel,
    )  # fmt: skip
    if split:
        _join(items, q, out.f32, n_heads, q_stride, group.key_dim, width, gated, sinks, partial, stats)


def geometry(kv: KvLayer) -> tuple[int, int, int, int, int, int, int]:
    """Pool base of the layer, page bytes, tokens of a page, KV heads, key and value dim, element code."""
    group = kv.group
    base = kv.pool_base + kv.layer_offset_bytes
    kind = ELEMENTS[group.element]
    return base, kv.page_bytes, group.page_tokens, group.n_head_kv, group.key_dim, group.value_dim, kind


def _heads_of_item(group_heads: int) -> int:
    """Query heads that a work item takes: all that share a KV head, or the largest share of at most a tile's rows."""
    return max(n for n in range(1, min(group_heads, _TILE_ROWS) + 1) if group_heads % n == 0)
