"""What a device reports of its places, taken over in one pass each."""

from __future__ import annotations

import numba
import numpy as np

from rimuru.memory.decisions import EXPERT, IS_FORETOLD, PLACE, SLOT, STEP, VICTIM
from rimuru.ops.places import (
    ASKED,
    COMER_AT,
    FILLS,
    FORETOLD,
    FORETOLD_AT,
    HITS,
    LAP_AT,
    LAPS,
    PLACE_AT,
    STEP_AT,
    STEP_BITS,
    STEPS,
    TOKENS,
    VICTIM_AT,
)


@numba.njit(cache=True, nogil=True, fastmath=False)
def take_over(
    named: np.ndarray,  # int32 [R]; row of a layer's first expert + place -> expert of the layer, -1 = no such place
    holders: np.ndarray,  # int32 [R], as the device reports them: -1 = nobody
    is_known: np.ndarray,  # bool [R]: whether the report is of this place
    rows_before: np.ndarray,  # int64 [layers + 1]
    resident: np.ndarray,  # bool [layers, width]
) -> int:
    """The device's holders are named, and resident. A place that nobody is known to hold keeps its expert in name,
    unless another place has it now: then it gets the first that no place has. How many such places there are."""
    n_empty = 0
    is_nameless = np.empty(named.size, np.bool_)
    for slot in range(rows_before.size - 1):
        first, last = rows_before[slot], rows_before[slot + 1]
        taken = resident[slot]
        taken[:] = False
        for row in range(first, last):
            if named[row] >= 0 and is_known[row] and holders[row] >= 0:
                named[row] = holders[row]
                taken[named[row]] = True
        for row in range(first, last):
            is_empty = named[row] >= 0 and not (is_known[row] and holders[row] >= 0)
            n_empty += is_empty
            is_nameless[row] = is_empty and taken[named[row]]
            if is_empty:
                taken[named[row]] = True
        free = 0
        for row in range(first, last):
            if is_nameless[row]:
                while taken[free]:
                    free += 1
                named[row] = free
                taken[free] = True
    return n_empty


@numba.njit(cache=True, nogil=True, fastmath=False)
def take_fills(
    log: np.ndarray,  # int64 [1 + ring], as the device reports it: see rimuru/ops/places.py
    n_taken: int,  # fills that were taken before, or lost
    totals: np.ndarray,  # int32 [layers, N_TOTALS] of the same report
    last_step: int,  # the engine's: the last that these totals count
    rows: np.ndarray,  # int64 [kept, N_FILL_FIELDS]: FillLog.rows, a ring as well
    n_rows: int,  # that were written to it before
    per_layer: np.ndarray,  # int64 [layers], counts one more for each
) -> tuple[int, int, int, int]:
    """New fills go to `rows`: fills taken or lost by now, and of the new ones, known, of these foretold, lost.

    A report may be copied while a step writes. An entry that is not there yet has the lap before: it and those behind
    it are for the next report. One of a later lap has been written over, and is lost."""
    n_entries, n_there = len(log) - 1, log[0]
    first = max(n_taken, n_there - n_entries)
    n_known, n_foretold, n_lost = 0, 0, first - n_taken
    at, lap, row_at = first % n_entries, first // n_entries + 1, n_rows % len(rows)
    for number in range(first, n_there):
        entry = log[1 + at]
        n_laps_off = ((entry >> LAP_AT) - lap) & (LAPS - 1)
        at += 1
        if at == n_entries:
            at, lap = 0, lap + 1
        if n_laps_off >= LAPS // 2:
            return number, n_known, n_foretold, n_lost
        if n_laps_off:
            n_lost += 1
            continue
        slot = entry & ((1 << COMER_AT) - 1)
        age = (totals[slot, STEPS] - (entry >> STEP_AT)) & ((1 << STEP_BITS) - 1)
        if age >= 1 << (STEP_BITS - 1):  # foretold for a step that was not yet
            age -= 1 << STEP_BITS
        row = rows[row_at]
        row_at = row_at + 1 if row_at + 1 < len(rows) else 0
        row[STEP], row[SLOT] = last_step - age, slot
        row[EXPERT] = (entry >> COMER_AT) & ((1 << (VICTIM_AT - COMER_AT)) - 1)
        row[VICTIM] = ((entry >> VICTIM_AT) & ((1 << (PLACE_AT - VICTIM_AT)) - 1)) - 1
        row[PLACE] = (entry >> PLACE_AT) & ((1 << (FORETOLD_AT - PLACE_AT)) - 1)
        row[IS_FORETOLD] = (entry >> FORETOLD_AT) & 1
        n_foretold += row[IS_FORETOLD]
        per_layer[slot] += 1
        n_known += 1
    return max(n_taken, n_there), n_known, n_foretold, n_lost


@numba.njit(cache=True, nogil=True, fastmath=False)
def add_up(totals: np.ndarray, useful_bytes: np.ndarray) -> np.ndarray:
    """Of totals uint32 [layers, N_TOTALS] and the bytes of a layer's expert int64 [layers]; int64 [7]: steps and tokens
    (of the layer that counts most), and over all layers experts asked for, hit, brought over the link (by forecasts
    too), brought into places; bytes brought."""
    sums, row = np.zeros(7, np.int64), np.empty(totals.shape[1], np.int64)
    for slot in range(len(totals)):
        row[:] = totals[slot]
        n_read = row[ASKED] - row[HITS] + row[FORETOLD]
        sums[0] = max(sums[0], row[STEPS])
        sums[1] = max(sums[1], row[TOKENS])
        sums[2] += row[ASKED]
        sums[3] += row[HITS]
        sums[4] += n_read
        sums[5] += row[FILLS]
        sums[6] += n_read * useful_bytes[slot]
    return sums
