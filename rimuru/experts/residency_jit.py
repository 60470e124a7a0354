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
