"""Two rarer verbs of the allocator: neighbouring pages for an expert, and isolating places whose pages are to move."""

from __future__ import annotations

from numba import njit

from rimuru.memory.allocator_jit import (
    CHILD_AT,
    CURSOR,
    DETACHED,
    EXPERT,
    FREE,
    HUGE,
    KV,
    N_CHILD,
    N_KINDS,
    N_PARENTS,
    NEXT,
    P_NEXT,
    P_PREV,
    P_USED,
    PARENT,
    PARENT_AT,
    S_FREE,
    S_HELD,
    S_SPLIT,
    STATE,
    fullest,
    link,
    ring_insert,
    ring_remove,
    split_huge,
    take,
    unlink,
)

RUN_TRIES = 8  # partly used huge pages searched for neighbouring pages
RUN_SCAN = 1024  # pages searched beyond those


@njit(cache=True, nogil=True, fastmath=False)
def _is_open_slot(s, c):
    """True where expert page c is free: in a free huge page, or in an attached one split into expert pages."""
    h = c // s.meta[EXPERT, N_CHILD]
    state = s.child[s.meta[HUGE, CHILD_AT] + h, STATE]
    if state == S_FREE:
        return True
    if state != S_SPLIT:
        return False
    rec = s.meta[EXPERT, PARENT_AT] + h
    if s.parent[rec, P_USED] == 0 or s.parent[rec, P_PREV] == DETACHED:
        return False
    return s.child[s.meta[EXPERT, CHILD_AT] + c, STATE] == S_FREE


@njit(cache=True, nogil=True, fastmath=False)
def _find_run(s, start, stop, n):
    """First expert page of n neighbouring free ones within start..stop; -1 = none."""
    length = 0
    for c in range(start, stop):
        length = length + 1 if _is_open_slot(s, c) else 0
        if length == n:
            return c - n + 1
    return -1


@njit(cache=True, nogil=True, fastmath=False)
def allocate_side_by_side(s, n, owner, out):
    """Fill out with n neighbouring expert pages. False, and nothing changed, where a bounded search finds none.

    First in the fullest huge pages that have room, then in a free huge page, then around the last freed pages, then
    from the first free huge page on.
    """
    n_child = s.meta[EXPERT, N_CHILD]
    first = -1
    if n <= n_child:
        level = n_child - n
        h = fullest(s, EXPERT, level)
        for _ in range(RUN_TRIES):
            if h < 0:
                break
            first = _find_run(s, h * n_child, (h + 1) * n_child, n)
            if first >= 0:
                break
            rec = s.meta[EXPERT, PARENT_AT] + h
            level = s.parent[rec, P_USED] - 1
            h = s.parent[rec, P_NEXT]
            if h < 0 and level > 0:
                h = fullest(s, EXPERT, level)
        if first < 0 and s.meta[HUGE, FREE] > 0:
            first = s.child[s.meta[HUGE, CHILD_AT] + s.meta[HUGE, N_CHILD], NEXT] * n_child
    n_pages = s.meta[EXPERT, N_PARENTS] * n_child
    if first < 0:
        start = max(0, s.meta[EXPERT, CURSOR] - n)  # n before, so that a run beginning earlier is found
        first = _find_run(s, start, min(n_pages, start + RUN_SCAN), n)
    if first < 0 and s.meta[HUGE, FREE] > 0:
        start = s.child[s.meta[HUGE, CHILD_AT] + s.meta[HUGE, N_CHILD], NEXT] * n_child
        first = _find_run(s, start, min(n_pages, start + RUN_SCAN), n)
    if first < 0:
        return False
    for i in range(n):
        c = first + i
        h = c // n_child
        if s.child[s.meta[HUGE, CHILD_AT] + h, STATE] == S_FREE:
            split_huge(s, EXPERT, h)
        take(s, EXPERT, c, owner)
        out[i] = c
    s.meta[EXPERT, CURSOR] = first + n
    return True


@njit(cache=True, nogil=True, fastmath=False)
def _detach(s, kind, p):
    rec = s.meta[kind, PARENT_AT] + p
    if s.parent[rec, P_USED] > 0 and s.parent[rec, P_PREV] != DETACHED:
        unlink(s, kind, p)
        s.meta[kind, FREE] -= s.meta[kind, N_CHILD] - s.parent[rec, P_USED]
        s.parent[rec, P_PREV] = DETACHED


@njit(cache=True, nogil=True, fastmath=False)
def _attach(s, kind, p):
    rec = s.meta[kind, PARENT_AT] + p
    if s.parent[rec, P_USED] > 0 and s.parent[rec, P_PREV] == DETACHED:
        s.meta[kind, FREE] += s.meta[kind, N_CHILD] - s.parent[rec, P_USED]
        s.parent[rec, P_PREV] = -1
        link(s, kind, p)


@njit(cache=True, nogil=True, fastmath=False)
def set_attached(s, kind, parents, attached):
    """Detach parents and the split pages in them, so that they offer no page, or attach them again.

    kind HUGE: `parents` are huge pages; free ones are held (S_HELD) or released. L2 kinds: pages split into L3.
    """
    for i in range(parents.shape[0]):
        p = parents[i]
        if kind == HUGE:
            state = s.child[s.meta[HUGE, CHILD_AT] + p, STATE]
            if state == S_FREE and not attached:
                ring_remove(s, p)
                s.child[s.meta[HUGE, CHILD_AT] + p, STATE] = S_HELD
            elif state == S_HELD and attached:
                ring_insert(s, p)
        for below in range(EXPERT, N_KINDS):
            n_child = s.meta[below, N_CHILD]
            if n_child == 0 or s.meta[below, PARENT] != kind:
                continue
            used = s.parent[s.meta[below, PARENT_AT] + p, P_USED]
            if attached:
                _attach(s, below, p)
            else:
                _detach(s, below, p)
            if kind != HUGE or used == 0:
                continue
            for leaf in range(KV, N_KINDS):
                if s.meta[leaf, N_CHILD] == 0 or s.meta[leaf, PARENT] != below:
                    continue
                for c in range(p * n_child, (p + 1) * n_child):
                    if attached:
                        _attach(s, leaf, c)
                    else:
                        _detach(s, leaf, c)
