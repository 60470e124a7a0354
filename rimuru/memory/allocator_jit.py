"""The allocator's inner loops: split, take, give back, merge. Integer arrays only, constant time per page.

All in one file: Numba's cache of compiled code does not notice an edited callee in another file.

    huge (L1)                one imaginary parent: the list of free huge pages
      expert | ssm | slab    children of a huge page (L2)
        kv | conv            children of an L2 page of the kind in meta[kind, PARENT] (L3)

A kind's children are numbered through: child = parent * meta[kind, N_CHILD] + slot. Every parent that is split into a
kind has a record; records of partly used parents hang in one list per fill level ("bucket"), and a bit per bucket says
whether its list is empty, so that the fullest partly used parent is found at once. A parent's free children are a list
plus an untouched rest (slots from FRESH on), so that splitting and merging cost nothing per child.

A parent can be detached (isolated for a move): it stays as it is, but offers no page.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

HUGE, EXPERT, SSM, SLAB, KV, CONV = range(6)
N_KINDS = 6

# columns of meta, int64 [N_KINDS, N_META]
PARENT, N_CHILD, CHILD_AT, PARENT_AT, BUCKET_AT, BITS_AT, N_PARENTS = range(7)  # fixed by the layout
FREE, USED, OPEN, CURSOR = range(7, 11)
# FREE: free children of attached, split parents (HUGE: free huge pages); USED: allocated children; OPEN: split parents;
# CURSOR (EXPERT): where the search for neighbouring pages starts
N_META = 11

STATE, NEXT, PREV, OWNER = range(4)  # columns of child, int32 [n, 4]: 16 bytes, one cache line touched per page
# NEXT: in the parent's list of free children; PREV: only in the ring of free huge pages
P_USED, P_FIRST, P_FRESH, P_PREV, P_NEXT = range(5)  # columns of parent, int32 [m, 5]

S_FREE, S_USED, S_SPLIT, S_HELD, S_MARK = range(5)
"""States of a child. S_HELD (huge pages): not in the pool now, or isolated and empty. S_MARK: within free only."""

DETACHED = -3
WORD_BITS = 5
WORD = 1 << WORD_BITS  # fill levels per word of bits; below 63 so that masks stay positive
RUN_TRIES = 8  # partly used huge pages searched for neighbouring pages
RUN_SCAN = 1024  # pages searched beyond those


class State(NamedTuple):
    """All of the allocator's memory."""

    meta: np.ndarray  # int64 [N_KINDS, N_META]
    child: np.ndarray  # int32 [children of all kinds, 4]; HUGE has one more, the sentinel of its ring of free pages
    parent: np.ndarray  # int32 [parent records of all kinds, 5]
    heads: np.ndarray  # int32: first record of each bucket, -1 = none
    bits: np.ndarray  # int64: non-empty buckets


@njit(cache=True, nogil=True, fastmath=False)
def _top_bit(x):
    """Number of the highest bit set in x > 0."""
    n = 0
    for shift in (16, 8, 4, 2, 1):
        if x >> shift:
            x >>= shift
            n += shift
    return n


@njit(cache=True, nogil=True, fastmath=False)
def _fullest(s, kind, most_used):
    """The fullest partly used, attached parent with at most `most_used` children in use; -1 = none."""
    at = s.meta[kind, BITS_AT]
    w = most_used >> WORD_BITS
    word = s.bits[at + w] & ((1 << ((most_used & (WORD - 1)) + 1)) - 1)
    while word == 0:
        w -= 1
        if w < 0:
            return -1
        word = s.bits[at + w]
    return s.heads[s.meta[kind, BUCKET_AT] + w * WORD + _top_bit(word)]


@njit(cache=True, nogil=True, fastmath=False)
def _link(s, kind, p):
    """Hang parent p into the bucket of its fill level; full parents hang nowhere."""
    at = s.meta[kind, PARENT_AT]
    used = s.parent[at + p, P_USED]
    if used >= s.meta[kind, N_CHILD]:
        return
    bucket = s.meta[kind, BUCKET_AT] + used
    head = s.heads[bucket]
    s.parent[at + p, P_PREV] = -1
    s.parent[at + p, P_NEXT] = head
    if head >= 0:
        s.parent[at + head, P_PREV] = p
    else:
        s.bits[s.meta[kind, BITS_AT] + (used >> WORD_BITS)] |= 1 << (used & (WORD - 1))
    s.heads[bucket] = p


