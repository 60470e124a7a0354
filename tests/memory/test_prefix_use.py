"""KV pages of models with states are of use as long as a kept state stands on them: they leave with the last one, in
whatever way it leaves, and no state that is kept lacks one."""

from __future__ import annotations

import random
from dataclasses import replace

import memory_pools as pools
import pytest
from cache_lives import prefill

from rimuru.base.errors import AuditError
from rimuru.memory.cache import SequenceCache
from rimuru.memory.prefix import unit_hashes
from rimuru.memory.specs import PoolLayout

TOKENS = list(range(40))


def make(n_huge: int = 12, layout: PoolLayout | None = None, n_host_slots: int = 0) -> SequenceCache:
    """Units of four tokens."""
    layout = layout or pools.hybrid()
    return SequenceCache(pools.make_pool(layout, n_huge), layout, host_bytes=n_host_slots * 2000)


def kv_in_use(cache: SequenceCache) -> int:
    return cache.pool.allocator.pages_in_use("kv")


def hit(cache: SequenceCache, tokens: list[int]) -> int:
    n_tokens = cache.open("probe", tokens).n_cached_tokens
    cache.release("probe")
    return n_tokens


def step(cache: SequenceCache, seq_id: str, tokens: list[int]) -> None:
    assert cache.extend(seq_id, len(tokens))
    cache.commit(seq_id, tokens)


# ---- with the state, and not before
def test_pages_leave_with_the_last_state_that_stands_on_them() -> None:
    cache = make()
    prefill(cache, "a", TOKENS[:9])
    assert cache.snapshot("a")
    step(cache, "a", TOKENS[9:18])
    cache.release("a")  # states after 9 and 18 tokens
    assert len(cache.snapshots) == 2 and cache.cached_pages == 4 + 2
    assert cache.snapshots.all()[-1].n_tokens == 9, "what it began with counts as used last"
    assert cache.snapshots.evict() and len(cache.snapshots) == 1
    assert cache.cached_pages == 2 + 1 and hit(cache, TOKENS) == 9
    cache.audit()
    assert cache.snapshots.evict() and kv_in_use(cache) == 0
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes


def test_pages_that_somebody_uses_leave_when_they_end() -> None:
    cache = make()
    prefill(cache, "a", TOKENS[:9])
    cache.release("a")
    assert cache.open("b", TOKENS).n_cached_tokens == 9
    step(cache, "b", TOKENS[9:13])
    assert cache.snapshots.evict() and cache.cached_pages == 0
    assert kv_in_use(cache) == 4, "b still reads the units of a"
    cache.audit()
    assert cache.extend("b", 1)
    cache.release("b")  # in a step: no state of it is kept
    assert kv_in_use(cache) == 0
    cache.audit()


@pytest.mark.parametrize("way", ["release", "failure"])
def test_what_is_written_beyond_the_last_state_leaves_with_a_cancel(way: str) -> None:
    cache = make()
    prefill(cache, "a", TOKENS[:9])
    assert cache.snapshot("a")
    step(cache, "a", TOKENS[9:30])
    assert cache.extend("a", 1)
    cache.release("a", keep_prefix=way == "release")
    assert kv_in_use(cache) == (2 + 1 if way == "release" else 0)
    assert hit(cache, TOKENS) == (9 if way == "release" else 0)
    cache.audit()


def test_states_in_host_memory_keep_their_pages() -> None:
    cache = make(n_host_slots=1)
    prefill(cache, "a", TOKENS[:9])
    cache.release("a")
    assert cache.snapshots.evict() and cache.snapshots.host.n_used == 1
    assert kv_in_use(cache) == 2 and hit(cache, TOKENS) == 9
    cache.audit()


# ---- two who write the same
def test_a_state_to_come_brings_its_own_pages() -> None:
    """Both write the same prompt; the units of the one that came first are findable, and it is cancelled."""
    cache = make()
    for name in ("a", "b"):
        assert cache.open(name, TOKENS).n_cached_tokens == 0
    for name in ("a", "b"):
        step(cache, name, TOKENS[:9])
    assert cache.extend("a", 1)
    cache.release("a")
    assert kv_in_use(cache) == 3 and cache.cached_pages == 0, "those of b"
    assert cache.snapshot("b")
    assert kv_in_use(cache) == 3 + 1 and hit(cache, TOKENS) == 9
    cache.release("b", keep_prefix=True)
    cache.audit()
    assert hit(cache, TOKENS) == 9


def test_a_unit_in_the_middle_takes_all_states_along_that_stand_on_it() -> None:
    cache = make()
    for name in ("a", "b"):
        assert cache.open(name, TOKENS).n_cached_tokens == 0
    for name in ("a", "b"):
        step(cache, name, TOKENS[:9])
    cache.release("a")
    step(cache, "b", TOKENS[9:18])
    cache.release("b")
    assert len(cache.snapshots) == 2 and cache.cached_pages == 4 + 2
    cache.kv.evict(1)  # type: ignore[union-attr]
    assert len(cache.snapshots) == 0 and kv_in_use(cache) == 0
    cache.audit()


# ---- which states stay
def test_what_conversations_begin_with_outlives_what_they_went_through() -> None:
    """Five conversations after one system prompt, in a pool that holds the states of three places at a time."""
    cache = make(4)
    system = TOKENS[:6]
    for number in range(5):
        prompt = [*system, *range(100 * number + 100, 100 * number + 112)]
        n_known = cache.open(number, [*prompt, 0]).n_cached_tokens
        assert n_known == (6 if number else 0)
        for stop in (6, 12, 18):
            if stop > n_known:
                n_done = max(n_known, stop - 6)
                step(cache, number, prompt[n_done:stop])  # type: ignore[arg-type]
                cache.snapshot(number)
        cache.release(number)
        cache.audit()
        assert hit(cache, [*prompt, 0]) == 18


