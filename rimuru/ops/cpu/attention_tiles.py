"""Attention of a tile of query rows over blocks of 64 keys, in vectors (see lanes.py).

A tile holds the query heads of one KV head for a few tokens. Keys and values of a block are widened from their pages
into float32 rows; the block's softmax is folded into the running one. Blocks begin at multiples of 64 positions and
are taken in order, so a row's result depends on nothing but its query, its keys and its values.

    statistics of a row: [largest score, sum of exp(score - largest), factor for older sums, unused]
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import njit

from rimuru.ops.cpu.lanes import I64, VECTOR, VOID, Lanes, W, emits

BLOCK = 64
"""Keys of a block."""
ROWS = 4
"""Query rows that the inner loops take together; tiles are padded to a multiple of it."""
_KEYS = 4 if W == 16 else 2
_CHUNKS = 4 if W == 16 else 2
_STAT = 4


@emits(VOID, I64, I64, I64, I64)
def _score_rows(lanes: Lanes, queries: Any, keys: Any, scores: Any, dim: Any) -> None:
    """scores[i][j] = queries[i] . keys[j] for ROWS rows and _KEYS keys; rows of dim floats, of BLOCK scores."""
    b = lanes.b
    zero = lanes.const(0.0, VECTOR)
    parts = [[lanes.variable(zero) for _ in range(_KEYS)] for _ in range(ROWS)]
    with lanes.loop(b.sdiv(dim, lanes.index(W))) as i:
        at = b.mul(i, lanes.index(W))
        columns = [lanes.load(keys, b.add(at, b.mul(dim, lanes.index(j)))) for j in range(_KEYS)]
        for r in range(ROWS):
            row = lanes.load(queries, b.add(at, b.mul(dim, lanes.index(r))))
            for j in range(_KEYS):
                lanes.put(lanes.fma(row, columns[j], lanes.get(parts[r][j])), parts[r][j])
    totals = lanes.sums([lanes.get(part) for row in parts for part in row])
    for r in range(ROWS):
        lanes.store(lanes.slice(totals, r * _KEYS, _KEYS), scores, r * BLOCK)


@emits(VOID, I64, I64, I64, I64)
def _soften_row(lanes: Lanes, scores: Any, first: Any, last: Any, statistics: Any) -> None:
    """Scores of one row -> exp(score - largest so far), 0 outside first .. last - 1; updates the row's statistics."""
    b = lanes.b
    count = BLOCK // W
    whole = ir.VectorType(ir.IntType(32), W)
    low, high = (lanes.splat(b.trunc(bound, ir.IntType(32))) for bound in (first, last))
    minus_inf = lanes.const(float("-inf"), VECTOR)
    masked = []
    for j in range(count):
        lane = ir.Constant(whole, list(range(j * W, (j + 1) * W)))
        visible = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
        masked.append(b.select(visible, lanes.load(scores, j * W), minus_inf))
    top = masked[0]
    for vector in masked[1:]:
        top = lanes.call("maxnum", top, vector)
    old = lanes.load(statistics, 0, ir.FloatType())
    largest = lanes.call("maxnum", lanes.call("vector.reduce.fmax", top, returns=ir.FloatType()), old)
    shift = lanes.splat(largest)
    shares = [lanes.exp(b.fsub(vector, shift)) for vector in masked]
    for j, share in enumerate(shares):
        lanes.store(share, scores, j * W)
    while len(shares) > 1:
        half = len(shares) // 2
        shares = [b.fadd(x, y) for x, y in zip(shares[:half], shares[half:], strict=True)]
    factor = lanes.exp(b.fsub(old, largest))
    total = lanes.fma(lanes.load(statistics, 1, ir.FloatType()), factor, lanes.sums(shares))
    for place, value in enumerate((largest, total, factor)):
        lanes.store(value, statistics, place)


