"""Snapshots of states in host memory: the bytes, the bound, who leaves, and that a cache with it is still sound."""

from __future__ import annotations

import random

import memory_pools as pools
import numpy as np
import pytest
from cache_lives import batch_rows, fill_states, prefill, states_hold, write_kv

from rimuru.base.errors import AuditError, LostPagesError
from rimuru.memory.cache import SequenceCache


def make(n_huge: int, n_slots: int) -> SequenceCache:
    layout = pools.hybrid()
    slot_bytes = 2 * 768 + 3 * 3 * 32 + 48
    return SequenceCache(pools.make_pool(layout, n_huge), layout, host_bytes=n_slots * slot_bytes + 5)


def conversation(cache: SequenceCache, number: int) -> list[int]:
    """A finished sequence of ten tokens whose states are full of its number; its snapshot stays in the pool."""
    tokens = [100 * number + i for i in range(10)]
    prefill(cache, number, tokens)
    fill_states(cache, number, number)
    write_kv(cache, number, number)
    cache.release(number)
    return tokens


def hit(cache: SequenceCache, tokens: list[int]) -> int:
    n_tokens = cache.open("probe", [*tokens, 7]).n_cached_tokens
    cache.release("probe")
    return n_tokens


def test_states_and_the_started_page_come_back_from_ram() -> None:
    cache = make(12, 2)
    assert cache.snapshots.host.n_slots == 2
    tokens = conversation(cache, 5)
    in_use = cache.pool.allocator.pages_in_use("ssm")
    assert cache.snapshots.evict() == 2 + 3 + 1 and cache.snapshots.host.n_used == 1
    assert in_use == 2 and cache.pool.allocator.pages_in_use("ssm") == 0
    cache.audit()
    assert cache.open("b", [*tokens, 1, 2]).n_cached_tokens == 10
    assert cache.extend("b", 2) and states_hold(cache, "b", 5)
    last = batch_rows(cache, ["b"])[0][0, 0, 2]
    assert (pools.page_bytes_of(cache.pool, "kv", int(last)) == 5).all()
    cache.audit()
    cache.release("b")
    assert hit(cache, tokens) == 10, "the copy in RAM stays"


