"""What a device reports of its places, taken over in one pass."""

from __future__ import annotations

import numba
import numpy as np


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
