"""The elastic loop in a real engine: whatever moves, whenever it arrives and whatever fails, answers are the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import NotEnoughMemoryError, RimuruError, StoreReadError
from rimuru.engine.room import ExpertRoom
from rimuru.request import Sequence

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
N_REQUESTS = 32
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 5) for i in range(N_REQUESTS)]


def open_tiny(model: Path, tiny: int, **more: object) -> LLM:
    return LLM(model, device="cpu", memory=tiny, max_step_tokens=64, max_sequences=N_REQUESTS, **more)  # type: ignore[arg-type]


def run(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


def add_all(llm: LLM, n: int = 8) -> list[Sequence]:
    return [llm.loaded.engine.add(prompt, GREEDY) for prompt in PROMPTS[:n]]


VARIANTS: dict[str, dict[str, object]] = {
    "paper": {"policy": "paper"},
    "paper, few absent": {"policy": "paper", "expert_offload_limit": 60},
    "cost": {"policy": "cost"},
    "cost, hot set": {"policy": "cost", "residency": "hotset"},
    "paper, recency": {"policy": "paper", "residency": "recency"},
    "paper, no fill on read": {"policy": "paper", "fill_on_read": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_32_requests_answer_the_same_under_every_policy(
    model: Path, tiny: int, answers: list[list[int]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are poisoned when they are given back, and every structure is audited after every step."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    with open_tiny(model, tiny, **VARIANTS[name]) as llm:
        assert run(llm) == answers
        room, store = llm.loaded.room, llm.loaded.store
        assert isinstance(room, ExpertRoom) and store is not None
        assert store.counters.n_read > 100
        forecasts = llm.memory()["forecasts"]["by_way"]
        way = "fill" if VARIANTS[name].get("fill_on_read", True) else "buffers"
        assert forecasts[way]["steps"] > 3 and forecasts[way]["expected_s"] > 0 and forecasts[way]["took_s"] > 0
        if VARIANTS[name]["policy"] == "paper":
            assert room.decisions.counts["shrink"] + room.decisions.counts["expand"] > 0
        llm.loaded.engine.audit()


def test_fixed_and_static_answer_the_same(model: Path, tiny: int, answers: list[list[int]]) -> None:
    with LLM(model, device="cpu", policy="static") as llm:
        assert run(llm) == answers
        assert llm.loaded.store is not None and llm.loaded.store.counters.hit_rate == 1.0
    with open_tiny(model, tiny, policy="fixed", resident_experts=8) as llm:
        assert run(llm) == answers
        assert sum(llm.memory()["resident_experts"]) == 8
    with open_tiny(model, tiny, policy="fixed", context=64) as llm:
        assert run(llm)[:4] == answers[:4]
    with pytest.raises(NotEnoughMemoryError):
        open_tiny(model, tiny, policy="static")


@contextmanager
def replaced_reads(llm: LLM, read: Callable[[Callable[..., None], int, int, np.ndarray], None]) -> Iterator[None]:
    """Every expert that is read goes through `read(original, slot, expert, out)`."""
    source = llm.loaded.store.source  # type: ignore[union-attr]
    original = source.read_expert
    source.read_expert = lambda slot, expert, out: read(original, slot, expert, out)  # type: ignore[method-assign]
    try:
        yield
    finally:
        source.read_expert = original  # type: ignore[method-assign]


def test_reads_that_arrive_late_and_in_any_order_change_nothing(
    model: Path, tiny: int, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIMURU_POISON", "1")
    chance = random.Random(4)

    def late(original: Callable[..., None], slot: int, expert: int, out: np.ndarray) -> None:
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.004)
        original(slot, expert, out)

    with open_tiny(model, tiny, policy="paper") as llm, replaced_reads(llm, late):
        assert run(llm) == answers
        llm.loaded.engine.audit()


def test_quiet_steps_bring_experts_back(model: Path, tiny: int) -> None:
    with open_tiny(model, tiny, policy="paper", residency="hotset", fill_on_read=False) as llm:
        store, room = llm.loaded.store, llm.loaded.room
        assert store is not None and isinstance(room, ExpertRoom)
        room.shrink(12)
        n_before = store.residency.n_resident
        llm.generate([3, 4, 5], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        assert room.decisions.counts["expand"] > 0
        store.finish_reads()
        assert store.residency.n_resident > n_before
        assert llm.memory()["decisions"]["counts"]["expand"] > 0
        record = room.decisions.records(1)[0]
        assert record.action == "expand" and record.pages > 0 and record.bytes > 0 and "free" in record.reason
        llm.loaded.engine.audit()


# ---- faults
@pytest.mark.parametrize("nth", [1, 2, 5, 17, 40])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), StoreReadError("expert 3: checksum mismatch")])
def test_a_read_that_fails_ends_only_the_requests_of_its_step(
    model: Path, tiny: int, answers: list[list[int]], nth: int, error: Exception
) -> None:
    count = 0

    def fail_once(original: Callable[..., None], slot: int, expert: int, out: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise error
        original(slot, expert, out)

    with open_tiny(model, tiny, policy="paper") as llm:
        engine = llm.loaded.engine
        with replaced_reads(llm, fail_once):
            first = add_all(llm)
            engine.run_until(first)
        assert count >= nth
        failed = [s for s in first if s.error is not None]
        for sequence in failed:
            assert isinstance(sequence.error, RimuruError) and str(error) in str(sequence.error)
        assert [s.output_ids for s in first if s.error is None] == [
            a for s, a in zip(first, answers, strict=False) if s.error is None
        ]
        engine.audit()
        again = add_all(llm)
        engine.run_until(again)
        assert [s.output_ids for s in again] == answers[: len(again)]
        engine.audit()


def test_an_expansion_that_fails_concerns_no_request(model: Path, tiny: int, answers: list[list[int]]) -> None:
    with open_tiny(model, tiny, policy="paper", residency="hotset", fill_on_read=False) as llm:
        engine, store, room = llm.loaded.engine, llm.loaded.store, llm.loaded.room
        assert store is not None and isinstance(room, ExpertRoom)

        def fail(original: Callable[..., None], slot: int, expert: int, out: np.ndarray) -> None:
            raise OSError("unreadable")

        room.shrink(6)
        with replaced_reads(llm, fail):
            begun = store.expand(3)
            assert len(begun) == 3
            store.finish_reads()
        engine.audit()
        assert not any(store.residency.resident[place] for place in begun)
        assert not set(store.expand(3)) & set(begun)  # not tried again until a step asks
        assert run(llm)[:8] == answers[:8]
        engine.audit()


def test_a_step_that_breaks_between_two_waves_gives_its_buffers_back(
    model: Path, tiny: int, answers: list[list[int]]
) -> None:
    with open_tiny(model, tiny, policy="paper") as llm:
        engine, ops = llm.loaded.engine, llm.loaded.ops
        original, count = ops.moe_experts, 0

        def break_once(*args: object) -> None:
            nonlocal count
            count += 1
            if count == 4:
                raise RuntimeError("a kernel broke")
            original(*args)  # type: ignore[arg-type]

        ops.moe_experts = break_once  # type: ignore[method-assign, assignment]
        first = add_all(llm)
        engine.run_until(first)
        ops.moe_experts = original  # type: ignore[method-assign]
        assert any(s.error is not None for s in first)
        engine.audit()
        again = add_all(llm)
        engine.run_until(again)
        assert [s.output_ids for s in again] == answers[: len(again)]


def test_copies_that_fail_while_resizing_leave_the_old_pool(model: Path, tiny: int, answers: list[list[int]]) -> None:
    """Every copy of a shrinking pool fails once; the pool stays whole and the requests go on."""
    with open_tiny(model, tiny, policy="cost") as llm:
        engine, pool = llm.loaded.engine, llm.loaded.pool
        copier = pool.copier
        assert copier is not None
        original, fail_at, count = copier.copy_within, 0, 0

        def failing(target: int, source: int, n_bytes: int) -> None:
            nonlocal count
            count += 1
            if count == fail_at:
                raise OSError("copy failed")
            original(target, source, n_bytes)

        copier.copy_within = failing  # type: ignore[method-assign]
        sequences = add_all(llm, 6)
        n_failed, smaller = 0, tiny
        for attempt in range(1, 6):
            engine.step()
            smaller = tiny - attempt * pool.layout.huge_bytes
            fail_at, count = attempt, 0
            before = pool.total_bytes
            try:
                llm.loaded.resize(smaller)
            except (OSError, NotEnoughMemoryError):
                n_failed += 1
                assert pool.total_bytes == before
            engine.audit()
        copier.copy_within = original  # type: ignore[method-assign]
        engine.run_until(sequences)
        assert [s.output_ids for s in sequences] == answers[:6]
        engine.audit()


def test_allocations_that_fail_are_a_matter_of_scheduling(
    model: Path, tiny: int, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then there is no page for a request or an expert, although there should be."""
    with open_tiny(model, tiny, policy="paper") as llm:
        allocator, chance = llm.loaded.pool.allocator, random.Random(9)
        for name in ("allocate", "allocate_expert"):
            original = getattr(allocator, name)
            monkeypatch.setattr(
                allocator, name, lambda *a, _call=original, **k: None if chance.random() < 0.1 else _call(*a, **k)
            )
        sequences = add_all(llm, 12)
        llm.loaded.engine.run_until(sequences)
        assert [s.output_ids for s in sequences if s.error is None] == [
            a for s, a in zip(sequences, answers, strict=False) if s.error is None
        ]
        assert sum(s.error is None for s in sequences) >= 6
        llm.loaded.engine.audit()