@njit(cache=True, nogil=True, fastmath=False)
def _unlink(s, kind, p):
    """Take parent p out of its bucket."""
    at = s.meta[kind, PARENT_AT]
    used = s.parent[at + p, P_USED]
    if used >= s.meta[kind, N_CHILD]:
        return
    before = s.parent[at + p, P_PREV]
    after = s.parent[at + p, P_NEXT]
    if after >= 0:
        s.parent[at + after, P_PREV] = before
    if before >= 0:
        s.parent[at + before, P_NEXT] = after
        return
    s.heads[s.meta[kind, BUCKET_AT] + used] = after
    if after < 0:
        s.bits[s.meta[kind, BITS_AT] + (used >> WORD_BITS)] &= ~(1 << (used & (WORD - 1)))


@njit(cache=True, nogil=True, fastmath=False)
def _ring_remove(s, huge):
    """Take a free huge page out of the ring of free ones."""
    at = s.meta[HUGE, CHILD_AT]
    before = s.child[at + huge, PREV]
    after = s.child[at + huge, NEXT]
    s.child[at + before, NEXT] = after
    s.child[at + after, PREV] = before
    s.meta[HUGE, FREE] -= 1


@njit(cache=True, nogil=True, fastmath=False)
def _ring_insert(s, huge):
    """Give a huge page back: low addresses to the front (experts take there), high ones to the back (states)."""
    at = s.meta[HUGE, CHILD_AT]
    ring = s.meta[HUGE, N_CHILD]
    before = ring if 2 * huge < ring else s.child[at + ring, PREV]
    after = s.child[at + before, NEXT]
    s.child[at + huge, STATE] = S_FREE
    s.child[at + huge, PREV] = before
    s.child[at + huge, NEXT] = after
    s.child[at + before, NEXT] = huge
    s.child[at + after, PREV] = huge
    s.meta[HUGE, FREE] += 1


@njit(cache=True, nogil=True, fastmath=False)
def _open(s, kind, p):
    """A fresh record: parent p is now split into `kind`, with nothing used yet."""
    at = s.meta[kind, PARENT_AT] + p
    s.parent[at, P_USED] = s.parent[at, P_FRESH] = 0
    s.parent[at, P_FIRST] = s.parent[at, P_PREV] = s.parent[at, P_NEXT] = -1
    s.meta[kind, FREE] += s.meta[kind, N_CHILD]
    s.meta[kind, OPEN] += 1


@njit(cache=True, nogil=True, fastmath=False)
def _split_huge(s, kind, huge):
    """Split a free huge page into L2 pages."""
    _ring_remove(s, huge)
    s.child[s.meta[HUGE, CHILD_AT] + huge, STATE] = S_SPLIT
    _open(s, kind, huge)


@njit(cache=True, nogil=True, fastmath=False)
def _any_huge(s, kind, from_front):
    """Split some free huge page (there is one); its number."""
    ring = s.meta[HUGE, CHILD_AT] + s.meta[HUGE, N_CHILD]
    huge = s.child[ring, NEXT] if from_front else s.child[ring, PREV]
    _split_huge(s, kind, huge)
    return huge


@njit(cache=True, nogil=True, fastmath=False)
def _pop(s, kind, p, state, owner):
    """One free child of p (there is one)."""
    at = s.meta[kind, CHILD_AT]
    rec = s.meta[kind, PARENT_AT] + p
    c = s.parent[rec, P_FIRST]
    if c >= 0:
        s.parent[rec, P_FIRST] = s.child[at + c, NEXT]
    else:
        c = p * s.meta[kind, N_CHILD] + s.parent[rec, P_FRESH]
        s.parent[rec, P_FRESH] += 1
    s.child[at + c, STATE] = state
    s.child[at + c, OWNER] = owner
    s.parent[rec, P_USED] += 1
    return c


