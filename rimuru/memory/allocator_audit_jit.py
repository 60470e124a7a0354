"""The allocator's audit: recounts every structure from the others and names the first that disagrees."""

from __future__ import annotations

from numba import njit

from rimuru.memory.allocator_jit import (
    BITS_AT,
    BUCKET_AT,
    CHILD_AT,
    DETACHED,
    EXPERT,
    FREE,
    HUGE,
    KV,
    N_CHILD,
    N_KINDS,
    N_PARENTS,
    NEXT,
    OPEN,
    P_FIRST,
    P_FRESH,
    P_NEXT,
    P_PREV,
    P_USED,
    PARENT,
    PARENT_AT,
    PREV,
    S_FREE,
    S_HELD,
    S_SPLIT,
    S_USED,
    STATE,
    USED,
    WORD,
    WORD_BITS,
)

FAULTS = (
    "sound",
    "a page is in a state that its kind cannot have",
    "a parent's fill level is not the number of its children in use",
    "a page is split into more than one kind",
    "a page is marked as split, but into nothing (or the reverse)",
    "a list of free children is broken",
    "a bucket's list is broken",
    "a bucket's bit disagrees with its list",
    "the number of free children is wrong",
    "the number of used pages is wrong",
    "the number of split parents is wrong",
    "the ring of free huge pages is broken",
)


@njit(cache=True, nogil=True, fastmath=False)
def _audit_children(s, kind, p):
    """Fault number of one parent record, its children's states and its free list; 0 = sound."""
    at = s.meta[kind, CHILD_AT]
    n_child = s.meta[kind, N_CHILD]
    rec = s.meta[kind, PARENT_AT] + p
    in_use = 0
    for c in range(p * n_child, (p + 1) * n_child):
        state = s.child[at + c, STATE]
        if state == S_USED or (state == S_SPLIT and kind < KV):
            in_use += 1
        elif state != S_FREE:
            return 1
    if in_use != s.parent[rec, P_USED]:
        return 2
    if in_use == 0:
        return 0
    fresh = s.parent[rec, P_FRESH]
    if fresh < in_use or fresh > n_child:
        return 5
    n_listed = 0
    c = s.parent[rec, P_FIRST]
    while c >= 0:
        if c // n_child != p or c % n_child >= fresh or s.child[at + c, STATE] != S_FREE:
            return 5
        n_listed += 1
        if n_listed > n_child:
            return 5
        c = s.child[at + c, NEXT]
    if n_listed != fresh - in_use:
        return 5
    for slot in range(fresh, n_child):
        if s.child[at + p * n_child + slot, STATE] != S_FREE:
            return 5
    return 0


@njit(cache=True, nogil=True, fastmath=False)
def _audit_buckets(s, kind, n_partial):
    """Fault number of a kind's buckets, which must hold n_partial parents; 0 = sound."""
    at = s.meta[kind, PARENT_AT]
    n_listed = 0
    for used in range(s.meta[kind, N_CHILD]):
        p = s.heads[s.meta[kind, BUCKET_AT] + used]
        bit = (s.bits[s.meta[kind, BITS_AT] + (used >> WORD_BITS)] >> (used & (WORD - 1))) & 1
        if (p >= 0) != (bit == 1):
            return 7
        before = -1
        while p >= 0:
            if p >= s.meta[kind, N_PARENTS] or s.parent[at + p, P_USED] != used or used == 0:
                return 6
            if s.parent[at + p, P_PREV] != before:
                return 6
            n_listed += 1
            if n_listed > n_partial:
                return 6
            before = p
            p = s.parent[at + p, P_NEXT]
    return 0 if n_listed == n_partial else 6


@njit(cache=True, nogil=True, fastmath=False)
def _audit_kind(s, kind):
    """(fault, parent or counted value) of one kind below the huge pages; (0, 0) = sound."""
    n_child = s.meta[kind, N_CHILD]
    above = s.meta[kind, PARENT]
    n_free = 0
    n_used = 0
    n_open = 0
    n_partial = 0
    for p in range(s.meta[kind, N_PARENTS]):
        fault = _audit_children(s, kind, p)
        if fault > 0:
            return fault, p
        rec = s.meta[kind, PARENT_AT] + p
        used = s.parent[rec, P_USED]
        if used == 0:
            continue
        n_open += 1
        if s.child[s.meta[above, CHILD_AT] + p, STATE] != S_SPLIT:
            return 4, p
        if s.parent[rec, P_PREV] != DETACHED:
            n_free += n_child - used
            if used < n_child:
                n_partial += 1
        for c in range(p * n_child, (p + 1) * n_child):
            if s.child[s.meta[kind, CHILD_AT] + c, STATE] == S_USED:
                n_used += 1
    fault = _audit_buckets(s, kind, n_partial)
    if fault > 0:
        return fault, n_partial
    if n_free != s.meta[kind, FREE]:
        return 8, n_free
    if n_used != s.meta[kind, USED]:
        return 9, n_used
    if n_open != s.meta[kind, OPEN]:
        return 10, n_open
    return 0, 0


@njit(cache=True, nogil=True, fastmath=False)
def _audit_splits(s, kind):
    """(fault, page): every page of a kind that is marked as split belongs to exactly one kind below, others to none."""
    for p in range(s.meta[kind, N_PARENTS] * s.meta[kind, N_CHILD]):
        n_claims = 0
        for below in range(EXPERT, N_KINDS):
            is_below = s.meta[below, N_CHILD] > 0 and s.meta[below, PARENT] == kind
            if is_below and s.parent[s.meta[below, PARENT_AT] + p, P_USED] > 0:
                n_claims += 1
        if n_claims > 1:
            return 3, p
        if (n_claims == 1) != (s.child[s.meta[kind, CHILD_AT] + p, STATE] == S_SPLIT):
            return 4, p
    return 0, 0


@njit(cache=True, nogil=True, fastmath=False)
def _audit_ring(s, n_huge):
    """(fault, page or count) of the huge pages; pages from n_huge on are not in the pool."""
    at = s.meta[HUGE, CHILD_AT]
    ring = s.meta[HUGE, N_CHILD]
    n_free = 0
    for p in range(ring):
        state = s.child[at + p, STATE]
        if state == S_FREE:
            n_free += 1
        elif state != S_SPLIT and state != S_HELD:
            return 1, p
        if p >= n_huge and state != S_HELD:
            return 11, p
    n_listed = 0
    before = ring
    p = s.child[at + ring, NEXT]
    while p != ring:
        if p < 0 or p > ring or s.child[at + p, STATE] != S_FREE or s.child[at + p, PREV] != before:
            return 11, p
        n_listed += 1
        if n_listed > n_free:
            return 11, p
        before = p
        p = s.child[at + p, NEXT]
    if s.child[at + ring, PREV] != before or n_listed != n_free:
        return 11, n_listed
    if n_free != s.meta[HUGE, FREE]:
        return 8, n_free
    return 0, 0


@njit(cache=True, nogil=True, fastmath=False)
def audit(s, n_huge):
    """(fault, kind, number): index into FAULTS, 0 where everything agrees."""
    fault, number = _audit_ring(s, n_huge)
    if fault > 0:
        return fault, HUGE, number
    for kind in range(HUGE, KV):
        if s.meta[kind, N_CHILD] > 0:
            fault, number = _audit_splits(s, kind)
            if fault > 0:
                return fault, kind, number
    for kind in range(EXPERT, N_KINDS):
        if s.meta[kind, N_CHILD] > 0:
            fault, number = _audit_kind(s, kind)
            if fault > 0:
                return fault, kind, number
    return 0, 0, 0
