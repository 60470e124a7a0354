"""Moves within the pool are bounded per step: whoever needs more waits some steps for them, and gets its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import memory_pools as pools
import numpy as np
import pytest
from hybrid_world import World, expected_answer, make_world, scatter, text

import rimuru.memory.compaction as compaction
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.memory.compaction import make_room
from rimuru.memory.move_budget import LEAST_COPY_BYTES, MoveBudget
from rimuru.memory.page_pool import PagePool
from rimuru.request import SamplingParams

GB = 10**9


@dataclass
class Moved:
    """Bytes that were moved within a pool, step by step."""

    by_step: list[int] = field(default_factory=lambda: [0])
    n_waits: int = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[PagePool, int], Moved]:
    """Give a pool another budget and watch what it is used for."""

    def start(pool: PagePool, most_bytes: int) -> Moved:
        moved, execute = Moved(), compaction.execute
        pool.moves = MoveBudget(most_bytes)
        next_step = pool.moves.next_step

        def count(plan: compaction.MovePlan, *rest: object) -> None:
            moved.by_step[-1] += plan.n_bytes
            execute(plan, *rest)  # type: ignore[arg-type]

        def step() -> None:
            moved.n_waits += pool.moves.is_waiting
            moved.by_step.append(0)
            next_step()

        monkeypatch.setattr(compaction, "execute", count)
        monkeypatch.setattr(pool.moves, "next_step", step)
        return moved

    return start


def scattered_pool(n_huge: int) -> tuple[PagePool, list[int], dict[int, int]]:
    """Every huge page holds two expert pages: the pool, their owners, and where each one's page is now."""
    pool = pools.make_pool(pools.hybrid(), n_huge)
    ids = pool.allocate("expert", 8 * n_huge)
    assert ids is not None
    kept = ids[ids % 8 < 2]
    pool.free("expert", ids[ids % 8 >= 2])
    pool.allocator.set_owners("expert", kept, kept)
    for page in kept.tolist():
        pools.page_bytes_of(pool, "expert", page)[:] = page % 251
    return pool, kept.tolist(), {page: page for page in kept.tolist()}


@pytest.mark.parametrize("most_bytes", [1, 2 * LEAST_COPY_BYTES, 5 * LEAST_COPY_BYTES, 1 << 40])
def test_a_plan_beyond_the_budget_is_carried_out_in_pieces(
    watch: Callable[[PagePool, int], Moved], most_bytes: int
) -> None:
    """Each piece empties whole places, at least one; nothing is moved twice, and no content is lost."""
    pool, kept, where = scattered_pool(12)
    moved = watch(pool, most_bytes)

    def flip(sources: np.ndarray, targets: np.ndarray) -> None:
        at = {page: owner for owner, page in where.items()}  # by place: whose it is
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            where[at[source]] = target

    for _ in range(20):
        n_free = pool.allocator.free_pages("huge")
        is_made, _ = make_room(pool, "ssm", 27, {"expert": flip})  # nine huge pages
        assert is_made == (not pool.moves.is_waiting)
        assert is_made or pool.allocator.free_pages("huge") > n_free
        pool.audit()
        pool.moves.next_step()
        if is_made:
            break
    assert pool.allocate("ssm", 27) is not None
    at_once = min(9, max(1, most_bytes // (2 * LEAST_COPY_BYTES)))  # huge pages, of two expert pages each
    n_places = [n // (2 * pool.layout.page_bytes("expert")) for n in moved.by_step if n]
    assert n_places == [min(at_once, 9 - done) for done in range(0, 9, at_once)]
    for page in kept:
        assert (pools.page_bytes_of(pool, "expert", where[page]) == page % 251).all()


def test_the_rest_of_a_budget_is_not_exceeded(watch: Callable[[PagePool, int], Moved]) -> None:
    """A second wish of the same step gets what the first has left, or waits; one huge page is refused to nobody who
    comes first."""
    pool, _, _ = scattered_pool(12)
    watch(pool, 3 * LEAST_COPY_BYTES)
    flip = {"expert": lambda sources, targets: None}
    assert make_room(pool, "ssm", 3, flip)[0] and not pool.moves.is_waiting
    assert pool.allocate("ssm", 3) is not None
    assert make_room(pool, "ssm", 3, flip) == (False, {}) and pool.moves.is_waiting
    pool.moves.next_step()
    assert make_room(pool, "ssm", 3, flip)[0] and not pool.moves.is_waiting
    pool.audit()


def run_requests(world: World, rng: np.random.Generator, n_requests: int) -> None:
    """Requests of any length come while others run; each gets its room, and its answer."""
    lengths = rng.integers(20, 3000, n_requests).tolist()
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    sequences = []
    for n_steps in range(5000):
        if lengths and n_steps % 3 == 0:
            sequences.append(world.engine.add(text(rng, lengths.pop()), params))
        world.engine.step()
        world.engine.audit()
        if not lengths and all(s.is_finished for s in sequences):
            break
    for sequence in sequences:
        assert sequence.error is None and sequence.is_finished
        assert sequence.output_ids == expected_answer(sequence.tokens[: sequence.n_prompt], 60, ignore_end=True)


@pytest.mark.parametrize("n_huge_pages", [0, 1, 3])
@pytest.mark.parametrize("policy", ["paper", "cost"])
def test_no_step_moves_more_and_every_request_gets_its_room(
    watch: Callable[[PagePool, int], Moved], policy: str, n_huge_pages: int
) -> None:
    rng = np.random.default_rng(n_huge_pages)
    world = make_world("qwen3.5-35b-a3b", 12 * GB, policy=policy)
    scatter(world, rng)
    huge_bytes = world.pool.layout.huge_bytes
    moved = watch(world.pool, n_huge_pages * huge_bytes)
    run_requests(world, rng, 10)
    assert 0 < max(moved.by_step) <= max(1, n_huge_pages) * huge_bytes
    assert moved.n_waits > 0, "the budget was never too small: nothing was tried"


def test_nobody_gives_way_while_pages_are_gathered(watch: Callable[[PagePool, int], Moved]) -> None:
    """Experts whose number is fixed, and scattered free pages that are enough: requests wait for moves, and neither
    a request that runs nor a kept prefix pays for it."""
    rng = np.random.default_rng(5)
    world = make_world("qwen3.5-35b-a3b", 12 * GB)
    store = world.store
    assert store is not None
    scatter(world, rng)
    rows = np.argwhere(store.residency.resident)
    for slot, expert in rows[rng.choice(len(rows), len(rows) // 2, replace=False)].tolist():
        world.pool.free("expert", store.take_out(slot, expert))
    room = CompactingRoom(world.cache, world.pool, world.pool.layout)
    room.store = store
    world.engine.scheduler.room = room
    moved = watch(world.pool, 1)
    n_resident = store.residency.n_resident
    run_requests(world, rng, 6)
    assert moved.n_waits > 0 and 0 < max(moved.by_step) <= world.pool.layout.huge_bytes
    assert world.engine.scheduler.n_preemptions == 0 and store.residency.n_resident == n_resident