def _value_chunk(
    lanes: Lanes, n_chunks: int, at: Any, shares: Any, values: Any, sums: Any, stats: Any, span: tuple[Any, Any, Any]
) -> None:
    """n_chunks vectors, from float `at` on, of ROWS rows: sums = factor * sums + shares . values."""
    b = lanes.b
    first, last, dim = span
    parts = []
    for r in range(ROWS):
        factor = lanes.splat(lanes.load(stats, r * _STAT + 2, ir.FloatType()))
        row = b.add(at, b.mul(dim, lanes.index(r)))
        places = [b.add(row, lanes.index(c * W)) for c in range(n_chunks)]
        parts.append([(place, lanes.variable(b.fmul(lanes.load(sums, place), factor))) for place in places])
    with lanes.loop(last, first) as key:
        row = b.add(at, b.mul(key, dim))
        vectors = [lanes.load(values, b.add(row, lanes.index(c * W))) for c in range(n_chunks)]
        for r in range(ROWS):
            share = lanes.splat(lanes.load(shares, b.add(key, lanes.index(r * BLOCK)), ir.FloatType()))
            for (_, part), vector in zip(parts[r], vectors, strict=True):
                lanes.put(lanes.fma(share, vector, lanes.get(part)), part)
    for row_parts in parts:
        for place, part in row_parts:
            lanes.store(lanes.get(part), sums, place)


@emits(VOID, I64, I64, I64, I64, I64, I64, I64)
def _add_values(lanes: Lanes, shares: Any, values: Any, sums: Any, stats: Any, first: Any, last: Any, dim: Any) -> None:
    """sums[i] = factor_i * sums[i] + sum over keys first .. last - 1 of shares[i][key] * values[key], for ROWS rows."""
    b = lanes.b
    width = _CHUNKS * W
    n_wide = b.sdiv(dim, lanes.index(width))
    with lanes.loop(n_wide) as i:
        _value_chunk(lanes, _CHUNKS, b.mul(i, lanes.index(width)), shares, values, sums, stats, (first, last, dim))
    with lanes.loop(b.sdiv(dim, lanes.index(W)), b.mul(n_wide, lanes.index(_CHUNKS))) as i:
        _value_chunk(lanes, 1, b.mul(i, lanes.index(W)), shares, values, sums, stats, (first, last, dim))


def _convert_loop(lanes: Lanes, n: Any, step: Any) -> None:
    """step(index, lane count) over n elements: whole vectors, then single elements."""
    n_vectors = lanes.b.sdiv(n, lanes.index(W))
    with lanes.loop(n_vectors) as i:
        step(lanes.b.mul(i, lanes.index(W)), W)
    with lanes.loop(n, lanes.b.mul(n_vectors, lanes.index(W))) as i:
        step(i, 0)


def _kind(element: Any, count: int) -> Any:
    return ir.VectorType(element, count) if count else element


def _half_pointer(lanes: Lanes, address: Any, offset: Any, kind: Any) -> Any:
    return lanes.b.inttoptr(lanes.b.add(address, lanes.b.shl(offset, lanes.index(1))), ir.PointerType(kind))


@emits(VOID, I64, I64, I64)
def widen_f32(lanes: Lanes, source: Any, target: Any, n: Any) -> None:
    """Copy n floats."""

    def step(at: Any, count: int) -> None:
        lanes.store(lanes.load(source, at, _kind(ir.FloatType(), count)), target, at)

    _convert_loop(lanes, n, step)


@emits(VOID, I64, I64, I64)
def widen_f16(lanes: Lanes, source: Any, target: Any, n: Any) -> None:
    """n half floats -> floats."""

    def step(at: Any, count: int) -> None:
        kind = _kind(ir.HalfType(), count)
        stored = lanes.b.load(_half_pointer(lanes, source, at, kind), align=2, typ=kind)
        lanes.store(lanes.b.fpext(stored, _kind(ir.FloatType(), count)), target, at)

    _convert_loop(lanes, n, step)


@emits(VOID, I64, I64, I64)
def widen_bf16(lanes: Lanes, source: Any, target: Any, n: Any) -> None:
    """n bf16 numbers -> floats: their bits are the upper half of a float's."""

    def step(at: Any, count: int) -> None:
        kind, word = _kind(ir.IntType(16), count), _kind(ir.IntType(32), count)
        stored = lanes.b.load(_half_pointer(lanes, source, at, kind), align=2, typ=kind)
        bits = lanes.b.shl(lanes.b.zext(stored, word), lanes.const(16, word))
        lanes.store(lanes.b.bitcast(bits, _kind(ir.FloatType(), count)), target, at)

    _convert_loop(lanes, n, step)


