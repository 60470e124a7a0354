"""SequenceCache: lengths of prefix hits, windows, pressure, every way out; and random lives against a model."""

from __future__ import annotations

import random

import memory_pools as pools
import numpy as np
import pytest
from cache_lives import batch_rows, fill_states, prefill, states_hold, write_kv
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rimuru.base.errors import AuditError
from rimuru.memory.cache import SequenceCache
from rimuru.memory.specs import PoolLayout


def make(layout: PoolLayout, n_huge: int, **options: bool) -> SequenceCache:
    return SequenceCache(pools.make_pool(layout, n_huge), layout, **options)  # type: ignore[arg-type]


# ---- prefix hits
@pytest.mark.parametrize("n_page", [4, 7])
@pytest.mark.parametrize("n_prompt", [1, 3, 4, 5, 7, 8, 9, 13, 14, 15, 21, 22])
def test_hits_are_whole_pages_and_leave_a_token(n_page: int, n_prompt: int) -> None:
    cache = make(pools.moe((n_page, None)), 20)
    tokens = list(range(100, 100 + n_prompt))
    assert prefill(cache, "a", tokens) == 0
    cache.release("a")
    assert prefill(cache, "b", tokens) == (n_prompt - 1) // n_page * n_page
    cache.release("b")


@pytest.mark.parametrize("k", [0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_hits_end_where_prompts_part(k: int) -> None:
    cache = make(pools.moe((4, None)), 20)
    first = list(range(20))
    prefill(cache, "a", first, step=3)
    second = first[:k] + [500 + i for i in range(20 - k)]
    assert prefill(cache, "b", second, step=5) == k // 4 * 4
    kv = batch_rows(cache, ["a", "b"])[0][0]
    n_shared = k // 4
    assert kv[0, :n_shared].tolist() == kv[1, :n_shared].tolist()
    assert not set(kv[0, n_shared:5].tolist()) & set(kv[1, n_shared:5].tolist())
    cache.release("a")
    cache.release("b")
    cache.audit()


def test_same_tokens_after_another_start_are_no_hit() -> None:
    cache = make(pools.moe((4, None)), 20)
    prefill(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    assert prefill(cache, "b", [9, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert prefill(cache, "c", [5, 6, 7, 8, 9]) == 0


def test_groups_share_at_their_common_multiple() -> None:
    cache = make(pools.moe((4, None), (6, None)), 30)
    tokens = list(range(30))
    prefill(cache, "a", tokens)
    assert prefill(cache, "b", tokens) == 24
    kv = batch_rows(cache, ["a", "b"])[0]
    assert kv[0, 0, :6].tolist() == kv[0, 1, :6].tolist() and kv[1, 0, :4].tolist() == kv[1, 1, :4].tolist()
    assert (kv[0, :, 8:] == -1).all() and (kv[1, :, 5:] == -1).all()


def test_decoded_tokens_are_found_too() -> None:
    cache = make(pools.moe((4, None)), 20)
    prefill(cache, "a", [1, 2, 3])
    for token in (4, 5, 6, 7, 8, 9):
        assert cache.extend("a", 1)
        cache.commit("a", [token])
    cache.release("a")
    assert prefill(cache, "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


def test_without_prefix_cache_nothing_is_kept() -> None:
    cache = make(pools.moe((4, None)), 20, prefix_cache=False)
    prefill(cache, "a", list(range(20)))
    cache.release("a")
    assert cache.cached_pages == 0 and cache.pool.stats()["free_bytes"] == cache.pool.total_bytes
    assert prefill(cache, "b", list(range(20))) == 0


def test_release_without_prefix_forgets() -> None:
    cache = make(pools.moe((4, None)), 20)
    prefill(cache, "a", list(range(20)))
    prefill(cache, "b", list(range(8)) + [99, 98])
    cache.release("a", keep_prefix=False)
    assert cache.cached_pages == 0
    assert prefill(cache, "c", list(range(20))) == 8, "what b still uses stays"


def test_salts_keep_models_apart() -> None:
    pool = pools.make_pool(pools.moe((4, None)), 20)
    a, b = (SequenceCache(pool, pool.layout, salt=salt) for salt in (b"model f16", b"model f32"))
    assert a.kv is not None and b.kv is not None and a.kv.root != b.kv.root


# ---- windows
def test_windows_give_back_what_no_token_sees() -> None:
    cache = make(pools.moe((4, None), (4, 8)), 40)
    tokens = list(range(50))
    prefill(cache, "a", tokens[:24], step=24)
    for token in tokens[24:]:
        assert cache.extend("a", 1)
        cache.commit("a", [token])
        cache.audit()
        kv = batch_rows(cache, ["a"])[0][:, 0]
        n = token + 1
        for column in range(-(-n // 4)):
            last = column * 4 + 3
            is_seen = last > n - 8  # by the token at position n
            assert kv[0, column] >= 0 and (kv[1, column] >= 0) == is_seen, (n, column)
    needs = cache.peak_pages(50, 24)
    assert sum(cache.requests()[0]["pages_by_kind"].values()) <= needs["kv"]
    cache.release("a")
    assert prefill(cache, "b", [*tokens, 1, 2, 3]) == 48
    kv = batch_rows(cache, ["b"])[0][:, 0]
    assert (kv[0, :13] >= 0).all() and (kv[1, :11] == -1).all() and (kv[1, 11:13] >= 0).all()


def test_window_pages_that_are_gone_shorten_the_hit() -> None:
    cache = make(pools.moe((4, None), (4, 8)), 40)
    tokens = list(range(40))
    prefill(cache, "a", tokens, step=4)
    cache.release("a")
    assert cache.kv is not None
    for key in [key for key in cache.kv.index.users() if key[0] == 1][-2:]:
        block = cache.kv.index.get(*key)
        assert block is not None
        cache.kv.index.take(block)
        pages = cache.kv.index.drop(block, keep=False)
        assert pages is not None
        cache.pool.free("kv", pages)
    assert cache.open("b", tokens + [1]).n_cached_tokens == 32
    cache.audit()


# ---- pressure
def test_extend_is_atomic_and_evicts_what_is_unused() -> None:
    cache = make(pools.moe((4, None)), 2)  # 16 KV pages
    prefill(cache, "a", list(range(40)))
    cache.release("a")
    assert cache.cached_pages == 10 and cache.free_pages("kv") == 6
    cache.open("b", [900 + i for i in range(60)])
    before = cache.pool.stats()
    assert not cache.can_extend("b", 68) and not cache.extend("b", 68)
    assert cache.pool.stats() == before and cache.cached_pages == 10, "a hopeless wish evicts nothing"
    assert cache.can_extend("b", 60) and cache.extend("b", 60)
    assert cache.cached_pages == 1
    cache.audit()
    assert cache.open("c", list(range(40))).n_cached_tokens == 4, "the start of the prefix is evicted last"
    cache.release("c")
    cache.release("b")
    assert cache.evict_prefix(100) == 1
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes


def test_extend_twice_asks_for_the_same_room() -> None:
    cache = make(pools.moe((4, None)), 4)
    cache.open("a", [1, 2, 3])
    assert cache.extend("a", 9) and cache.extend("a", 9)
    assert cache.requests() == [{"id": "a", "tokens": 0, "pages": 3, "pages_by_kind": {"kv": 3}}]
    assert cache.pages_needed("a", 12) == {"kv": 0} and cache.pages_needed("a", 13) == {"kv": 1}
    with pytest.raises(AuditError, match="committed"):
        cache.commit("a", list(range(13)))


def test_fits_alone() -> None:
    cache = make(pools.hybrid(), 3)
    assert cache.fits_alone(4, 4) and not cache.fits_alone(10_000, 4)


def test_misuse_is_noticed() -> None:
    cache = make(pools.moe((4, None)), 4)
    cache.open("a", [1])
    with pytest.raises(AuditError, match="open already"):
        cache.open("a", [1])
    cache.release("a")
    with pytest.raises(AuditError, match="not open"):
        cache.release("a")


def test_audit_notices_damage() -> None:
    def sound() -> SequenceCache:
        cache = make(pools.moe((4, None), (4, 8)), 40)
        prefill(cache, "a", list(range(30)))
        prefill(cache, "b", list(range(10)))
        return cache

    cache = sound()
    cache.pool.allocate("kv", 1)
    with pytest.raises(AuditError, match="in use"):
        cache.audit()
    cache = sound()
    assert cache.kv is not None
    cache.kv.view.groups[0].ids[0, 1] += 1
    with pytest.raises(AuditError, match="block's pages"):
        cache.audit()
    cache = sound()
    assert cache.kv is not None
    next(iter(cache.kv.index._blocks.values())).n_users += 1
    with pytest.raises(AuditError, match="users"):
        cache.audit()
    cache = sound()
    cache._slots["b"] = cache._slots["a"]
    with pytest.raises(AuditError, match="share a slot"):
        cache.audit()
    cache = sound()
    assert cache.kv is not None
    cache.kv.view.groups[1].ids[0, 7] = -1
    with pytest.raises(AuditError, match="lacks a page"):
        cache.audit()
    cache = sound()
    assert cache.kv is not None
    cache.kv.index.n_unused_pages += 1
    with pytest.raises(AuditError, match="counted"):
        cache.audit()


# ---- states
def test_states_come_with_the_first_extend() -> None:
    cache = make(pools.hybrid(), 6)
    cache.open("a", [1, 2, 3])
    assert cache.pages_needed("a", 3) == {"ssm": 2, "conv": 3, "kv": 1}
    assert cache.extend("a", 3)
    _, ssm, conv, fresh = batch_rows(cache, ["a"])
    assert fresh.tolist() == [True] and len(set(ssm[0].tolist())) == 2 and len(set(conv[0].tolist())) == 3
    cache.commit("a", [1, 2, 3])
    assert batch_rows(cache, ["a"])[3].tolist() == [False]
    assert cache.pages_needed("a", 1) == {"kv": 0}
    assert cache.requests()[0]["pages"] == 2 + 3 * 3 + 1
    cache.release("a", keep_prefix=False)
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes


def test_hybrid_prefix_needs_a_snapshot_at_exactly_its_length() -> None:
    cache = make(pools.hybrid(), 12)
    tokens = list(range(40))
    prefill(cache, "a", tokens[:10])
    fill_states(cache, "a", 10)
    write_kv(cache, "a", 33)
    assert cache.snapshot("a") and cache.snapshot("a") and len(cache.snapshots) == 1
    prefill_rest = tokens[10:17]
    assert cache.extend("a", 7)
    assert not cache.snapshot("a"), "a step may be running"
    cache.commit("a", prefill_rest)
    fill_states(cache, "a", 17)
    cache.audit()
    assert cache.open("short", tokens[:10]).n_cached_tokens == 0, "one token must be left"
    cache.release("short")
    assert cache.open("b", tokens[:16] + [7]).n_cached_tokens == 10
    assert cache.pages_needed("b", 7) == {"ssm": 2, "conv": 3, "kv": 3}
    assert cache.extend("b", 7)
    assert states_hold(cache, "b", 10) and batch_rows(cache, ["b"])[3].tolist() == [False]
    kv = batch_rows(cache, ["a", "b"])[0][0]
    assert kv[0, :2].tolist() == kv[1, :2].tolist() and kv[0, 2] != kv[1, 2]
    assert (pools.page_bytes_of(cache.pool, "kv", int(kv[1, 2])) == 33).all(), "the started page is copied"
    cache.commit("b", [*tokens[10:16], 7])
    fill_states(cache, "b", 99)
    cache.release("a")  # its states stay, as a snapshot at 17 tokens
    cache.audit()
    assert cache.open("c", tokens).n_cached_tokens == 17
    assert cache.extend("c", 3) and states_hold(cache, "c", 17)
    cache.audit()
    for seq_id in ("b", "c"):
        cache.release(seq_id, keep_prefix=False)
    cache.audit()


def test_cancel_between_open_and_extend_keeps_the_snapshot() -> None:
    cache = make(pools.hybrid(), 12)
    prefill(cache, "a", list(range(9)))
    cache.release("a")
    for _ in range(3):
        assert cache.open("b", list(range(20))).n_cached_tokens == 9
        cache.release("b")
        cache.audit()
    assert len(cache.snapshots) == 1


def test_a_running_steps_state_is_never_kept() -> None:
    cache = make(pools.hybrid(), 12)
    prefill(cache, "a", list(range(9)))
    assert cache.extend("a", 1)
    cache.release("a")
    assert len(cache.snapshots) == 0 and cache.open("b", list(range(20))).n_cached_tokens == 0


def test_snapshots_go_with_the_kv_pages_they_need() -> None:
    cache = make(pools.hybrid(), 12)
    prefill(cache, "a", list(range(9)))
    cache.release("a")
    assert cache.cached_pages == 2 + 1 and cache.reclaimable_pages("ssm") == 2
    assert cache.evict_prefix(1) == 1
    assert len(cache.snapshots) == 0 and cache.reclaimable_pages("ssm") == 0
    cache.audit()
    cache.evict_prefix(10)
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes


def test_snapshots_make_way_for_requests() -> None:
    cache = make(pools.dense_hybrid(), 2)  # four SSM pages of 384 bytes
    prefill(cache, "a", [1, 2, 3])
    cache.release("a")
    assert len(cache.snapshots) == 1
    prefill(cache, "b", [5, 6, 7])
    assert cache.extend("b", 40)
    assert len(cache.snapshots) == 0
    cache.audit()


def test_flip_follows_moves_everywhere() -> None:
    cache = make(pools.hybrid(), 12)
    prefill(cache, "a", list(range(9)))
    assert cache.snapshot("a")
    prefill(cache, "b", list(range(30)))
    allocator = cache.pool.allocator
    for kind, flip in cache.flips().items():
        sources = allocator.live_pages(range(12))[kind]
        targets = allocator.allocate(kind, sources.size)
        assert targets is not None
        flip(sources, targets)
        allocator.commit_move(kind, sources)
        cache.audit()
    assert cache.open("c", list(range(40))).n_cached_tokens == 9


# ---- every way out
@pytest.mark.parametrize("name", ["moe", "hybrid", "windows"])
def test_two_thousand_cancels_leak_nothing(name: str) -> None:
    layout = {"moe": pools.moe(), "hybrid": pools.hybrid(), "windows": pools.moe((4, None), (6, 10))}[name]
    cache = make(layout, 24)
    rng = random.Random(5)
    prompts = [[rng.randrange(50) for _ in range(40)] for _ in range(4)]
    running: dict[int, list[int]] = {}
    for seq_id in range(2000):
        tokens = rng.choice(prompts)[: rng.randrange(1, 40)] + [rng.randrange(50)]
        hit = cache.open(seq_id, tokens).n_cached_tokens
        assert hit < len(tokens)
        running[seq_id] = tokens[hit:]
        for other in list(running):
            exit_now = rng.random()
            if exit_now < 0.25:
                cache.release(other, keep_prefix=rng.random() < 0.7)
                del running[other]
                continue
            piece = running[other][: rng.randrange(1, 9)] or [rng.randrange(50)]
            if cache.extend(other, len(piece)):
                if exit_now < 0.3:
                    cache.release(other)
                    del running[other]
                    continue
                cache.commit(other, piece)
                running[other] = running[other][len(piece) :]
        if seq_id % 200 == 0:
            cache.audit()
            cache.pool.audit()
    for other in list(running):
        cache.release(other)
    assert len(cache) == 0 and cache.requests() == []
    cache.audit()
    while cache.evict_prefix(1000):
        pass
    assert cache.pool.stats()["free_bytes"] == cache.pool.total_bytes
    assert cache.pool.allocator.levels()["l1"] == {"total": 24, "free": 24}
    n_tokens = cache.pool.allocator.free_pages("kv") // (2 * len(layout.kv.groups)) * 4  # type: ignore[union-attr]
    cache.open("whole", [1])
    assert cache.extend("whole", n_tokens)


class CacheMachine(RuleBasedStateMachine):
    """Random lives; the model remembers the tokens of every sequence and the token behind every page's start."""

    @initialize(
        layout=st.sampled_from(
            [pools.moe(), pools.moe((4, None), (6, 9)), pools.moe((3, 5)), pools.hybrid(), pools.dense_hybrid()]
        ),
        n_huge=st.integers(2, 10),
    )
    def start(self, layout: PoolLayout, n_huge: int) -> None:
        self.cache = make(layout, n_huge)
        self.tokens: dict[int, list[int]] = {}
        self.planned: dict[int, list[int]] = {}
        self.next_id = 0

    @rule(n=st.integers(1, 24), branch=st.integers(0, 24), flavour=st.integers(0, 2))
    def open(self, n: int, branch: int, flavour: int) -> None:
        prompt = [i if i < branch else 100 * (flavour + 1) + i for i in range(n)]
        hit = self.cache.open(self.next_id, prompt).n_cached_tokens
        assert 0 <= hit < n and hit == self.cache.n_tokens(self.next_id)
        self.tokens[self.next_id] = prompt[:hit]
        self.planned[self.next_id] = prompt[hit:]
        self.next_id += 1

    @rule(data=st.data(), n=st.integers(1, 12))
    def step(self, data: st.DataObject, n: int) -> None:
        if not self.tokens:
            return
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        piece = self.planned[seq_id][:n] or [data.draw(st.integers(0, 3))]
        could = self.cache.can_extend(seq_id, len(piece))
        did = self.cache.extend(seq_id, len(piece))
        assert could == did
        if did:
            self.stamp(seq_id, len(piece), piece)
            self.cache.commit(seq_id, piece)
            self.tokens[seq_id] += piece
            del self.planned[seq_id][: len(piece)]

    def stamp(self, seq_id: int, n_new: int, piece: list[int]) -> None:
        """Write each token's id where its KV would go: shared or stale pages would show wrong ids later."""
        layout = self.cache.pool.layout.kv
        assert layout is not None
        kv = batch_rows(self.cache, [seq_id])[0][:, 0]
        for g, group in enumerate(layout.groups):
            for i, token in enumerate(piece):
                position = len(self.tokens[seq_id]) + i
                page = int(kv[g, position // group.page_tokens])
                assert page >= 0
                at = position % group.page_tokens * 4
                pools.page_bytes_of(self.cache.pool, "kv", page)[at : at + 4].view(np.int32)[0] = token
        slot = self.cache._slots[seq_id]
        for kind, ids in self.cache.states.pages(slot).items():
            for page in ids:
                pools.page_bytes_of(self.cache.pool, kind, int(page))[:4].view(np.int32)[0] = position + 1

    @rule(data=st.data(), keep=st.booleans(), mid_step=st.booleans())
    def release(self, data: st.DataObject, keep: bool, mid_step: bool) -> None:
        if self.tokens:
            seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
            if mid_step:
                self.cache.extend(seq_id, 1)
            self.cache.release(seq_id, keep)
            del self.tokens[seq_id], self.planned[seq_id]

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        if self.tokens:
            self.cache.snapshot(data.draw(st.sampled_from(sorted(self.tokens))))

    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        self.cache.evict_prefix(n)

    @invariant()
    def everything_reads_back(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.audit()
        self.cache.pool.audit()
        layout = self.cache.pool.layout.kv
        assert layout is not None
        for seq_id, tokens in self.tokens.items():
            if self.cache._open[seq_id].restore is not None:
                continue  # its pages are copied at the first extend
            kv = batch_rows(self.cache, [seq_id])[0][:, 0]
            for g, group in enumerate(layout.groups):
                first = 0 if group.window is None else max(0, len(tokens) - group.window + 1)
                for position in range(first, len(tokens)):
                    page = int(kv[g, position // group.page_tokens])
                    at = position % group.page_tokens * 4
                    stored = pools.page_bytes_of(self.cache.pool, "kv", page)[at : at + 4].view(np.int32)[0]
                    assert stored == tokens[position], (seq_id, g, position)
            for kind, ids in self.cache.states.pages(self.cache._slots[seq_id]).items():
                for page in ids:
                    stamp = pools.page_bytes_of(self.cache.pool, kind, int(page))[:4].view(np.int32)[0]
                    assert not tokens or stamp == len(tokens), "a state of another length"

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq_id in list(self.tokens):
                self.cache.release(seq_id)
            while self.cache.evict_prefix(100):
                pass
            assert self.cache.pool.stats()["free_bytes"] == self.cache.pool.total_bytes


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestCacheAgainstModel = CacheMachine.TestCase


def test_every_later_turn_of_a_conversation_computes_only_its_own_tokens() -> None:
    cache = make(pools.hybrid(), 200)
    rng = random.Random(3)
    history = [rng.randrange(1000) for _ in range(800)]
    prefill(cache, 0, history, step=128)
    for turn in range(1, 6):
        answer = [rng.randrange(1000) for _ in range(17)]
        for token in answer[:-1]:  # the last one is sampled, but never run
            assert cache.extend(turn - 1, 1)
            cache.commit(turn - 1, [token])
        cache.release(turn - 1)
        known = len(history) + len(answer) - 1
        history += answer + [rng.randrange(1000) for _ in range(30)]
        assert prefill(cache, turn, history) == known
    cache.release(5)
    assert prefill(cache, "edited", history[:-20] + [1001] * 9, step=50) <= len(history) - 20
    cache.audit()
