"""Moving pages so that larger ones become free, or so that the pool's end becomes empty.

A plan is a transaction over the allocator's real state. Making it isolates the places to empty (they offer no page any
more) and reserves a target for every page that must survive. Then, for each move: copy the bytes, flip the table
entry, `commit`. `finish` returns the emptied places to the pool; `cancel` undoes what has not been committed. Whoever
gives content up (a cold expert) frees it before asking for a plan: what is still allocated survives.

    isolate + reserve -> copy -> flip -> commit (frees the sources) -> finish
                    \\-> cancel (frees the targets)

Steps of requests wait for moves, so a step makes only as many as its MoveBudget has (`keep_within`): a larger plan is
made again in the next step, when the places that were emptied first are free, or still isolated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.allocator import KIND_NUMBER, PINNED_OWNER, PageAllocator, parent_kind
from rimuru.memory.move_budget import MoveBudget, copy_cost
from rimuru.memory.specs import PageKind

if TYPE_CHECKING:
    from rimuru.memory.page_pool import PagePool
    from rimuru.ops.base import Copier

log = logging.getLogger(__name__)

ATTEMPTS = 4


class Move(NamedTuple):
    """Pages of one kind: the content of sources[i] goes to targets[i], which is reserved. int32 [n] each."""

    kind: PageKind
    sources: np.ndarray
    targets: np.ndarray


@dataclass(slots=True)
class MovePlan:
    """Moves that are reserved, and what becomes free by them."""

    allocator: PageAllocator
    moves: list[Move] = field(default_factory=list)
    huge: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Huge pages that become free."""
    l2_kind: str = ""
    l2_pages: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Pages of l2_kind, now split, that become free besides."""
    hold: bool = False
    """Emptied huge pages leave the pool (shrinking) instead of returning to it."""

    @property
    def n_bytes(self) -> int:
        """Bytes to copy."""
        return sum(len(m.sources) * self.allocator.unit_bytes(m.kind) for m in self.moves)

    @property
    def cost_bytes(self) -> int:
        """What the copies count as in a step's budget."""
        return sum(len(m.sources) * copy_cost(self.allocator.unit_bytes(m.kind)) for m in self.moves)

    def keep_within(self, budget: MoveBudget) -> bool:
        """Drop the moves that this step has no budget for, and give their targets back: what stays empties the first
        places, whole. False where some were dropped, maybe all."""
        if self.cost_bytes <= budget.left_bytes:
            return True
        places = [self._places(move) for move in self.moves]
        costs = np.zeros(self.l2_pages.size + self.huge.size, np.int64)
        for move, place in zip(self.moves, places, strict=True):
            costs += np.bincount(place, minlength=costs.size) * copy_cost(self.allocator.unit_bytes(move.kind))
        n_kept = int((np.cumsum(costs) <= budget.left_bytes).sum())
        if not budget.spent_bytes:  # one place is the least that helps: waiting for more budget would be in vain
            n_kept = max(n_kept, int(np.argmax(costs > 0)) + 1)
        kept = []
        for move, place in zip(self.moves, places, strict=True):
            self.allocator.free(move.kind, move.targets[place >= n_kept])
            stays = place < n_kept
            if stays.any():
                kept.append(Move(move.kind, move.sources[stays], move.targets[stays]))
        self.moves = kept
        return False

    def _places(self, move: Move) -> np.ndarray:
        """int64 [n]: which of the places to empty, the L2 pages first, then the huge ones, each source lies in."""
        allocator = self.allocator
        offsets = move.sources.astype(np.int64) * allocator.layout.page_bytes(move.kind)
        of_huge = np.full(allocator.n_huge, -1, np.int64)
        of_huge[self.huge] = self.l2_pages.size + np.arange(self.huge.size)
        places = of_huge[offsets // allocator.unit_bytes("huge")]
        if self.l2_pages.size:
            of_l2 = np.full(allocator.n_huge * allocator.per_huge(self.l2_kind), -1, np.int64)
            of_l2[self.l2_pages] = np.arange(self.l2_pages.size)
            within = of_l2[offsets // allocator.unit_bytes(self.l2_kind)]
            places = np.where(within >= 0, within, places)
        return places

    def n_moved(self) -> dict[PageKind, int]:
        """Pages to move, by kind."""
        moved: dict[PageKind, int] = {}
        for kind, sources, _ in self.moves:
            moved[kind] = moved.get(kind, 0) + len(sources)
        return {kind: n for kind, n in moved.items() if n}

    def commit(self, move: Move) -> None:
        """The bytes are copied and the tables flipped: give the sources back."""
        self.allocator.commit_move(move.kind, move.sources)
        self.moves.remove(move)

    def cancel(self) -> None:
        """Give back the targets of the moves that were not committed, and end the isolation."""
        for move in self.moves:
            self.allocator.free(move.kind, move.targets)
        self.moves.clear()
        self.hold = False
        self.finish()

    def finish(self) -> None:
        """End the isolation; emptied places are free now (unless they leave the pool)."""
        if self.l2_pages.size:
            self.allocator.rejoin(self.l2_kind, self.l2_pages)
        if self.huge.size and not self.hold:
            self.allocator.rejoin("huge", self.huge)

    def _reserve(self) -> bool:
        """Isolate the places and reserve targets for everything alive in them; False, undone, where room lacks."""
        allocator = self.allocator
        live = allocator.live_pages(self.huge)
        for leaf in _leaves(allocator, self.l2_kind) if self.l2_pages.size else ():
            live[leaf] = np.concatenate([live[leaf], allocator.live_children(leaf, self.l2_pages)])
        owners = {kind: allocator.owners(kind, sources) for kind, sources in live.items()}
        if any((tags == PINNED_OWNER).any() for tags in owners.values()):
            return False
        if self.l2_pages.size:
            allocator.isolate(self.l2_kind, self.l2_pages)
        allocator.isolate("huge", self.huge)
        for kind, sources in live.items():
            if not sources.size:
                continue
            targets = allocator.allocate(kind, sources.size)
            if targets is None:
                self.cancel()
                return False
            allocator.set_owners(kind, targets, owners[kind])
            self.moves.append(Move(kind, sources, targets))
        return True


def _leaves(allocator: PageAllocator, l2_kind: str) -> list[PageKind]:
    leaves: tuple[PageKind, ...] = ("kv", "conv")
    return [leaf for leaf in leaves if allocator.has(leaf) and parent_kind(allocator.layout, leaf) == l2_kind]  # type: ignore[arg-type]


def plan_shrink(allocator: PageAllocator, n_huge: int) -> MovePlan | None:
    """Empty the huge pages from n_huge on. None where what lives there does not fit elsewhere, or is a loading buffer.

    `allocator.live_pages(range(n_huge, allocator.n_huge))` names what would have to be given up then. After the last
    commit `allocator.shrink(n_huge)` ends it.
    """
    plan = MovePlan(allocator, huge=np.arange(n_huge, allocator.n_huge, dtype=np.int32), hold=True)
    return plan if plan._reserve() else None


def plan_compaction(
    allocator: PageAllocator, kind: PageKind, n_wanted: int, cost: np.ndarray | None = None
) -> MovePlan | None:
    """Moves after which n_wanted pages of a kind can be allocated; None where no moves lead there.

    cost: float [n_huge], what it costs to empty each huge page (default: the bytes that must move); infinite = never.
    First, pages of the L2 kind concerned that hold few L3 pages are emptied into others of their kind; then the
    cheapest huge pages that are split into something else. A plan without moves means that there is room already.
    """
    l2_kind = kind if kind in ("expert", "ssm") else parent_kind(allocator.layout, kind)  # type: ignore[arg-type]
    per_l2 = 1 if kind == l2_kind else allocator.per_parent(kind)
    if cost is None:
        cost = allocator.live_bytes_by_huge()
    huge_order = _cheapest_huge(allocator, l2_kind, cost)
    n_huge = 0
    for _ in range(ATTEMPTS):
        n_lacking = n_wanted - allocator.free_pages(kind)
        plan = MovePlan(allocator, l2_kind=l2_kind)
        if n_lacking <= 0:
            return plan
        plan.l2_pages = _sparse_pages(allocator, kind, l2_kind, -(-n_lacking // per_l2))
        n_lacking -= plan.l2_pages.size * per_l2
        n_huge = max(n_huge, -(-n_lacking // (per_l2 * allocator.per_huge(l2_kind))))
        if n_huge > huge_order.size:
            return None
        plan.huge = huge_order[:n_huge]
        if not plan._reserve():
            return None
        gain = per_l2 * (plan.l2_pages.size + plan.huge.size * allocator.per_huge(l2_kind))
        n_short = n_wanted - allocator.free_pages(kind) - gain
        if n_short <= 0:
            return plan
        plan.cancel()  # reserving split further pages: empty more
        n_huge += -(-n_short // (per_l2 * allocator.per_huge(l2_kind)))
    return None


def _cheapest_huge(allocator: PageAllocator, l2_kind: str, cost: np.ndarray) -> np.ndarray:
    """Huge pages split into another kind than l2_kind, the cheapest to empty first."""
    split = allocator.split_kind()
    movable = np.isfinite(cost)
    if allocator.has("expert"):
        experts = allocator.live_pages(np.arange(allocator.n_huge))["expert"]
        pinned = experts[allocator.owners("expert", experts) == PINNED_OWNER]
        movable[pinned // allocator.per_huge("expert")] = False
    candidates = np.flatnonzero((split != 0) & (split != KIND_NUMBER[l2_kind]) & movable)
    return candidates[np.argsort(cost[candidates], kind="stable")].astype(np.int32)


def _sparse_pages(allocator: PageAllocator, kind: PageKind, l2_kind: str, n_wanted: int) -> np.ndarray:
    """Up to n_wanted split pages of l2_kind, the emptiest first, whose content fits in other pages split alike."""
    chosen: list[np.ndarray] = []
    for leaf in _leaves(allocator, l2_kind):
        if leaf == kind:
            continue
        used = allocator.fill_levels(leaf).astype(np.int64)
        partial = np.flatnonzero((used > 0) & (used < allocator.per_parent(leaf)))
        order = partial[np.argsort(used[partial], kind="stable")]
        room = (allocator.per_parent(leaf) - used[order]).sum() - np.cumsum(allocator.per_parent(leaf) - used[order])
        n_fitting = int((np.cumsum(used[order]) <= room).sum())
        take = order[: min(n_fitting, n_wanted)]
        n_wanted -= take.size
        chosen.append(take)
    return np.concatenate(chosen).astype(np.int32) if chosen else np.empty(0, np.int32)


def execute(
    plan: MovePlan, pool: PagePool, copier: Copier, flip: Mapping[str, Callable[[np.ndarray, np.ndarray], None]]
) -> None:
    """Carry a plan out between two steps: queue all copies, wait, flip(sources, targets) per kind, commit, finish.

    A failing copy cancels the plan: the tables still name the sources.
    """
    unknown = {move.kind for move in plan.moves} - set(flip)
    if unknown:
        plan.cancel()
        raise AuditError(f"pages of {', '.join(sorted(unknown))} would move, but nobody flips their tables")
    try:
        for move in plan.moves:
            n_bytes = plan.allocator.unit_bytes(move.kind)
            pairs = zip(pool.addresses(move.kind, move.targets), pool.addresses(move.kind, move.sources), strict=True)
            for target, source in pairs:
                copier.copy_within(int(target), int(source), n_bytes)
        copier.wait()
    except Exception:
        _wait_anyhow(copier)
        plan.cancel()
        raise
    for move in list(plan.moves):
        flip[move.kind](move.sources, move.targets)
        plan.commit(move)
    plan.finish()


def _wait_anyhow(copier: Copier) -> None:
    """Copies that were queued before one failed must not reach pages that others get."""
    try:
        copier.wait()
    except Exception as error:
        log.warning("copies within the pool failed: %s", error)


def expert_cost_by_huge(allocator: PageAllocator, cost_of_owner: np.ndarray) -> np.ndarray:
    """float64 [n_huge]: what giving up the expert pages in each huge page costs, from a cost per page by owner tag.

    Expert pages without an owner must stay: infinite.
    """
    pages = allocator.live_pages(np.arange(allocator.n_huge))["expert"]
    owners = allocator.owners("expert", pages)
    page_cost = np.where(owners >= 0, cost_of_owner[np.maximum(owners, 0)], np.inf)
    return np.bincount(pages // allocator.per_huge("expert"), weights=page_cost, minlength=allocator.n_huge)


def make_room(
    pool: PagePool,
    kind: PageKind,
    n_wanted: int,
    flip: Mapping[str, Callable[[np.ndarray, np.ndarray], None]],
    cost: np.ndarray | None = None,
) -> tuple[bool, dict[PageKind, int]]:
    """Plan and carry out: whether n_wanted pages of a kind can be allocated now, and how many pages of each kind were
    moved for it. Call between two steps. Where the step's budget ends before the plan, `pool.moves.is_waiting` is set:
    the next step's call goes on."""
    if pool.allocator.can_allocate(kind, n_wanted):
        return True, {}
    plan = plan_compaction(pool.allocator, kind, n_wanted, cost) if pool.copier is not None else None
    if plan is None or pool.copier is None:
        return False, {}
    is_whole = plan.keep_within(pool.moves)
    moved, cost_bytes = plan.n_moved(), plan.cost_bytes
    try:
        execute(plan, pool, pool.copier, flip)
    except AuditError:
        raise
    except Exception as error:  # everything is where it was
        log.warning("%d pages of kind %s were not made: %s", n_wanted, kind, error)
        return False, {}
    pool.moves.spend(cost_bytes)
    pool.moves.is_waiting = pool.moves.is_waiting or not is_whole
    return is_whole, moved
