"""Choosing among all experts of a model: the n with the smallest or largest keys, in one pass."""

from __future__ import annotations

import numba
import numpy as np

TIE = 1e-9


@numba.njit(cache=True, nogil=True, fastmath=False)
def _sift(keys, heap, n, root):
    """Move heap[root] down so that the largest key is on top again."""
    while True:
        child = 2 * root + 1
        if child >= n:
            return
        if child + 1 < n and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[root]] >= keys[heap[child]]:
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child


@numba.njit(cache=True, nogil=True, fastmath=False)
def smallest(keys: np.ndarray, allowed: np.ndarray, n: int) -> np.ndarray:
    """Indices int64 of the n smallest keys float64 [N] among allowed bool [N], ascending; fewer where fewer are."""
    heap = np.empty(n, np.int64)
    n_heap = 0
    for i in range(keys.size):
        if not allowed[i]:
            continue
        if n_heap < n:
            heap[n_heap] = i
            n_heap += 1
            if n_heap == n:
                for root in range(n // 2 - 1, -1, -1):
                    _sift(keys, heap, n, root)
        elif n > 0 and keys[i] < keys[heap[0]]:
            heap[0] = i
            _sift(keys, heap, n, 0)
    found = heap[:n_heap]
    return found[np.argsort(keys[found], kind="mergesort")]


@numba.njit(cache=True, nogil=True, fastmath=False)
def warmth(last_used: np.ndarray, scores: np.ndarray, scale: float, by_recency: bool, keys: np.ndarray) -> None:
    """keys float64 [S, E] from stamps int64 [S, E] and scores float64 [S, E]; scores times scale are probabilities.

    Experts that nothing is known of: low ids first, all layers alike.
    """
    n_slots, width = scores.shape
    for s in range(n_slots):
        for e in range(width):
            share = scores[s, e] * scale
            key = TIE * (width - e) + share
            if by_recency:
                key = last_used[s, e] + min(key, 0.999)
            keys[s, e] = key


@numba.njit(cache=True, nogil=True, fastmath=False)
def note_uses(
    last_used: np.ndarray,  # int64 [E]
    scores: np.ndarray,  # float64 [E]
    n_chosen: np.ndarray,  # int64 [E]
    experts: np.ndarray,  # int [n]
    counts: np.ndarray,  # int [n]
    step: int,
    weight: float,
) -> None:
    """The running step uses these experts of a layer, each for `counts` tokens of this weight."""
    for i in range(experts.size):
        last_used[experts[i]] = step
        scores[experts[i]] += weight * counts[i]
        n_chosen[experts[i]] += counts[i]
