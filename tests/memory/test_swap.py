"""Sequences moved to host memory and back: bytes, shared units, windows, states, limits; random lives with audits."""

from __future__ import annotations

import random
import zlib

import memory_pools as pools
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.base.errors import LostPagesError
from rimuru.memory.cache import ORDER, SequenceCache
from rimuru.memory.specs import PoolLayout

LAYOUTS = {
    "plain": pools.moe((4, None)),
    "window": pools.moe((4, None), (2, 6), kv_bytes=32),
    "hybrid": pools.hybrid(),
    "dense hybrid": pools.dense_hybrid(),
}


def make(layout: PoolLayout, n_huge: int, swap_bytes: int = 1 << 20, prefix_cache: bool = True) -> SequenceCache:
    return SequenceCache(pools.make_pool(layout, n_huge), layout, prefix_cache=prefix_cache, swap_bytes=swap_bytes)


class Written:
    """Fills pages with bytes that name the prefix they stand for, and checks what a sequence can see of them."""

    def __init__(self, cache: SequenceCache) -> None:
        self.cache = cache

    def _pages(self, seq_id: int, n_more: int = 0) -> list[tuple[str, int, int, int]]:
        """(kind, group or 0, column, page) of all that the sequence's next token reads; with n_more, of all that the
        next n_more tokens write."""
        cache, seq, slot = self.cache, self.cache._open[seq_id], self.cache._slots[seq_id]
        found: list[tuple[str, int, int, int]] = []
        if cache.kv is not None and seq.kv is not None:
            for g, view in enumerate(cache.kv.view.groups):
                page_tokens = cache.kv.layout.groups[g].page_tokens
                first = seq.n_tokens // page_tokens if n_more else cache.kv.first_visible(g, seq.n_tokens)
                for column in range(first, -(-(seq.n_tokens + n_more) // page_tokens)):
                    found.append(("kv", g, column, int(view.ids[slot, column])))
        for kind, ids in cache.states.pages(slot).items():
            found += [(kind, 0, i, int(page)) for i, page in enumerate(ids)]
        return found

    def _mark(self, kind: str, g: int, column: int, tokens: list[int]) -> int:
        """What a page must hold: depends on all tokens up to its end (KV) or on all tokens (states)."""
        if kind == "kv":
            assert self.cache.kv is not None
            tokens = tokens[: (column + 1) * self.cache.kv.layout.groups[g].page_tokens]
        return zlib.crc32(repr((kind, g, column, tokens)).encode()) % 251

    def write(self, seq_id: int, tokens: list[int]) -> None:
        """What a step does between `extend` and `commit`; tokens: all of the sequence's."""
        for kind, g, column, page in self._pages(seq_id, len(tokens) - self.cache.n_tokens(seq_id)):
            pools.page_bytes_of(self.cache.pool, kind, page)[:] = self._mark(kind, g, column, tokens)

    def check(self, seq_id: int, tokens: list[int]) -> None:
        """Nothing is to be seen of a sequence without tokens."""
        if not tokens:
            return
        for kind, g, column, page in self._pages(seq_id):
            assert page >= 0
            found = pools.page_bytes_of(self.cache.pool, kind, page)
            assert (found == self._mark(kind, g, column, tokens)).all(), (kind, g, column)


def grow(cache: SequenceCache, written: Written, seq_id: int, tokens: list[int], piece: int = 5) -> None:
    """Write the tokens after the committed ones; the pages are checked before and filled after every piece."""
    while (done := cache.n_tokens(seq_id)) < len(tokens):
        n = min(piece, len(tokens) - done)
        assert cache.extend(seq_id, n)
        written.check(seq_id, tokens[:done])
        written.write(seq_id, tokens[: done + n])
        cache.commit(seq_id, tokens[done : done + n])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 3, 8, 13, 24])
