"""State pages beside experts, on the real shapes of hybrids: waste at every mix, and what admitting a request costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hybrid_world import World, expected_answer, make_world, scatter, text

from rimuru.arch.shapes import shape_table
from rimuru.base.units import ceil_div
from rimuru.memory.allocator import KIND_NUMBER
from rimuru.memory.planner import plan_layout, waste
from rimuru.memory.specs import PoolLayout
from rimuru.request import SamplingParams

NAMES = ("qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3-next-80b-a3b", "granite-4.0-h-small")
QUANTS = ("q4_k_m", "q8_0")
GB = 10**9


def useful_bytes_per_huge(layout: PoolLayout) -> Iterator[tuple[str, float]]:
    """Useful bytes of a huge page that is full of one kind."""
    assert layout.expert is not None and layout.ssm is not None and layout.conv is not None and layout.kv is not None
    per_huge = layout.huge_bytes // layout.expert.page_bytes
    useful = sum(layer.n_experts * layer.useful_bytes for layer in layout.expert.layers)
    yield "expert", per_huge * useful / layout.expert.n_pages
    yield "ssm", layout.huge_bytes // layout.ssm.page_bytes * layout.ssm.state_bytes
    parent_bytes = layout.page_bytes(layout.conv.parent)
    n_runs = parent_bytes // layout.conv.page_bytes // layout.conv.n_rows
    yield "conv", layout.huge_bytes // parent_bytes * n_runs * layout.conv.n_rows * layout.conv.row_bytes
    per_page = sum(group.useful_bytes for group in layout.kv.groups) / len(layout.kv.groups)
    yield "kv", layout.huge_bytes // layout.kv.page_bytes * per_page


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", NAMES)
def test_waste_is_under_five_percent_at_every_mix(name: str, quant: str) -> None:
    """A pool's huge pages are each split into one kind; whatever their numbers, the waste is a mean of the kinds'."""
    layout = plan_layout(*shape_table(name, quant), 2)
    kinds = dict(useful_bytes_per_huge(layout))
    assert layout.huge_bytes % layout.page_bytes("expert") == 0 == layout.huge_bytes % layout.page_bytes("ssm")
    rng = np.random.default_rng(0)
    mixes = [np.eye(4)[i] for i in range(4)] + [rng.dirichlet(np.full(4, 0.5)) for _ in range(500)]
    worst = max(1 - mix @ np.array(list(kinds.values())) / layout.huge_bytes for mix in mixes)
    assert worst < 0.05
    assert worst == pytest.approx(waste(layout)["fraction"], abs=1e-12)


def huge_pages_of_states(world: World) -> int:
    return int((world.pool.allocator.split_kind() == KIND_NUMBER["ssm"]).sum())


@pytest.mark.parametrize("policy", ["paper", "cost"])
@pytest.mark.parametrize(("name", "memory_bytes"), [(NAMES[0], 16 * GB), (NAMES[2], 32 * GB), (NAMES[3], 12 * GB)])
def test_admitting_requests_costs_no_more_experts_than_their_pages(name: str, memory_bytes: int, policy: str) -> None:
    """The pool is full of experts that lie anywhere. Each request, and the states that are kept of its prompt, take as
    many huge pages as their SSM pages and convolution rows fill, and experts give no more than these and the KV pages:
    up to two experts for each of the two decisions, which keep a small reserve."""
    rng = np.random.default_rng(1)
    world = make_world(name, memory_bytes, policy=policy)
    world.engine.call_openers = frozenset()
    scatter(world, rng)
    store, allocator, layout = world.store, world.pool.allocator, world.pool.layout
    assert store is not None and layout.expert is not None and layout.kv is not None
    k, per_huge = world.room.pages_per_expert, allocator.per_huge("expert")  # type: ignore[attr-defined]
    assert allocator.free_pages("huge") == 0 and layout.kv.parent == "expert"
    running = []
    for _ in range(8):
        n_resident, n_huge = store.residency.n_resident, huge_pages_of_states(world)
        n_kv = ceil_div(allocator.pages_in_use("kv"), allocator.per_parent("kv"))
        params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
        running.append(world.engine.add(text(rng, 100), params))
        while running[-1].n_cached < 100:
            world.engine.step()
        assert world.engine.scheduler.n_preemptions == 0
        n_conv = ceil_div(allocator.pages_in_use("conv"), allocator.per_parent("conv"))
        n_state_pages = allocator.pages_in_use("ssm") + n_conv
        assert huge_pages_of_states(world) <= ceil_div(n_state_pages, allocator.per_huge("ssm"))
        n_pages = (huge_pages_of_states(world) - n_huge) * per_huge
        n_pages += ceil_div(allocator.pages_in_use("kv"), allocator.per_parent("kv")) - n_kv
        assert n_resident - store.residency.n_resident <= ceil_div(n_pages, int(k)) + 4
    assert len(world.cache.snapshots) >= 3
    world.engine.audit()
    world.engine.run_until(running)
    for sequence in running:
        assert sequence.output_ids == expected_answer(sequence.tokens[: sequence.n_prompt], 500, ignore_end=True)
