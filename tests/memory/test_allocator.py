"""PageAllocator against a model of Python sets, its rules one by one, and its audit on damaged structures."""

from __future__ import annotations

import memory_pools as pools
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rimuru.base.errors import AuditError
from rimuru.memory import allocator_jit as jit
from rimuru.memory.allocator import KIND_NUMBER, PageAllocator
from rimuru.memory.compaction import plan_compaction, plan_shrink

LAYOUTS = {
    "hybrid": pools.hybrid(),
    "hybrid-rows-that-do-not-divide": pools.hybrid(n_rows=5),
    "moe": pools.moe(),
    "dense": pools.dense(),
    "dense-hybrid": pools.dense_hybrid(),
}
KINDS = ("expert", "ssm", "kv", "conv")


def spans(allocator: PageAllocator, kind: str, ids: set[int] | np.ndarray) -> np.ndarray:
    """Byte intervals [n, 2] behind ids."""
    starts = np.array(sorted(ids), np.int64) * allocator.layout.page_bytes(kind)  # type: ignore[arg-type]
    return np.stack([starts, starts + allocator.unit_bytes(kind)], axis=1)


def check_disjoint(allocator: PageAllocator, held: dict[str, set[int]]) -> None:
    intervals = np.concatenate([spans(allocator, kind, ids) for kind, ids in held.items()])
    intervals = intervals[np.argsort(intervals[:, 0])]
    assert (intervals[1:, 0] >= intervals[:-1, 1]).all(), "pages overlap in bytes"
    if intervals.size:
        assert intervals[-1, 1] <= allocator.n_huge * allocator.layout.huge_bytes


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls; the model is one set of ids per kind."""

    @initialize(name=st.sampled_from(sorted(LAYOUTS)), n_huge=st.integers(1, 6), more=st.integers(0, 4))
    def start(self, name: str, n_huge: int, more: int) -> None:
        self.allocator = PageAllocator(LAYOUTS[name], n_huge, n_huge + more)
        self.held: dict[str, set[int]] = {kind: set() for kind in KINDS if self.allocator.has(kind)}

    @rule(data=st.data(), n=st.integers(0, 40), owner=st.integers(-1, 5))
    def allocate(self, data: st.DataObject, n: int, owner: int) -> None:
        kind = data.draw(st.sampled_from(sorted(self.held)))
        could, free = self.allocator.can_allocate(kind, n), self.allocator.free_pages(kind)
        ids = self.allocator.allocate(kind, n, owner)
        assert (ids is not None) == could == (n <= free)
        if ids is None:
            assert self.allocator.free_pages(kind) == free
            return
        assert ids.dtype == np.int32 and ids.size == n == len(set(ids.tolist()))
        assert not self.held[kind] & set(ids.tolist())
        assert self.allocator.free_pages(kind) == free - n
        assert (self.allocator.owners(kind, ids) == owner).all()
        self.held[kind] |= set(ids.tolist())

    @precondition(lambda self: "expert" in self.held)
    @rule(n=st.integers(1, 9))
    def allocate_expert(self, n: int) -> None:
        could = self.allocator.can_allocate("expert", n)
        ids = self.allocator.allocate_expert(n, 3)
        assert (ids is not None) == could
        if ids is not None:
            assert not self.held["expert"] & set(ids.tolist())
            self.held["expert"] |= set(ids.tolist())

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(sorted(self.held)))
        if self.held[kind]:
            ids = data.draw(st.lists(st.sampled_from(sorted(self.held[kind])), unique=True))
            self.allocator.free(kind, ids)
            self.held[kind] -= set(ids)

    @rule(data=st.data(), wrong=st.integers(-3, 5000))
    def free_wrongly(self, data: st.DataObject, wrong: int) -> None:
        kind = data.draw(st.sampled_from(sorted(self.held)))
        ids = sorted(self.held[kind])[:3]
        bad = [*ids, ids[0]] if ids else [0]
        if wrong not in self.held[kind]:
            bad = [*ids, wrong]
        with pytest.raises(AuditError):
            self.allocator.free(kind, bad)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        self.allocator.grow(data.draw(st.integers(self.allocator.n_huge, self.allocator.max_huge)))

    def _move(self, plan: object) -> None:
        for move in list(plan.moves):  # type: ignore[attr-defined]
            assert set(move.sources.tolist()) <= self.held[move.kind]
            assert not set(move.targets.tolist()) & self.held[move.kind]
            plan.commit(move)  # type: ignore[attr-defined]
            self.held[move.kind] -= set(move.sources.tolist())
            self.held[move.kind] |= set(move.targets.tolist())

    @rule(data=st.data(), go=st.booleans())
    def shrink(self, data: st.DataObject, go: bool) -> None:
        n_huge = data.draw(st.integers(0, self.allocator.n_huge))
        before = {kind: self.allocator.free_pages(kind) for kind in self.held}
        plan = plan_shrink(self.allocator, n_huge)
        if plan is not None and go:
            self._move(plan)
            self.allocator.audit()
            self.allocator.shrink(n_huge)
            plan.finish()
            return
        if plan is not None:
            self.allocator.audit()
            plan.cancel()
        assert before == {kind: self.allocator.free_pages(kind) for kind in self.held}

    @rule(data=st.data(), n=st.integers(1, 12), go=st.booleans())
    def compact(self, data: st.DataObject, n: int, go: bool) -> None:
        kind = data.draw(st.sampled_from(sorted(self.held)))
        before = {k: self.allocator.free_pages(k) for k in self.held}
        plan = plan_compaction(self.allocator, kind, n)  # type: ignore[arg-type]
        if plan is None or not go:
            if plan is not None:
                self.allocator.audit()
                plan.cancel()
            assert before == {k: self.allocator.free_pages(k) for k in self.held}
            return
        self._move(plan)
        plan.finish()
        assert self.allocator.can_allocate(kind, n)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.audit()
        for kind, ids in self.held.items():
            assert self.allocator.pages_in_use(kind) == len(ids)
        check_disjoint(self.allocator, self.held)
        used_bytes = sum(self.allocator.bytes_in_use(kind) for kind in self.held)
        assert self.allocator.live_bytes_by_huge().sum() == used_bytes

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for kind, ids in self.held.items():
                self.allocator.free(kind, sorted(ids))
            levels = self.allocator.levels()
            assert levels["l1"] == {"total": self.allocator.n_huge, "free": self.allocator.n_huge}
            assert levels["l2"]["total"] == levels["l3"]["total"] == 0, "all freed, but not all merged"
            self.allocator.audit()


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
TestAllocatorAgainstModel = AllocatorMachine.TestCase


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_each_kind_fills_the_pool(name: str) -> None:
    allocator = PageAllocator(LAYOUTS[name], 5)
    for kind in KINDS:
        if allocator.has(kind):
            n = allocator.free_pages(kind)
            assert n == 5 * allocator.per_huge(kind) > 0
            ids = allocator.allocate(kind, n)
            assert ids is not None and allocator.allocate(kind, 1) is None
            check_disjoint(allocator, {kind: set(ids.tolist())})
            allocator.audit()
            allocator.free(kind, np.random.default_rng(1).permutation(ids))
            assert allocator.levels()["l1"]["free"] == 5


def test_levels_count_pages_that_exist() -> None:
    allocator = PageAllocator(pools.hybrid(), 4)
    assert allocator.levels() == {
        "l1": {"total": 4, "free": 4},
        "l2": {"total": 0, "free": 0},
        "l3": {"total": 0, "free": 0},
    }
    allocator.allocate("kv", 1)  # one huge page -> 8 expert pages -> one of them 6 KV pages
    assert allocator.levels() == {
        "l1": {"total": 4, "free": 3},
        "l2": {"total": 8, "free": 7},
        "l3": {"total": 6, "free": 5},
    }
    assert allocator.free_pages("kv") == 5 + 7 * 6 + 3 * 48
    assert allocator.free_pages("ssm") == 3 * 3


def test_failed_allocation_changes_nothing() -> None:
    allocator = PageAllocator(pools.hybrid(), 3)
    allocator.allocate("kv", 7)
    allocator.allocate("ssm", 2)
    before = [array.copy() for array in allocator._state]
    for kind in KINDS:
        assert allocator.allocate(kind, allocator.free_pages(kind) + 1) is None
    with pytest.raises(AuditError, match="not allocated"):
        allocator.free("kv", [*allocator.live_pages([0, 1, 2])["kv"].tolist(), 40])
    for old, new in zip(before, allocator._state, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("bad", [[-1], [10**6], [3, 3], [0, 9]])
def test_wrong_ids_are_refused(bad: list[int]) -> None:
    allocator = PageAllocator(pools.moe(), 8)
    ids = allocator.allocate("expert", 4)
    assert ids is not None
    with pytest.raises(AuditError):
        allocator.free("expert", [*ids[:1].tolist(), *bad] if bad != [3, 3] else [int(ids[0])] * 2)
    assert allocator.pages_in_use("expert") == 4
    allocator.audit()


def test_new_pages_come_from_the_fullest_parent() -> None:
    allocator = PageAllocator(pools.hybrid(), 4)
    ids = allocator.allocate("kv", 18)  # three expert pages of six
    assert ids is not None
    a, b, c = ids[:6], ids[6:12], ids[12:]
    allocator.free("kv", np.concatenate([a[:4], b[:1], c[:3]]))  # left: a 2, b 5, c 3
    assert int(allocator.allocate("kv", 1)[0]) // 6 == int(b[0]) // 6  # type: ignore[index]
    assert int(allocator.allocate("kv", 1)[0]) // 6 == int(c[0]) // 6  # type: ignore[index]
    taken = allocator.allocate("kv", 3)
    assert taken is not None and sorted(set((taken // 6).tolist())) == sorted({int(c[0]) // 6, int(a[0]) // 6})


def test_level_two_pages_come_from_the_fullest_huge_page() -> None:
    allocator = PageAllocator(pools.hybrid(), 4)
    ids = allocator.allocate("expert", 16)
    assert ids is not None
    first, second = ids[:8], ids[8:]
    allocator.free("expert", np.concatenate([first[:5], second[:2]]))
    taken = allocator.allocate("expert", 2)
    assert taken is not None and set((taken // 8).tolist()) == {int(second[0]) // 8}
    kv = allocator.allocate("kv", 1)  # its parent is a fresh expert page of the fullest huge page left
    assert kv is not None and int(kv[0]) // 48 == int(first[0]) // 8


def test_conv_runs_stay_inside_one_page() -> None:
    allocator = PageAllocator(pools.hybrid(n_rows=5), 2)  # 24 rows to an SSM page: four runs of five, four rows over
    firsts = allocator.allocate_runs("conv", allocator.free_pages("conv"), 5)
    assert firsts is not None and firsts.size == 2 * 3 * 4
    assert ((firsts % 24) + 5 <= 24).all()
    rows = (firsts[:, None] + np.arange(5)).ravel()
    assert np.unique(rows).size == rows.size
    with pytest.raises(AuditError):
        allocator.free("conv", [int(firsts[0]) + 1])
    with pytest.raises(AuditError, match="runs have 5 pages"):
        allocator.allocate_runs("conv", 1, 3)
    allocator.free_runs("conv", firsts, 5)
    assert allocator.levels()["l1"]["free"] == 2


@pytest.mark.parametrize("layout", [pools.moe(), pools.hybrid()], ids=["one page per huge", "eight per huge"])
def test_experts_lie_side_by_side_where_possible(layout: pools.PoolLayout) -> None:
    allocator = PageAllocator(layout, 30)
    n = 240 if allocator.per_huge("expert") == 8 else 30
    placed = [allocator.allocate_expert(3, owner) for owner in range(n // 3)]
    contiguous = [ids is not None and (np.diff(ids) == 1).all() for ids in placed]
    assert sum(contiguous) >= n // 4  # eight pages hold two experts side by side and two thirds of a third one
    victims = [ids for ids, good in zip(placed, contiguous, strict=True) if good and ids is not None][::2]
    for ids in victims:
        allocator.free("expert", ids)
        again = allocator.allocate_expert(3)
        assert again is not None and (np.diff(again) == 1).all()
        allocator.audit()


def test_scattered_experts_where_no_neighbours_are_free() -> None:
    allocator = PageAllocator(pools.moe(), 9)
    ids = allocator.allocate("expert", 9)
    assert ids is not None
    allocator.free("expert", ids[::2])
    scattered = allocator.allocate_expert(3, 7)
    assert scattered is not None and (np.diff(np.sort(scattered)) > 1).all()
    assert allocator.owner_of("expert", int(scattered[0])) == 7
    assert allocator.allocate_expert(3) is None
    allocator.audit()


def test_kv_and_experts_start_at_opposite_ends() -> None:
    allocator = PageAllocator(pools.moe(), 20)
    expert, kv = allocator.allocate_expert(4), allocator.allocate("kv", 3)
    assert expert is not None and kv is not None
    assert expert.tolist() == [0, 1, 2, 3] and (kv // 8).tolist() == [19, 19, 19]
    allocator = PageAllocator(pools.hybrid(), 20, 200)
    expert, ssm = allocator.allocate_expert(4), allocator.allocate("ssm", 4)
    assert expert is not None and ssm is not None
    assert expert.tolist() == [0, 1, 2, 3] and (ssm // 3).tolist() == [19, 19, 19, 18]


def test_layouts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        PageAllocator(pools.moe(kv_bytes=48), 4)
    with pytest.raises(AuditError, match="no ssm pages"):
        PageAllocator(pools.moe(), 4).allocate("ssm", 1)


def test_huge_needed_counts_whole_pages() -> None:
    allocator = PageAllocator(pools.hybrid(), 4)
    assert allocator.huge_needed({"ssm": 4, "kv": 7}) == 2 + 1
    assert allocator.huge_needed({"expert": 8, "kv": 1}) == 2
    assert allocator.huge_needed({}) == 0


def test_owners() -> None:
    allocator = PageAllocator(pools.hybrid(), 4)
    ids = allocator.allocate("ssm", 3, owner=9)
    assert ids is not None
    allocator.set_owners("ssm", ids[:1], 4)
    assert allocator.owners("ssm", ids).tolist() == [4, 9, 9]
    with pytest.raises(AuditError, match="not allocated"):
        allocator.owner_of("ssm", int(ids.max()) + 1)


def damaged() -> PageAllocator:
    allocator = PageAllocator(pools.hybrid(), 6)
    for kind, n in (("kv", 9), ("expert", 5), ("ssm", 4), ("conv", 3)):
        allocator.allocate(kind, n)
    kv = allocator.live_pages(range(6))["kv"]
    allocator.free("kv", kv[1:3])
    allocator.audit()
    return allocator


def row(allocator: PageAllocator, kind: str, column: int, i: int) -> int:
    return int(allocator._meta[KIND_NUMBER[kind], column]) + i


@pytest.mark.parametrize("column", [jit.FREE, jit.USED, jit.OPEN])
@pytest.mark.parametrize("kind", ["expert", "ssm", "kv", "conv"])
def test_audit_notices_wrong_counters(kind: str, column: int) -> None:
    allocator = damaged()
    allocator._meta[KIND_NUMBER[kind], column] += 1
    with pytest.raises(AuditError, match=kind):
        allocator.audit()


def test_audit_notices_damage_in_every_structure() -> None:
    kv = damaged().live_pages(range(6))["kv"]
    used, parent = int(kv[0]), int(kv[0]) // 6

    def break_state(a: PageAllocator) -> None:
        a._state.child[row(a, "kv", jit.CHILD_AT, used), jit.STATE] = jit.S_FREE

    def break_unknown_state(a: PageAllocator) -> None:
        a._state.child[row(a, "kv", jit.CHILD_AT, used), jit.STATE] = jit.S_MARK

    def break_fill(a: PageAllocator) -> None:
        a._state.parent[row(a, "kv", jit.PARENT_AT, parent), jit.P_USED] += 1

    def break_free_list(a: PageAllocator) -> None:
        a._state.parent[row(a, "kv", jit.PARENT_AT, parent), jit.P_FIRST] = used

    def break_free_list_end(a: PageAllocator) -> None:
        a._state.parent[row(a, "kv", jit.PARENT_AT, parent), jit.P_FIRST] = -1

    def break_bucket(a: PageAllocator) -> None:
        fill = int(a._state.parent[row(a, "kv", jit.PARENT_AT, parent), jit.P_USED])
        a._state.heads[row(a, "kv", jit.BUCKET_AT, fill)] = -1

    def break_bucket_member(a: PageAllocator) -> None:
        a._state.parent[row(a, "kv", jit.PARENT_AT, parent), jit.P_PREV] = 0

    def break_bits(a: PageAllocator) -> None:
        a._state.bits[row(a, "ssm", jit.BITS_AT, 0)] ^= 2

    def break_split(a: PageAllocator) -> None:
        a._state.child[row(a, "expert", jit.CHILD_AT, parent), jit.STATE] = jit.S_FREE

    def break_huge_state(a: PageAllocator) -> None:
        a._state.child[int(np.flatnonzero(a.split_kind() == 0)[0]), jit.STATE] = jit.S_SPLIT

    def break_ring(a: PageAllocator) -> None:
        a._state.child[6, jit.NEXT] = 6

    def break_ring_count(a: PageAllocator) -> None:
        a._meta[jit.HUGE, jit.FREE] -= 1

    breakers = [value for name, value in list(locals().items()) if name.startswith("break_")]
    assert len(breakers) == 12
    for breaker in breakers:
        allocator = damaged()
        breaker(allocator)
        with pytest.raises(AuditError):
            allocator.audit()
            pytest.fail(f"{breaker.__name__} went unnoticed")