def test_what_was_written_comes_back(name: str, prefix_cache: bool, n_tokens: int) -> None:
    """In other pages, after everything that the pool kept has been given up and overwritten."""
    layout = LAYOUTS[name]
    cache = make(layout, 12, prefix_cache=prefix_cache)
    written, tokens = Written(cache), list(range(100, 100 + n_tokens + 6))
    cache.open(1, tokens[:n_tokens])
    grow(cache, written, 1, tokens[:n_tokens])
    assert cache.swap_seconds(1) > 0 and cache.n_lost_tokens(1) == n_tokens
    assert cache.swap_out(1)
    cache.audit()
    cache.evict_prefix(1 << 20)
    cache.evict_prefix(1 << 20, states_first=True)
    assert all(cache.pool.allocator.pages_in_use(kind) == 0 for kind in ORDER if cache.pool.allocator.has(kind))
    cache.pool.memory.bytes[:] = 255  # type: ignore[attr-defined]
    assert cache.open(1, tokens).n_cached_tokens == n_tokens
    grow(cache, written, 1, tokens)
    cache.audit()
    assert cache.swap.stats()["used_bytes"] == 0 and not cache.swap.saved
    cache.release(1)
    cache.audit()


def test_shared_units_are_saved_once_and_found_again() -> None:
    cache = make(LAYOUTS["plain"], 12)
    written, system = Written(cache), list(range(16))
    for seq_id in (1, 2, 3):
        cache.open(seq_id, [*system, seq_id])
        grow(cache, written, seq_id, [*system, seq_id])
    assert cache.n_lost_tokens(2) == 1, "the prompt that others use too would not be run again"
    assert cache.swap_out(1)
    first_bytes = cache.swap.used_bytes()
    assert cache.swap_out(2)
    assert cache.swap.used_bytes() - first_bytes == cache.pool.layout.page_bytes("kv")
    n_moved = cache.swap.moved_bytes
    assert cache.open(1, [*system, 1, 50]).n_cached_tokens == 17
    grow(cache, written, 1, [*system, 1, 50])
    assert cache.swap.moved_bytes - n_moved == cache.pool.layout.page_bytes("kv"), "the system prompt was still there"
    cache.forget(2)
    cache.audit()
    assert cache.swap.used_bytes() == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fails_at", [1, 2])