def test_copies_that_fail_cost_the_snapshot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out to host memory, back from it, from a sequence to its snapshot and from a snapshot to a sequence."""

    def fails(*_: object) -> None:
        raise OSError("no link")

    cache = make(12, 2)
    copier = cache.pool.copier
    first, second, third = (conversation(cache, number) for number in (5, 6, 7))
    with monkeypatch.context() as broken:
        broken.setattr(copier, "copy_out", fails)
        assert cache.snapshots.evict() > 0 and cache.snapshots.host.n_used == 0
        cache.audit()
    assert hit(cache, first) == 0 and cache.snapshots.evict() > 0
    for name, tokens in (("copy_in", second), ("copy_within", third)):
        assert cache.open("b", [*tokens, 1, 2]).n_cached_tokens == 10
        with monkeypatch.context() as broken:
            broken.setattr(copier, name, fails)
            with pytest.raises(LostPagesError, match="no link"):
                cache.extend("b", 2)
        cache.release("b", keep_prefix=False)
        cache.audit()
        assert hit(cache, tokens) == 0
    prefill(cache, "c", list(range(9)))
    with monkeypatch.context() as broken:
        broken.setattr(copier, "copy_within", fails)
        assert not cache.snapshot("c")
    cache.audit()
    assert cache.snapshot("c")
    cache.audit()


def test_ram_is_bounded_and_the_oldest_leaves() -> None:
    cache = make(40, 2)
    prompts = [conversation(cache, number) for number in range(1, 5)]
    assert hit(cache, prompts[0]) == 10  # of use again: the second one is the oldest now
    for _ in range(4):
        assert cache.snapshots.evict()
    assert cache.snapshots.evict() == 0 and cache.snapshots.host.is_full
    cache.audit()
    assert [hit(cache, prompt) for prompt in prompts] == [10, 0, 0, 10]


def test_a_snapshot_goes_to_ram_where_the_pool_has_no_page() -> None:
    cache = make(2, 1)  # two huge pages: states of a sequence take one, KV the other
    prefill(cache, "a", list(range(9)))
    fill_states(cache, "a", 9)
    taken = []
    while (pages := cache.pool.allocate("ssm", 1)) is not None:
        taken.append(pages)
    assert cache.snapshot("a") and cache.snapshots.host.n_used == 1
    for pages in taken:
        cache.pool.free("ssm", pages)
    fill_states(cache, "a", 77)
    assert cache.extend("a", 1)
    cache.release("a")  # in a step: what it holds now is not kept
    assert cache.open("b", list(range(20))).n_cached_tokens == 9
    assert cache.extend("b", 3) and states_hold(cache, "b", 9)
    cache.audit()


def test_ram_is_given_back_with_the_kv_pages_that_a_snapshot_needs() -> None:
    cache = make(12, 3)
    conversation(cache, 1)
    conversation(cache, 2)
    while cache.snapshots.evict():
        pass
    assert cache.snapshots.host.n_used == 2
    cache.evict_prefix(100)
    assert cache.snapshots.host.n_used == 0 and len(cache.snapshots) == 0
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes


def test_pages_are_gathered_before_prefixes_are_lost() -> None:
    """Whoever can move pages is asked first, and told whether experts may go for it."""
    cache = make(12, 0)
    conversation(cache, 1)
    held = cache.pool.allocate("expert", cache.pool.allocator.free_pages("expert"))
    assert held is not None
    asked: list[tuple[dict[str, int], bool]] = []

    def make_pages(needs: dict[str, int], is_worth_experts: bool) -> bool:
        asked.append((needs, is_worth_experts))
        if is_worth_experts:
            cache.pool.free("expert", held)
        return is_worth_experts

    cache.make_pages = make_pages  # type: ignore[assignment]
    cache.open("b", [1, 2, 3])
    assert cache.extend("b", 3) and asked[-1][0]["ssm"] == 2
    assert asked[-1][1] and len(cache.snapshots) == 1


def test_audit_notices_a_lost_slot() -> None:
    cache = make(12, 2)
    conversation(cache, 1)
    cache.snapshots.evict()
    cache.snapshots.host.save(cache.states.pages(0))
    with pytest.raises(AuditError, match="host slots"):
        cache.audit()


def test_random_lives_with_ram() -> None:
    """Prompts of a few families, evictions at random times: a state that is restored is that of exactly its tokens."""
    cache, rng = make(6, 3), random.Random(3)
    families = [[100 * f + i for i in range(40)] for f in range(3)]
    for number in range(400):
        tokens = families[rng.randrange(3)][: rng.randrange(2, 40)]
        n_known = cache.open(number, tokens).n_cached_tokens
        if not cache.extend(number, len(tokens) - n_known):
            cache.release(number)
            continue
        if n_known:
            slot = cache._slots[number]
            for kind, ids in cache.states.pages(slot).items():
                for page in ids:
                    stamp = pools.page_bytes_of(cache.pool, kind, int(page))[:8].view(np.int32)
                    assert stamp.tolist() == [n_known, tokens[0]]
        cache.commit(number, tokens[n_known:])
        for kind, ids in cache.states.pages(cache._slots[number]).items():
            for page in ids:
                stamp = pools.page_bytes_of(cache.pool, kind, int(page))[:8].view(np.int32)
                stamp[:] = [len(tokens), tokens[0]]
        if rng.random() < 0.5:
            cache.snapshot(number)
        cache.release(number, keep_prefix=rng.random() < 0.8)
        for _ in range(rng.randrange(3)):
            cache.snapshots.evict()
        if rng.random() < 0.1:
            cache.evict_prefix(rng.randrange(1, 6))
        if number % 20 == 0:
            cache.audit()
    cache.audit()
    assert cache.snapshots.host.n_used <= 3
