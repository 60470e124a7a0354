"""Choosing among all experts of a model: the n warmest or coldest in one pass, or all of them in order."""

from __future__ import annotations

import numba
import numpy as np

TIE = 1e-9
_DIGITS, _DIGIT_BITS = 6, 11
"""Of a key, for sorting."""


@numba.njit(cache=True, nogil=True, fastmath=False)
def _sift(keys, heap, n, root):
    """Move heap[root], whose key is keys[root], down so that the largest key is on top again."""
    while True:
        child = 2 * root + 1
        if child >= n:
            return
        if child + 1 < n and keys[child + 1] > keys[child]:
            child += 1
        if keys[root] >= keys[child]:
            return
        heap[root], heap[child] = heap[child], heap[root]
        keys[root], keys[child] = keys[child], keys[root]
        root = child


@numba.njit(cache=True, nogil=True, fastmath=False)
def _flagged(flags: np.ndarray, wanted: bool, found: np.ndarray) -> int:
    """Write the indices of the flags bool [N] that are as wanted to the beginning of found int [N]; how many. No branch
    depends on a flag: where experts come and go at random, wrong guesses of the CPU would take most of the time."""
    n = 0
    for i in range(flags.size):
        found[n] = i
        n += flags[i] == wanted
    return n


@numba.njit(cache=True, nogil=True, fastmath=False)
def chosen_by(order: np.ndarray, flags: np.ndarray, wanted: bool) -> np.ndarray:
    """Those of the indices int64 [n], in their order, whose flags (bool [N]) are as wanted."""
    found = np.empty(order.size, np.int64)
    n = 0
    for index in order:
        found[n] = index
        n += flags[index] == wanted
    return found[:n]


@numba.njit(cache=True, nogil=True, fastmath=False)
def in_order(keys: np.ndarray, exists: np.ndarray) -> np.ndarray:
    """Indices int64 of the keys float64 [N] that exist (bool [N]), the smallest key first, of equal ones the lowest
    index.

    Digit by digit from the lowest, as bits that compare like the numbers: without comparisons, whose outcomes no CPU
    can guess, it takes a third of the time of a sort by merging.
    """
    order = np.empty(keys.size, np.int64)
    n = _flagged(exists, True, order)
    order = order[:n]
    sign = np.uint64(1) << np.uint64(63)
    bits, counts = np.empty(n, np.uint64), np.zeros((_DIGITS, 1 << _DIGIT_BITS), np.int32)
    mask = np.uint64((1 << _DIGIT_BITS) - 1)
    raw = keys.view(np.uint64)
    for i in range(n):
        word = raw[order[i]]
        word = ~word if word & sign else word | sign
        bits[i] = word
        for digit in range(_DIGITS):
            counts[digit, (word >> np.uint64(_DIGIT_BITS * digit)) & mask] += 1
    other_order, other_bits = np.empty(n, np.int64), np.empty(n, np.uint64)
    for digit in range(_DIGITS):
        shift, ends = np.uint64(_DIGIT_BITS * digit), counts[digit]
        if n and ends[(bits[0] >> shift) & mask] == n:  # the same in all
            continue
        first = 0
        for value in range(ends.size):
            ends[value], first = first, first + ends[value]
        for i in range(n):
            value = (bits[i] >> shift) & mask
            place = ends[value]
            ends[value] = place + 1
            other_bits[place], other_order[place] = bits[i], order[i]
        bits, other_bits = other_bits, bits
        order, other_order = other_order, order
    return order


@numba.njit(cache=True, nogil=True, fastmath=False)
def _key(last_used: int, score: float, scale: float, by_recency: bool, tie: int) -> float:
    """See warmth."""
    key = TIE * tie + score * scale
    return last_used + min(key, 0.999) if by_recency else key