@njit(cache=True, nogil=True, fastmath=False)
def _push(s, kind, p, c):
    """Child c of p is free again. The caller settles p's fill level."""
    at = s.meta[kind, CHILD_AT]
    rec = s.meta[kind, PARENT_AT] + p
    s.child[at + c, STATE] = S_FREE
    s.child[at + c, NEXT] = s.parent[rec, P_FIRST]
    s.parent[rec, P_FIRST] = c


@njit(cache=True, nogil=True, fastmath=False)
def _take(s, kind, c, owner):
    """Allocate exactly child c, which is free in an attached, split parent."""
    at = s.meta[kind, CHILD_AT]
    n_child = s.meta[kind, N_CHILD]
    p = c // n_child
    rec = s.meta[kind, PARENT_AT] + p
    if s.parent[rec, P_USED] > 0:
        _unlink(s, kind, p)
    while s.parent[rec, P_FRESH] <= c % n_child:
        _push(s, kind, p, p * n_child + s.parent[rec, P_FRESH])
        s.parent[rec, P_FRESH] += 1
    if s.parent[rec, P_FIRST] == c:
        s.parent[rec, P_FIRST] = s.child[at + c, NEXT]
    else:
        before = s.parent[rec, P_FIRST]  # the search ends within one parent; only experts are taken by number
        while s.child[at + before, NEXT] != c:
            before = s.child[at + before, NEXT]
        s.child[at + before, NEXT] = s.child[at + c, NEXT]
    s.child[at + c, STATE] = S_USED
    s.child[at + c, OWNER] = owner
    s.parent[rec, P_USED] += 1
    s.meta[kind, FREE] -= 1
    s.meta[kind, USED] += 1
    _link(s, kind, p)


@njit(cache=True, nogil=True, fastmath=False)
def _parent_for(s, kind):
    """A parent with room, out of its bucket: the fullest partly used one, else one split on demand."""
    p = _fullest(s, kind, s.meta[kind, N_CHILD] - 1)
    if p >= 0:
        _unlink(s, kind, p)
        return p
    above = s.meta[kind, PARENT]
    if above == HUGE:
        return _any_huge(s, kind, kind == EXPERT)
    h = _fullest(s, above, s.meta[above, N_CHILD] - 1)
    if h >= 0:
        _unlink(s, above, h)
    else:
        h = _any_huge(s, above, False)
    p = _pop(s, above, h, S_SPLIT, -1)
    s.meta[above, FREE] -= 1
    _link(s, above, h)
    _open(s, kind, p)
    return p


@njit(cache=True, nogil=True, fastmath=False)
def _settle(s, kind, p, n_back):
    """n_back children of p have been pushed: new fill level, and merging upwards while a parent is empty."""
    while True:
        rec = s.meta[kind, PARENT_AT] + p
        attached = s.parent[rec, P_PREV] != DETACHED
        if attached:
            _unlink(s, kind, p)
            s.meta[kind, FREE] += n_back
        s.parent[rec, P_USED] -= n_back
        if s.parent[rec, P_USED] > 0:
            if attached:
                _link(s, kind, p)
            return
        if attached:
            s.meta[kind, FREE] -= s.meta[kind, N_CHILD]
        s.meta[kind, OPEN] -= 1
        above = s.meta[kind, PARENT]
        if above == HUGE:
            s.child[s.meta[HUGE, CHILD_AT] + p, STATE] = S_HELD
            if attached:
                _ring_insert(s, p)
            return
        h = p // s.meta[above, N_CHILD]
        _push(s, above, h, p)
        kind, p, n_back = above, h, 1


@njit(cache=True, nogil=True, fastmath=False)
def available(s, kind):
    """How many children of a kind can be allocated now."""
    n_huge = s.meta[HUGE, FREE]
    above = s.meta[kind, PARENT]
    if above == HUGE:
        return s.meta[kind, FREE] + n_huge * s.meta[kind, N_CHILD]
    n_above = s.meta[above, FREE] + n_huge * s.meta[above, N_CHILD]
    return s.meta[kind, FREE] + n_above * s.meta[kind, N_CHILD]


