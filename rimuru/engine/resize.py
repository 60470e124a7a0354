"""Growing and shrinking the pool while requests run, as a transaction.

A shrinking pool's end is isolated first: it offers no page any more. Then its content moves forward, between two steps
as much as a step may move (memory/move_budget.py), until nothing is left there and the memory goes. Whoever ends this
early has the pool as large as it was, with some content elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import human_bytes
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.engine.resolve import longest_request, staying_experts, whole_granules
from rimuru.engine.room import ExpertRoom
from rimuru.engine.scheduler import Scheduler
from rimuru.experts.store import pages_of
from rimuru.memory.compaction import MovePlan, execute, plan_shrink
from rimuru.memory.page_pool import PagePool

if TYPE_CHECKING:
    from rimuru.engine.build import LoadedModel


def resize_model(loaded: LoadedModel, memory_bytes: int) -> Iterator[None]:
    """Change the memory budget, with a pause between two pieces in which steps may run; the pool takes what dense
    weights and scratch leave."""
    beside_bytes = loaded.dense_bytes + loaded.scratch_bytes
    pool_bytes = whole_granules(memory_bytes - beside_bytes, loaded.resolved.device)
    engine = loaded.engine
    yield from resize_pool(
        loaded.pool, loaded.room, engine.scheduler, pool_bytes, loaded.least_pool_bytes, beside_bytes
    )
    engine.limit_context(longest_in(loaded.pool, loaded.room, *engine.most_tokens))


def resize_pool(
    pool: PagePool,
    room: CompactingRoom,
    scheduler: Scheduler,
    pool_bytes: int,
    least_bytes: int,
    beside_bytes: int = 0,
) -> Iterator[None]:
    """Give the pool pool_bytes, in pieces. Whoever has to leave a shrinking pool goes in this order: prefixes that
    nobody uses, the coldest experts, the youngest requests (which are run again later and answer the same).

    Raises NotEnoughMemoryError where the pool would be smaller than least_bytes, or what may not leave does not fit;
    the pool then works on as it was. Its line names whole budgets: the pool and beside_bytes (weights, scratch).
    """
    layout = pool.layout
    if pool_bytes < least_bytes:
        staying_bytes = _staying_pages(pool, room) * (0 if layout.expert is None else layout.expert.page_bytes)
        of_which = (
            f" ({human_bytes(staying_bytes)} of it for experts that may not leave: --resident-experts, "
            "--expert-offload-limit)"
            if staying_bytes
            else ""
        )
        raise NotEnoughMemoryError(
            f"{human_bytes(max(pool_bytes + beside_bytes, 0))} is too little: weights and scratch take "
            f"{human_bytes(beside_bytes)}, the pool at least {human_bytes(least_bytes)}{of_which}; resize to "
            f"{human_bytes(beside_bytes + least_bytes)} or more"
        )
    n_huge = pool_bytes // layout.huge_bytes
    if n_huge > pool.allocator.max_huge:
        most_bytes = beside_bytes + pool.allocator.max_huge * layout.huge_bytes
        raise NotEnoughMemoryError(
            f"while it runs the memory can be resized up to {human_bytes(most_bytes)}; for more, start again with "
            "more --memory"
        )
    if n_huge >= pool.allocator.n_huge:
        pool.grow(n_huge * layout.huge_bytes)
        return
    yield from _shrink(pool, room, scheduler, pool_bytes)


def _shrink(pool: PagePool, room: CompactingRoom, scheduler: Scheduler, pool_bytes: int) -> Iterator[None]:
    n_huge, moves = pool_bytes // pool.layout.huge_bytes, pool.moves
    tail = np.arange(n_huge, pool.allocator.n_huge, dtype=np.int32)
    n_steps, is_done = -1, False
    assert pool.copier is not None
    try:
        while not is_done:
            if moves.n_steps == n_steps:  # no step has come meanwhile: this piece is one of its own
                moves.next_step()
            n_steps = moves.n_steps
            room.before_moves()
            plan = _plan(pool, room, scheduler, n_huge)
            is_last = plan.keep_within(moves)
            moved, cost_bytes = plan.n_moved(), plan.cost_bytes
            execute(plan, pool, pool.copier, room.flips())
            moves.spend(cost_bytes)
            room.note_moves(moved, f"the pool shrinks to {human_bytes(pool_bytes)}")
            if is_last:
                is_done = True  # the end is empty and leaves, even if its memory cannot be given back
                pool.finish_shrink(plan, n_huge * pool.layout.huge_bytes)
            else:
                yield
    finally:
        if not is_done:
            pool.allocator.rejoin("huge", tail)


def _plan(pool: PagePool, room: CompactingRoom, scheduler: Scheduler, n_huge: int) -> MovePlan:
    """Places in front for all that is left in the pool's end; what does not fit there is given up."""
    plan = plan_shrink(pool.allocator, n_huge)
    while plan is None:
        if not _give_up_something(pool, room, scheduler, n_huge):
            raise NotEnoughMemoryError(
                f"the pool cannot shrink to {human_bytes(n_huge * pool.layout.huge_bytes)}: loading buffers, or "
                "experts whose number is fixed, lie in what would go; resize to more, or start again with fewer "
                "--resident-experts"
            )
        plan = plan_shrink(pool.allocator, n_huge)
    return plan


def longest_in(pool: PagePool, room: CompactingRoom, limit_tokens: int, n_step_tokens: int) -> int:
    """Most tokens of one request in the pool as it is now, up to limit_tokens. Experts leave for it, unless their
    number is fixed, as far as they may."""
    n_reserved = pool.allocator.pages_in_use("expert")
    if isinstance(room, ExpertRoom):
        n_reserved = min(n_reserved, pool.n_buffer_pages + _staying_pages(pool, room))
    pool_bytes = pool.allocator.n_huge * pool.layout.huge_bytes
    return longest_request(pool.layout, pool_bytes, n_reserved, limit_tokens, n_step_tokens)


def _staying_pages(pool: PagePool, room: CompactingRoom) -> int:
    """Pages of experts that never leave for a request."""
    layout, store = pool.layout.expert, room.store
    if layout is None or store is None:
        return 0
    limit = room.offload_limit if isinstance(room, ExpertRoom) else None
    return pages_of(layout, staying_experts(layout, store.quotas, limit))


def _give_up_something(pool: PagePool, room: CompactingRoom, scheduler: Scheduler, n_huge: int) -> bool:
    """Free pages so that the tail's content fits in front; False where nothing may be given up any more."""
    live_bytes = pool.allocator.live_bytes_by_huge()
    short_bytes = max(int(live_bytes.sum()) - n_huge * pool.layout.huge_bytes, 1)
    if room.cache.evict_prefix(1 << 30):
        return True
    if isinstance(room, ExpertRoom) and pool.layout.expert is not None:
        expert_bytes = room.pages_per_expert * pool.layout.expert.page_bytes
        if room.shrink(int(np.ceil(short_bytes / expert_bytes))):
            return True
    return scheduler.preempt_youngest()