def test_small_pools_keep_the_states_of_one_conversation() -> None:
    """In large ones a sixteenth of the pool, as ever; twice as much with the KV pages below them."""
    shares = {n: make(n).snapshots for n in (4, 10, 16, 17, 24, 100)}
    slot_bytes = shares[4].slot_bytes
    assert slot_bytes == 2 * 768 + 3 * 3 * 32 + 48
    for n, snapshots in shares.items():
        total = n * 2304
        assert snapshots.share_bytes == max(total / 16, min(2 * slot_bytes, total / 8))
        assert snapshots.prefix_share_bytes == 2 * snapshots.share_bytes
    assert shares[17].share_bytes == 2 * slot_bytes and shares[100].share_bytes == 100 * 2304 / 16


def test_experts_go_where_giving_prefixes_up_has_left_one_conversation() -> None:
    """Whoever can take pages from experts is told first that it is not worth it, then that it is."""
    cache = make(24)
    for number in range(8):
        prefill(cache, number, [100 * number + i for i in range(9)])
        cache.release(number)
    held = cache.pool.allocate("expert", cache.pool.allocator.free_pages("expert"))
    assert held is not None
    asked: list[tuple[bool, int]] = []

    def make_pages(needs: dict[str, int], is_worth_experts: bool) -> bool:
        asked.append((is_worth_experts, len(cache.snapshots)))
        if is_worth_experts:
            cache.pool.free("expert", held)
        return is_worth_experts

    cache.make_pages = make_pages  # type: ignore[assignment]
    cache.open("b", TOKENS * 19)
    assert cache.extend("b", 760)
    assert [is_worth for is_worth, _ in asked] == [False, True]
    assert 2 <= len(cache.snapshots) == asked[-1][1] < 8
    cache.audit()


# ---- any life
def windowed() -> PoolLayout:
    return replace(pools.hybrid(), kv=pools.kv_layout(48, "expert", (4, None), (2, 5)))


@pytest.mark.parametrize(
    "layout", [pools.hybrid(), windowed(), pools.dense_hybrid()], ids=["hybrid", "window", "dense"]
)
@pytest.mark.parametrize("seed", range(6))
def test_at_any_time_a_page_that_waits_has_a_state_and_a_state_has_its_pages(layout: PoolLayout, seed: int) -> None:
    """Several at once, of families of prompts that part at random places, through every way out; what should be there
    is reckoned here from the tokens alone."""
    rng = random.Random(seed)
    cache = make(rng.randrange(8, 16), layout, n_host_slots=rng.choice([0, 2]))
    assert cache.kv is not None
    chains: dict[bytes, list[int]] = {cache.kv.root: []}
    running: dict[int, list[int]] = {}
    n_hits = n_waiting = 0
    has_window = any(group.window is not None for group in cache.kv.layout.groups)
    for number in range(250):
        prompt = (
            [1000 * rng.randrange(2)] * 5 + [rng.randrange(2) for _ in range(3)] + list(range(rng.randrange(1, 30)))
        )
        for n, key in enumerate(unit_hashes(cache.kv.root, prompt, len(prompt) // 4, 4), 1):
            chains[key] = prompt[: 4 * n]
        n_known = cache.open(number, prompt).n_cached_tokens
        running[number] = prompt[n_known:]
        n_hits += n_known > 0
        for seq_id in list(running):
            piece = running[seq_id][: rng.randrange(1, 12)]
            way = rng.random()
            if piece and cache.extend(seq_id, len(piece)) and way > 0.1:
                cache.commit(seq_id, piece)
                del running[seq_id][: len(piece)]
                if rng.random() < 0.4:
                    cache.snapshot(seq_id)
            elif way < 0.4 or not running[seq_id]:
                cache.release(seq_id, keep_prefix=rng.random() < 0.8)
                del running[seq_id]
        if rng.random() < 0.2:
            cache.evict_prefix(rng.randrange(1, 8), states_first=rng.random() < 0.5)
        cache.audit()
        known = [(s, chains[s.unit_hash] + list(s.tail)) for s in cache.snapshots._order.values()]
        wanted = {key for key, tokens in chains.items() if any(kept[: len(tokens)] == tokens for _, kept in known)}
        waiting = {block.key[1] for block in cache.kv.index.unused()}
        assert waiting <= wanted
        n_waiting += len(waiting)
        for snapshot, tokens in known:
            assert snapshot.n_tokens == len(tokens)
            found = hit(cache, [*tokens, 12345])
            assert found == len(tokens) or (has_window and found < len(tokens))  # what it sees may have left its window
    assert n_hits > 5 and n_waiting > 50


def test_audit_notices_pages_without_a_state_and_states_without_pages() -> None:
    cache = make()
    prefill(cache, "a", TOKENS[:9])
    cache.release("a")
    cache.audit()
    snapshots, kv = cache.snapshots, cache.kv
    assert kv is not None
    kv.is_of_use = lambda unit_hash: False
    with pytest.raises(AuditError, match="no state is kept"):
        cache.audit()
    kv.is_of_use = snapshots.is_of_use
    snapshots._standing.clear()
    with pytest.raises(AuditError, match="are counted"):
        snapshots.audit()
    snapshots._standing.update(snapshots.all()[0].units)
    snapshots.audit()
    kv.on_evict = None
    kv.evict(1)
    with pytest.raises(AuditError, match="KV pages are gone"):
        snapshots.audit()