@njit(cache=True, nogil=True, fastmath=False)
def allocate(s, kind, owner, out):
    """Fill out (int32 [n]) with children of a kind. False, and nothing changed, where there are fewer than n."""
    n = out.shape[0]
    if available(s, kind) < n:
        return False
    done = 0
    while done < n:
        p = _parent_for(s, kind)
        room = s.meta[kind, N_CHILD] - s.parent[s.meta[kind, PARENT_AT] + p, P_USED]
        stop = min(n, done + room)
        s.meta[kind, FREE] -= stop - done
        s.meta[kind, USED] += stop - done
        while done < stop:
            out[done] = _pop(s, kind, p, S_USED, owner)
            done += 1
        _link(s, kind, p)
    return True


@njit(cache=True, nogil=True, fastmath=False)
def free(s, kind, ids):
    """Give children back. -1; or the index of the first id that is not allocated, with nothing changed."""
    at = s.meta[kind, CHILD_AT]
    n_child = s.meta[kind, N_CHILD]
    n_children = s.meta[kind, N_PARENTS] * n_child
    n = ids.shape[0]
    for i in range(n):
        c = ids[i]
        if c < 0 or c >= n_children or s.child[at + c, STATE] != S_USED:
            for j in range(i):
                s.child[at + ids[j], STATE] = S_USED
            return i
        s.child[at + c, STATE] = S_MARK  # so that an id given twice is noticed
    i = 0
    while i < n:
        p = int(ids[i]) // n_child
        first, stop = p * n_child, (p + 1) * n_child
        start = i
        while i < n and first <= ids[i] < stop:
            _push(s, kind, p, int(ids[i]))
            i += 1
        _settle(s, kind, p, i - start)
    s.meta[kind, USED] -= n
    if n > 0:
        s.meta[kind, CURSOR] = ids[0]
    return -1


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
        h = _fullest(s, EXPERT, level)
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
                h = _fullest(s, EXPERT, level)
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
            _split_huge(s, EXPERT, h)
        _take(s, EXPERT, c, owner)
        out[i] = c
    s.meta[EXPERT, CURSOR] = first + n
    return True


@njit(cache=True, nogil=True, fastmath=False)
def _set_parent(s, kind, p, attached):
    """Let a split parent offer its free children again, or no more."""
    rec = s.meta[kind, PARENT_AT] + p
    is_attached = s.parent[rec, P_PREV] != DETACHED
    if s.parent[rec, P_USED] == 0 or is_attached == attached:
        return
    n_free = s.meta[kind, N_CHILD] - s.parent[rec, P_USED]
    if attached:
        s.meta[kind, FREE] += n_free
        s.parent[rec, P_PREV] = -1
        _link(s, kind, p)
    else:
        _unlink(s, kind, p)
        s.meta[kind, FREE] -= n_free
        s.parent[rec, P_PREV] = DETACHED


@njit(cache=True, nogil=True, fastmath=False)
def set_attached(s, kind, parents, attached):
    """Detach parents and the split pages in them, so that they offer no page, or attach them again.

    kind HUGE: `parents` are huge pages; free ones are held (S_HELD) or released. L2 kinds: pages split into L3.
    """
    for i in range(parents.shape[0]):
        p = int(parents[i])
        if kind == HUGE:
            state = s.child[s.meta[HUGE, CHILD_AT] + p, STATE]
            if state == S_FREE and not attached:
                _ring_remove(s, p)
                s.child[s.meta[HUGE, CHILD_AT] + p, STATE] = S_HELD
            elif state == S_HELD and attached:
                _ring_insert(s, p)
        for below in range(EXPERT, N_KINDS):
            n_child = s.meta[below, N_CHILD]
            if n_child == 0 or s.meta[below, PARENT] != kind or s.parent[s.meta[below, PARENT_AT] + p, P_USED] == 0:
                continue
            _set_parent(s, below, p, attached)
            for leaf in range(KV, N_KINDS):
                if kind == HUGE and s.meta[leaf, N_CHILD] > 0 and s.meta[leaf, PARENT] == below:
                    for c in range(p * n_child, (p + 1) * n_child):
                        _set_parent(s, leaf, c, attached)