@numba.njit(cache=True, nogil=True, fastmath=False)
def extremes(
    last_used: np.ndarray,  # int64 [S, E]
    scores: np.ndarray,  # float64 [S, E]
    resident: np.ndarray,  # bool [S, E]
    n_experts: np.ndarray,  # int64 [S]: beyond them there is nobody
    scale: float,
    by_recency: bool,
    of_residents: bool,
    n: int,
) -> np.ndarray:
    """Flat indices int64 of the n coldest residents, the coldest first, or of the n hottest who are absent, the hottest
    first; fewer where fewer are."""
    n_slots, width = scores.shape
    keys, heap, n_heap = np.empty(n, np.float64), np.empty(n, np.int64), 0
    found = np.empty(width, np.int64)
    if n == 0:
        return heap
    for slot in range(n_slots):
        for i in range(_flagged(resident[slot, : n_experts[slot]], of_residents, found)):
            expert = found[i]
            key = _key(last_used[slot, expert], scores[slot, expert], scale, by_recency, width - expert)
            if not of_residents:
                key = -key
            if n_heap < n:
                keys[n_heap], heap[n_heap] = key, slot * width + expert
                n_heap += 1
                if n_heap == n:
                    for root in range(n // 2 - 1, -1, -1):
                        _sift(keys, heap, n, root)
            elif key < keys[0]:
                keys[0], heap[0] = key, slot * width + expert
                _sift(keys, heap, n, 0)
    return heap[:n_heap][np.argsort(keys[:n_heap], kind="mergesort")]


@numba.njit(cache=True, nogil=True, fastmath=False)
def warmth(last_used: np.ndarray, scores: np.ndarray, scale: float, by_recency: bool, keys: np.ndarray) -> None:
    """keys float64 [S, E] from stamps int64 [S, E] and scores float64 [S, E]; scores times scale are probabilities.

    Experts that nothing is known of: low ids first, all layers alike.
    """
    n_slots, width = scores.shape
    for s in range(n_slots):
        for e in range(width):
            keys[s, e] = _key(last_used[s, e], scores[s, e], scale, by_recency, width - e)


@numba.njit(cache=True, nogil=True, fastmath=False)
def note_choices(
    last_used: np.ndarray,  # int64 [S, E]
    scores: np.ndarray,  # float64 [S, E]
    n_chosen: np.ndarray,  # int64 [S, E]
    slot: int,
    ids: np.ndarray,  # int [n]
    step: int,
    weight: float,
) -> np.ndarray:
    """Tokens of this weight of the running step choose these experts of a layer; gives the experts, int64, ascending,
    each once."""
    width = last_used.shape[1]
    counts = np.zeros(width, np.int64)
    n_experts = 0
    for i in range(ids.size):
        n_experts += counts[ids[i]] == 0
        counts[ids[i]] += 1
    experts = np.empty(n_experts, np.int64)
    n_experts = 0
    for e in range(width):
        if counts[e]:
            experts[n_experts] = e
            n_experts += 1
            last_used[slot, e] = step
            scores[slot, e] += weight * counts[e]
            n_chosen[slot, e] += counts[e]
    return experts


@numba.njit(cache=True, nogil=True, fastmath=False)
def note_counts(
    last_used: np.ndarray,  # int64 [S, E]
    scores: np.ndarray,  # float64 [S, E]
    n_chosen: np.ndarray,  # int64 [S, E]
    counts: np.ndarray,  # int [S, E]
    step: int,
    weight: float,
) -> None:
    """So many tokens of this weight chose each expert."""
    n_slots, width = counts.shape
    for s in range(n_slots):
        for e in range(width):
            if counts[s, e]:
                last_used[s, e] = step
                scores[s, e] += weight * counts[s, e]
                n_chosen[s, e] += counts[s, e]


@numba.njit(cache=True, nogil=True, fastmath=False)
def note_cells(
    last_used: np.ndarray,  # int64 [S, E]
    scores: np.ndarray,  # float64 [S, E]
    n_chosen: np.ndarray,  # int64 [S, E]
    cells: np.ndarray,  # int64 [R]: flat indices
    counts: np.ndarray,  # unsigned [R]
    step: int,
    weight: float,
) -> None:
    """The same where counts are of these experts only, one after the other."""
    stamps, sums, chosen = last_used.reshape(-1), scores.reshape(-1), n_chosen.reshape(-1)
    for i in range(cells.size):
        if counts[i]:
            stamps[cells[i]] = step
            sums[cells[i]] += weight * counts[i]
            chosen[cells[i]] += np.int64(counts[i])
