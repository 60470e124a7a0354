"""One token's step of ROWS rows of a recurrent state, in vectors (see lanes.py).

A state row holds `width` floats (padded with zeros to whole vectors). Rows of a state do not depend on each other, so a
row's result is the same whatever rows are computed together, and however a sequence is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir

from rimuru.ops.cpu.lanes import F32, I64, VECTOR, VOID, Lanes, W, emits

ROWS = 4
_FLOAT = ir.FloatType()
_QUARTET = ir.VectorType(_FLOAT, ROWS)


def _over_row(lanes: Lanes, width: Any, body: Callable[[Any], None]) -> None:
    """body(index of the first float) for every vector of a row."""
    with lanes.loop(lanes.b.sdiv(width, lanes.index(W))) as i:
        body(lanes.b.mul(i, lanes.index(W)))


def _lane(lanes: Lanes, vector: Any, index: int) -> Any:
    """One lane of a vector, in every lane of a full one."""
    return lanes.splat(lanes.b.extract_element(vector, ir.Constant(ir.IntType(32), index)))


def _place(lanes: Lanes, at: Any, width: Any, row: int) -> Any:
    return lanes.b.add(at, lanes.b.mul(width, lanes.index(row)))


@emits(VOID, I64, I64, I64, I64, F32, F32, I64, I64)
def delta_rows(
    lanes: Lanes, state: Any, key: Any, query: Any, value: Any, decay: Any, beta: Any, out: Any, width: Any
) -> None:
    """s = decay s; s += key * beta (value - s . key); out = s . query, for ROWS rows s of value channels."""
    b = lanes.b
    zero = lanes.const(0.0, VECTOR)
    factor = lanes.splat(decay)
    parts = [lanes.variable(zero) for _ in range(ROWS)]

    def project(at: Any) -> None:
        column = lanes.load(key, at)
        for r, part in enumerate(parts):
            row = b.fmul(lanes.load(state, _place(lanes, at, width, r)), factor)
            lanes.put(lanes.fma(row, column, lanes.get(part)), part)

    _over_row(lanes, width, project)
    known = lanes.sums([lanes.get(part) for part in parts])
    correction = b.fmul(b.fsub(lanes.load(value, 0, _QUARTET), known), lanes.splat(beta, ROWS))
    corrections = [_lane(lanes, correction, r) for r in range(ROWS)]
    for part in parts:
        lanes.put(zero, part)

    def update(at: Any) -> None:
        column, reader = lanes.load(key, at), lanes.load(query, at)
        for r, part in enumerate(parts):
            place = _place(lanes, at, width, r)
            row = lanes.fma(corrections[r], column, b.fmul(lanes.load(state, place), factor))
            lanes.store(row, state, place)
            lanes.put(lanes.fma(row, reader, lanes.get(part)), part)

    _over_row(lanes, width, update)
    lanes.store(lanes.sums([lanes.get(part) for part in parts]), out)


@emits(VOID, I64, I64, I64, I64, F32, I64, I64)
def scan_rows(lanes: Lanes, state: Any, b_row: Any, c_row: Any, gains: Any, decay: Any, out: Any, width: Any) -> None:
    """s = decay s + gain b; out = s . c, for ROWS rows s with their gains (Mamba2)."""
    b = lanes.b
    factor, gain = lanes.splat(decay), lanes.load(gains, 0, _QUARTET)
    inputs = [_lane(lanes, gain, r) for r in range(ROWS)]
    parts = [lanes.variable(lanes.const(0.0, VECTOR)) for _ in range(ROWS)]

    def update(at: Any) -> None:
        column, reader = lanes.load(b_row, at), lanes.load(c_row, at)
        for r, part in enumerate(parts):
            place = _place(lanes, at, width, r)
            row = lanes.fma(inputs[r], column, b.fmul(lanes.load(state, place), factor))
            lanes.store(row, state, place)
            lanes.put(lanes.fma(row, reader, lanes.get(part)), part)

    _over_row(lanes, width, update)
    lanes.store(lanes.sums([lanes.get(part) for part in parts]), out)


@emits(VOID, I64, I64, I64, I64, I64, I64, I64, I64)
def scan_rows_each(
    lanes: Lanes, state: Any, rates: Any, b_row: Any, c_row: Any, steps: Any, gains: Any, out: Any, width: Any
) -> None:
    """s = exp(step * rate) s + gain b; out = s . c, for ROWS rows s with their rates, steps and gains (Mamba1)."""
    b = lanes.b
    step, gain = lanes.load(steps, 0, _QUARTET), lanes.load(gains, 0, _QUARTET)
    inputs = [_lane(lanes, gain, r) for r in range(ROWS)]
    times = [_lane(lanes, step, r) for r in range(ROWS)]
    parts = [lanes.variable(lanes.const(0.0, VECTOR)) for _ in range(ROWS)]

    def update(at: Any) -> None:
        column, reader = lanes.load(b_row, at), lanes.load(c_row, at)
        for r, part in enumerate(parts):
            place = _place(lanes, at, width, r)
            decay = lanes.exp(b.fmul(lanes.load(rates, place), times[r]))
            row = lanes.fma(inputs[r], column, b.fmul(lanes.load(state, place), decay))
            lanes.store(row, state, place)
            lanes.put(lanes.fma(row, reader, lanes.get(part)), part)

    _over_row(lanes, width, update)
    lanes.store(lanes.sums([lanes.get(part) for part in parts]), out)
