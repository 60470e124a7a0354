"""How many experts to shrink or expand, once per step: policy `paper` (Algorithm 1 of the paper, design section 3)."""

from __future__ import annotations

import math

import numba


@numba.njit(cache=True, nogil=True, fastmath=False)
def paper_decision(need_pages: int, free_pages: int, pages_per_expert: float) -> tuple[int, int]:
    """(experts to shrink, experts to expand) for R_b = need_pages and F_b = free_pages in expert pages.

    With k = pages_per_expert:  R_b > 0: shrink ceil((R_b + 1) / k);  F_b < 2/3 k: shrink one;
    F_b > 3 k: expand min(5, floor((F_b - 3 k) / k)). k = 3 gives the paper's thresholds 2 and 9.
    """
    k = pages_per_expert
    if need_pages > 0:
        return int(math.ceil((need_pages + 1) / k)), 0
    if free_pages < 2.0 / 3.0 * k:
        return 1, 0
    if free_pages > 3.0 * k:
        return 0, min(5, int(math.floor((free_pages - 3.0 * k) / k)))
    return 0, 0
