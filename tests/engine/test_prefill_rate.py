"""What running a request again adds to the steps of the others, and that the room is told."""

from __future__ import annotations

import random

import pytest
from engine_fakes import N_VOCAB, fake_engine

from rimuru.engine.prefill_rate import PrefillRate
from rimuru.engine.scheduler import NoRoom
from rimuru.plan import PlannedTokens, StepPlan
from rimuru.request import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class AskedRoom(NoRoom):
    def __init__(self) -> None:
        self.again_s: list[float] = []

    def make(
        self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False, again_s: float = 0.0
    ) -> bool:
        if is_running:
            self.again_s.append(again_s)
        return False


def measured(*steps: tuple[tuple[int, ...], float]) -> PrefillRate:
    """After steps of so many tokens of each request, which took so long."""
    clock = Clock()
    rate = PrefillRate(clock)
    for n_tokens, took_s in steps:
        plan = StepPlan()
        plan.items.extend(PlannedTokens(None, n, True) for n in n_tokens)  # type: ignore[arg-type]
        rate.begin(plan)
        clock.now_s += took_s
        rate.end(is_busy=True)
        clock.now_s += 100.0
        rate.end(is_busy=True)  # of no step
    return rate


def test_a_short_prompt_runs_beside_what_a_step_reads_anyway() -> None:
    rate = measured(((2000,), 0.1), ((1,) * 30, 0.01))
    assert rate.tokens_per_s == pytest.approx(20_000) and rate.step_s == pytest.approx(0.01)
    assert rate.added_seconds(200, 2000) == 0.0
    assert rate.added_seconds(1000, 2000) == pytest.approx(0.05 - 0.01)
    assert rate.added_seconds(4000, 2000) == pytest.approx(0.2 - 2 * 0.01)


def test_nothing_measured_adds_nothing() -> None:
    assert measured(((1,) * 30, 0.01)).added_seconds(1000, 2000) == 0.0
    assert measured(((2000,), 0.1)).added_seconds(1000, 2000) == pytest.approx(0.05)


def test_pauses_count_little() -> None:
    rate = measured(((1,), 0.01), ((1,), 1.0), ((1,), 0.01), ((1,), 0.01), ((1,), 0.01))
    assert 0.01 < rate.step_s < 0.03


def test_the_room_is_told_what_running_the_last_one_again_adds() -> None:
    engine = fake_engine(n_huge=2)
    room = AskedRoom()
    engine.scheduler.room = room
    engine.scheduler.prefill.tokens_per_s, engine.scheduler.prefill.step_s = 10.0, 0.5
    engine.scheduler.prefill.end = lambda is_busy: None  # type: ignore[method-assign]
    draw = random.Random(5)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    sequences = [engine.add([draw.randrange(N_VOCAB) for _ in range(20)], params) for _ in range(6)]
    for _ in range(4000):
        if all(s.is_finished for s in sequences):
            break
        engine.step()
    assert engine.scheduler.n_preemptions > 0
    most_s = 80 / 10.0 - 0.5  # all tokens of a request, for one that is still to come
    assert room.again_s and all(0.0 <= again_s <= most_s for again_s in room.again_s)
    assert max(room.again_s) > (20 / 10.0 - 0.5) / 60