@emits(VOID, I64, I64, I64)
def narrow_f16(lanes: Lanes, source: Any, target: Any, n: Any) -> None:
    """n floats -> half floats, to nearest even."""

    def step(at: Any, count: int) -> None:
        kind = _kind(ir.HalfType(), count)
        value = lanes.b.fptrunc(lanes.load(source, at, _kind(ir.FloatType(), count)), kind)
        lanes.b.store(value, _half_pointer(lanes, target, at, kind), align=2)

    _convert_loop(lanes, n, step)


@emits(VOID, I64, I64, I64)
def narrow_bf16(lanes: Lanes, source: Any, target: Any, n: Any) -> None:
    """n floats -> bf16, to nearest even; NaN stays NaN."""

    def step(at: Any, count: int) -> None:
        b, kind, word = lanes.b, _kind(ir.IntType(16), count), _kind(ir.IntType(32), count)
        value = lanes.load(source, at, _kind(ir.FloatType(), count))
        bits = b.bitcast(value, word)
        odd = b.and_(b.lshr(bits, lanes.const(16, word)), lanes.const(1, word))
        rounded = b.lshr(b.add(b.add(bits, odd), lanes.const(0x7FFF, word)), lanes.const(16, word))
        quiet = b.select(b.fcmp_unordered("uno", value, value), lanes.const(0x7FC0, word), rounded)
        b.store(b.trunc(quiet, kind), _half_pointer(lanes, target, at, kind), align=2)

    _convert_loop(lanes, n, step)


@njit(cache=True, nogil=True, fastmath=False)
def widen(source: int, target: int, n: int, element: int) -> None:
    """n stored elements (0 f32, 1 f16, 2 bf16) -> floats."""
    if element == 0:
        widen_f32(source, target, n)
    elif element == 1:
        widen_f16(source, target, n)
    else:
        widen_bf16(source, target, n)


@njit(cache=True, nogil=True, fastmath=False)
def narrow(source: int, target: int, n: int, element: int) -> None:
    """n floats -> stored elements (0 f32, 1 f16, 2 bf16)."""
    if element == 0:
        widen_f32(source, target, n)
    elif element == 1:
        narrow_f16(source, target, n)
    else:
        narrow_bf16(source, target, n)


@njit(cache=True, nogil=True, fastmath=False)
def fold_block(
    n_rows: int,
    queries: int,
    keys: int,
    values: int,
    scores: int,
    sums: int,
    stats: int,
    first: int,
    last: int,
    row_bounds,  # type: ignore[no-untyped-def]
    key_dim: int,
    value_dim: int,
) -> None:
    """Fold keys first .. last - 1 of a block into the running softmax of n_rows rows (padded to a multiple of ROWS).

    All but the numbers are addresses. row_bounds int64 [n_rows, 2]: the keys of the block that each row sees.
    """
    n_padded = (n_rows + ROWS - 1) // ROWS * ROWS
    for row in range(0, n_padded, ROWS):
        for key in range(first // _KEYS * _KEYS, last, _KEYS):
            place = scores + (row * BLOCK + key) * 4
            _score_rows(queries + row * key_dim * 4, keys + key * key_dim * 4, place, key_dim)
    for row in range(n_rows):
        if row_bounds[row, 0] < row_bounds[row, 1]:
            _soften_row(scores + row * BLOCK * 4, row_bounds[row, 0], row_bounds[row, 1], stats + row * _STAT * 4)
        else:
            _hide_row(scores + row * BLOCK * 4, stats + row * _STAT * 4)
    for row in range(0, n_padded, ROWS):
        place = sums + row * value_dim * 4
        _add_values(scores + row * BLOCK * 4, values, place, stats + row * _STAT * 4, first, last, value_dim)


@emits(VOID, I64, I64)
def _hide_row(lanes: Lanes, scores: Any, statistics: Any) -> None:
    """A row that sees nothing of the block: shares 0, factor 1."""
    for j in range(BLOCK // W):
        lanes.store(lanes.const(0.0, VECTOR), scores, j * W)
    lanes.store(lanes.const(1.0, ir.FloatType()), statistics, 2)