def test_copies_that_fail_leave_nothing_behind(name: str, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way out the sequence stays as it was, beside one that shares its units; on the way in, it begins anew."""
    cache = make(LAYOUTS[name], 12)
    written, tokens = Written(cache), list(range(100, 122))
    for seq_id in (1, 2):
        cache.open(seq_id, [*tokens, seq_id])
        grow(cache, written, seq_id, [*tokens, seq_id])
    assert cache.swap_out(2)
    used_bytes, copier = cache.swap.used_bytes(), cache.pool.copier
    n_calls = 0

    def fails(*_: object) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls >= fails_at:
            raise OSError("no link")

    with monkeypatch.context() as broken:
        broken.setattr(copier, "copy_out", fails)
        for _ in range(2):
            n_calls = fails_at - 1
            assert not cache.swap_out(1)
            assert cache.swap.used_bytes() == used_bytes and list(cache.swap.saved) == [2]
            cache.audit()
            written.check(1, [*tokens, 1])
    assert cache.swap_out(1)
    cache.evict_prefix(1 << 20)
    cache.evict_prefix(1 << 20, states_first=True)
    with monkeypatch.context() as broken:
        n_calls = fails_at - 1
        broken.setattr(copier, "copy_in", fails)
        assert cache.open(1, [*tokens, 1]).n_cached_tokens == 23
        with pytest.raises(LostPagesError, match="no link"):
            cache.extend(1, 2)
    cache.release(1, keep_prefix=False)
    cache.forget(1)
    cache.audit()
    assert cache.open(1, [*tokens, 1]).n_cached_tokens == 0, "nothing of it may be taken for its content"
    grow(cache, written, 1, [*tokens, 1])
    assert cache.open(2, [*tokens, 2]).n_cached_tokens == 23
    grow(cache, written, 2, [*tokens, 2, 7, 8])
    cache.audit()
    assert cache.swap.used_bytes() == 0


def test_no_room_changes_nothing() -> None:
    cache = make(LAYOUTS["hybrid"], 12, swap_bytes=3000)
    written, tokens = Written(cache), list(range(30))
    for seq_id in (1, 2):
        cache.open(seq_id, tokens)
        grow(cache, written, seq_id, tokens)
    assert cache.swap_out(1)
    used = cache.swap.used_bytes()
    assert not cache.swap_out(2) and cache.swap.used_bytes() == used <= 3000
    written.check(2, tokens)
    cache.audit()
    assert make(LAYOUTS["hybrid"], 4, swap_bytes=0).swap.limit_bytes == 0


def test_a_refused_return_keeps_what_was_saved() -> None:
    """Opened, no pages to be had, released: as an admission that fails. The next try still finds everything."""
    cache = make(LAYOUTS["plain"], 2)
    written, tokens = Written(cache), list(range(40))
    cache.open(1, tokens)
    grow(cache, written, 1, tokens)
    assert cache.swap_out(1)
    cache.open(2, [7] * 50)
    grow(cache, written, 2, [7] * 50)
    assert cache.open(1, tokens + [1]).n_cached_tokens == 40
    assert not cache.extend(1, 1)
    cache.release(1)
    cache.audit()
    cache.release(2)
    assert cache.open(1, tokens + [1]).n_cached_tokens == 40
    grow(cache, written, 1, tokens + [1])
    cache.audit()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(LAYOUTS)), st.booleans())
def test_random_lives(rng: random.Random, name: str, prefix_cache: bool) -> None:
    """Sequences with common starts grow, move out, come back, end, in any order: every page always holds what was
    written for its prefix, every audit is clean, and nothing is left."""
    cache = make(LAYOUTS[name], 8, swap_bytes=rng.choice([2000, 8000, 1 << 20]), prefix_cache=prefix_cache)
    written = Written(cache)
    tokens: dict[int, list[int]] = {}
    is_out: set[int] = set()
    for number in range(60):
        ids = list(tokens)
        seq_id = rng.choice(ids) if ids and rng.random() < 0.8 else number
        if seq_id not in tokens:
            prompt = [rng.randrange(2)] * rng.randrange(1, 14)
            hit = cache.open(seq_id, prompt).n_cached_tokens
            if not cache.extend(seq_id, len(prompt) - hit):
                cache.release(seq_id)
                continue
            written.check(seq_id, prompt[:hit])
            written.write(seq_id, prompt)
            cache.commit(seq_id, prompt[hit:])
            tokens[seq_id] = prompt
        elif seq_id in is_out:
            assert cache.open(seq_id, [*tokens[seq_id], 9]).n_cached_tokens == len(tokens[seq_id])
            if cache.extend(seq_id, 1):
                is_out.discard(seq_id)
                written.check(seq_id, tokens[seq_id])
            else:
                cache.release(seq_id)
        elif rng.random() < 0.4:
            if cache.swap_out(seq_id):
                is_out.add(seq_id)
        elif rng.random() < 0.7:
            more = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
            if cache.extend(seq_id, len(more)):
                written.check(seq_id, tokens[seq_id])
                tokens[seq_id] = tokens[seq_id] + more
                written.write(seq_id, tokens[seq_id])
                cache.commit(seq_id, more)
        else:
            cache.release(seq_id)
            del tokens[seq_id]
        cache.audit()
    for seq_id in tokens:
        if seq_id in is_out:
            cache.forget(seq_id)
        else:
            written.check(seq_id, tokens[seq_id])
            cache.release(seq_id)
    cache.audit()
    assert cache.swap.used_bytes() == 0 and np.isfinite(cache.swap.bytes_per_s)
