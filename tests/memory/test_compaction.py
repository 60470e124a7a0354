"""Moves: what a plan reserves, what survives it, and that a failing copy leaves everything as it was."""

from __future__ import annotations

import memory_pools as pools
import numpy as np
import pytest

from rimuru.base.errors import AuditError
from rimuru.memory.compaction import execute, expert_cost_by_huge, make_room, plan_compaction, plan_shrink
from rimuru.memory.page_pool import PagePool
from rimuru.memory.views import ExpertView


def fill_with_experts(pool: PagePool) -> ExpertView:
    """All experts of the layout in the pool, each page full of its own number."""
    view = ExpertView(pool)
    for slot, layer in enumerate(view.layers):
        for expert in range(layer.n_experts):
            row = view.row(slot, expert)
            ids = pool.allocate_expert(layer.n_pages, row)
            if ids is None:
                continue
            view.place(slot, expert, ids)
            for i, page in enumerate(ids):
                pools.page_bytes_of(pool, "expert", int(page))[:] = row * 8 + i
    return view


def check_content(pool: PagePool, view: ExpertView) -> None:
    for slot, layer in enumerate(view.layers):
        for expert in range(layer.n_experts):
            ids = view.pages(slot, expert)
            for i, page in enumerate(ids if ids is not None else ()):
                assert (pools.page_bytes_of(pool, "expert", int(page)) == view.row(slot, expert) * 8 + i).all()
    view.audit()


def test_a_request_costs_no_more_evictions_than_its_pages_need() -> None:
    """Pool full of experts; two SSM pages need one huge page = 8 expert pages, wherever the coldest experts lie."""
    pool = pools.make_pool(pools.hybrid(), 3)  # 24 expert pages; 6 x 3 + 4 x 2 = 26 wanted
    view = fill_with_experts(pool)
    assert pool.allocator.free_pages("expert") < 3 and pool.allocator.free_pages("ssm") == 0
    freed = pool.allocator.free_pages("expert")
    n_evicted = 0
    for slot, expert in ((0, 0), (0, 3), (0, 5), (1, 0)):  # scattered over all huge pages
        if freed >= 8:
            break
        ids = view.place_elsewhere(slot, expert, 0)
        assert ids is not None
        pool.free("expert", ids)
        freed += ids.size
        n_evicted += 1
    assert freed - 3 < 8 <= freed and n_evicted == 3
    assert pool.allocate("ssm", 2) is None, "free pages are scattered"
    is_made, moved = make_room(pool, "ssm", 2, {"expert": view.flip})
    assert is_made and moved.keys() <= {"expert"} and all(n > 0 for n in moved.values())
    assert pool.allocate("ssm", 2) is not None
    check_content(pool, view)
    pool.audit()


