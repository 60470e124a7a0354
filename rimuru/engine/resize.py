"""Growing and shrinking the pool while requests run (between two steps), as a transaction."""

from __future__ import annotations

import numpy as np

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import human_bytes
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.engine.resolve import longest_request
from rimuru.engine.room import ExpertRoom
from rimuru.engine.scheduler import Scheduler
from rimuru.memory.compaction import execute, plan_shrink
from rimuru.memory.page_pool import PagePool


def resize_pool(
    pool: PagePool,
    room: CompactingRoom,
    scheduler: Scheduler,
    pool_bytes: int,
    least_bytes: int,
    beside_bytes: int = 0,
) -> None:
    """Give the pool pool_bytes. Whoever has to leave a shrinking pool goes in this order: prefixes that nobody uses,
    the coldest experts, the youngest requests (which are run again later and answer the same).

    Raises NotEnoughMemoryError where the pool would be smaller than least_bytes, or what may not leave does not fit;
    the pool then works on as it was. Its line names whole budgets: the pool and beside_bytes (weights, scratch).
    """
    layout = pool.layout
    if pool_bytes < least_bytes:
        raise NotEnoughMemoryError(
            f"{human_bytes(max(pool_bytes + beside_bytes, 0))} is too little: weights and scratch take "
            f"{human_bytes(beside_bytes)}, the pool at least {human_bytes(least_bytes)}; resize to "
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
    room.before_moves()
    plan = plan_shrink(pool.allocator, n_huge)
    while plan is None:
        if not _give_up_something(pool, room, scheduler, n_huge):
            raise NotEnoughMemoryError(
                f"the pool cannot shrink to {human_bytes(pool_bytes)}: loading buffers, or experts whose number is "
                "fixed, lie in what would go; resize to more, or start again with fewer --resident-experts"
            )
        plan = plan_shrink(pool.allocator, n_huge)
    assert pool.copier is not None
    moved = plan.n_moved()
    execute(plan, pool, pool.copier, room.flips())
    pool.finish_shrink(plan, n_huge * layout.huge_bytes)
    room.note_moves(moved, f"the pool shrinks to {human_bytes(pool_bytes)}")


def longest_in(pool: PagePool, room: CompactingRoom, limit_tokens: int, n_step_tokens: int) -> int:
    """Most tokens of one request in the pool as it is now, up to limit_tokens. Experts leave for it, unless their
    number is fixed."""
    n_reserved = pool.n_buffer_pages
    if not isinstance(room, ExpertRoom):
        n_reserved = pool.allocator.pages_in_use("expert")
    pool_bytes = pool.allocator.n_huge * pool.layout.huge_bytes
    return longest_request(pool.layout, pool_bytes, n_reserved, limit_tokens, n_step_tokens)


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
