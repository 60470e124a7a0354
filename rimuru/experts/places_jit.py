"""What a device reports of its places, taken over in one pass each."""

from __future__ import annotations

import numba
import numpy as np

from rimuru.ops.places import ASKED, FILLS, FORETOLD, HITS, STEPS, TOKENS


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