def test_cheapest_huge_page_is_emptied() -> None:
    pool = pools.make_pool(pools.hybrid(), 4)
    ids = pool.allocate("expert", 32)
    assert ids is not None
    pool.allocator.set_owners("expert", ids, ids // 8)
    pool.free("expert", [0, 1, 2, 8, 9, 10, 16, 17, 24, 25])
    cost = expert_cost_by_huge(pool.allocator, np.array([5.0, 1.0, 9.0, 2.0]))
    assert cost.tolist() == [25.0, 5.0, 54.0, 12.0]
    plan = plan_compaction(pool.allocator, "ssm", 3, cost)
    assert plan is not None and plan.huge.tolist() == [1]
    assert plan.n_bytes == 5 * 288
    plan.cancel()
    cost[1] = np.inf
    plan = plan_compaction(pool.allocator, "ssm", 3, cost)
    assert plan is not None and plan.huge.tolist() == [3]
    plan.cancel()
    pool.audit()
    assert plan_compaction(pool.allocator, "ssm", 6) is None
    pool.audit()


def test_buffers_never_move() -> None:
    pool = pools.make_pool(pools.hybrid(), 3)
    buffer = pool.reserve_buffer(3)
    assert buffer is not None and buffer.max() < 8
    others = pool.allocate("expert", 17)
    assert others is not None
    pool.free("expert", others[others % 8 > 1])
    assert np.isinf(expert_cost_by_huge(pool.allocator, np.ones(1)))[0]
    before = pool.stats()
    assert plan_compaction(pool.allocator, "ssm", 9) is None and plan_shrink(pool.allocator, 0) is None
    assert pool.stats() == before
    assert make_room(pool, "ssm", 6, {"expert": lambda sources, targets: None})[0]
    assert (pool.allocator.owners("expert", buffer) == -2).all()
    pool.audit()


def test_sparse_kv_parents_give_expert_pages_back() -> None:
    """Four expert pages with one KV page each: three of them can be emptied into the fourth."""
    pool = pools.make_pool(pools.hybrid(), 1)
    kv = pool.allocate("kv", 24)
    assert kv is not None
    pool.free("kv", [page for page in kv.tolist() if page % 6])
    assert pool.allocate("expert", 4) is not None and pool.allocate("expert", 1) is None
    table = np.array(sorted(page for page in kv.tolist() if page % 6 == 0))

    def flip(sources: np.ndarray, targets: np.ndarray) -> None:
        for source, target in zip(sources, targets, strict=True):
            table[table == source] = target

    assert make_room(pool, "expert", 3, {"kv": flip})[0]
    assert len(set((table // 6).tolist())) == 1
    assert pool.allocate("expert", 3) is not None
    assert make_room(pool, "expert", 1, {"kv": flip}) == (False, {})
    pool.audit()


def test_failed_copy_changes_nothing() -> None:
    for fail_after in range(5):
        pool = pools.make_pool(pools.hybrid(), 3, copier=pools.RamCopier(fail_after))
        view = fill_with_experts(pool)
        for slot, expert in ((0, 0), (0, 3), (0, 5)):
            ids = view.place_elsewhere(slot, expert, 0)
            assert ids is not None
            pool.free("expert", ids)
        before = pool.stats()
        plan = plan_compaction(pool.allocator, "ssm", 2)
        assert plan is not None and pool.copier is not None
        if sum(m.sources.size for m in plan.moves) <= fail_after:
            plan.cancel()
            continue
        with pytest.raises(OSError, match="copy failed"):
            execute(plan, pool, pool.copier, {"expert": view.flip})
        pool.audit()
        check_content(pool, view)
        assert pool.stats() == before


def test_moves_without_a_flip_are_refused() -> None:
    pool = pools.make_pool(pools.hybrid(), 3)
    view = fill_with_experts(pool)
    for slot, expert in ((0, 0), (0, 3), (0, 5)):
        ids = view.place_elsewhere(slot, expert, 0)
        assert ids is not None
        pool.free("expert", ids)
    before = pool.stats()
    with pytest.raises(AuditError, match="nobody flips"):
        make_room(pool, "ssm", 2, {})
    assert pool.stats() == before
    pool.audit()


def test_shrink_moves_the_tail_then_unmaps() -> None:
    pool = pools.make_pool(pools.hybrid(), 6)
    view = fill_with_experts(pool)
    conv = pool.allocate("conv", 5)
    assert conv is not None and pool.copier is not None
    assert plan_shrink(pool.allocator, 2) is None, "26 expert pages do not fit in two huge pages"
    assert plan_shrink(pool.allocator, 4) is None, "experts touch four, the conv rows need a fifth"
    tail = pool.allocator.live_pages(range(5, 6))
    assert tail["conv"].tolist() == conv.tolist()
    plan = plan_shrink(pool.allocator, 5)
    assert plan is not None
    moved = {}
    execute(
        plan, pool, pool.copier,
        {"expert": view.flip, "conv": lambda s, t: moved.update(zip(s.tolist(), t.tolist(), strict=True))},
    )  # fmt: skip
    pool.finish_shrink(plan, 5 * 2304 + 100)
    assert sorted(moved) == sorted(conv.tolist()) and max(moved.values()) < 5 * 72
    assert pool.total_bytes == 5 * 2304 and pool.allocator.n_huge == 5
    check_content(pool, view)
    pool.audit()
    pool.grow(6 * 2304)
    assert pool.allocator.n_huge == 6 and pool.allocator.can_allocate("ssm", 3)
    pool.audit()


def test_tail_in_use_cannot_be_cut_off() -> None:
    pool = pools.make_pool(pools.moe(), 8)
    pool.allocate("kv", 1)
    with pytest.raises(Exception, match="still in use"):
        pool.allocator.shrink(4)
    pool.audit()
