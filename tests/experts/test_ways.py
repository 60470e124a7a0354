"""How missed experts come is chosen by what steps take: the faster way wins whatever was believed; trials are few."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rimuru.experts import ways as ways_module
from rimuru.experts.step_tuner import FIRST_PAUSE, GAIN, TRIAL_STEPS, StepTuner
from rimuru.experts.ways import ASIDE_TOKENS, LEAST_LINK_S, StepWays, WayTuner, first_way, hoped_s
from rimuru.memory.adjuster import ForecastLog, StepRates

WAYS = ("before", "beside", "in place")


def run(
    tuner: WayTuner, seconds: dict[str, float], n_steps: int, n_tokens: int = 32, link_s: float = 0.01
) -> Counter[str]:
    """How many of so many steps ran in each way, whose times are known."""
    taken: Counter[str] = Counter()
    for _ in range(n_steps):
        way = tuner.choose(n_tokens, link_s)
        taken[way] += 1
        tuner.note(n_tokens, way, seconds[way], link_s, 1000)
    return taken


@given(times=st.permutations([0.020, 0.024, 0.030]), n_tokens=st.integers(1, 128))
def test_the_fastest_way_wins_and_trials_grow_rare(times: list[float], n_tokens: int) -> None:
    tuner = WayTuner(WAYS, ForecastLog())
    seconds = dict(zip(WAYS, times, strict=True))
    run(tuner, seconds, 40 * FIRST_PAUSE, n_tokens)
    best = min(seconds, key=seconds.__getitem__)
    assert tuner.snapshot() == {(1 << n_tokens.bit_length()) - 1: best}
    later = run(tuner, seconds, 4000, n_tokens)
    assert later[best] >= 4000 - 3 * TRIAL_STEPS


def test_ways_of_like_speed_are_not_changed() -> None:
    tuner = WayTuner(WAYS, ForecastLog())
    run(tuner, {"before": 0.02 * (1 - GAIN / 2), "beside": 0.02, "in place": 0.02}, 2000)
    assert tuner.choose(32, 0.01) == "beside"


def test_kinds_of_steps_are_tuned_apart() -> None:
    tuner = WayTuner(WAYS, ForecastLog())
    for _ in range(20):
        run(tuner, {"before": 0.010, "beside": 0.020, "in place": 0.030}, 50, n_tokens=8)
        run(tuner, {"before": 0.020, "beside": 0.010, "in place": 0.030}, 50, n_tokens=96)
    assert tuner.snapshot() == {15: "before", 127: "beside"}


def test_another_load_is_tried_soon() -> None:
    """After many trials that failed they are rare, until steps bring four times as much."""
    tuner = WayTuner(("before", "beside"), ForecastLog())
    run(tuner, {"before": 0.012, "beside": 0.010}, 6000, link_s=0.002)
    taken = run(tuner, {"before": 0.030, "beside": 0.040}, 3 * FIRST_PAUSE, link_s=0.008)
    assert taken["before"] >= FIRST_PAUSE and tuner.snapshot() == {63: "before"}


def test_every_trial_is_told_with_what_was_expected() -> None:
    """First by the link's rate; from then on by the comparison before."""
    log = ForecastLog()
    tuner = WayTuner(("before", "beside"), log)
    run(tuner, {"before": 0.020, "beside": 0.018}, 400, n_tokens=2, link_s=0.006)
    first, second = log.snapshot(100)["last"][:2]
    assert (first["way"], first["n_tokens"]) == ("beside", 2)
    assert first["expected_s"] == pytest.approx(0.020 - 0.006) and first["took_s"] == pytest.approx(0.018)
    assert second["way"] == "before" and second["expected_s"] == pytest.approx(0.020) == second["took_s"]


def test_what_hides_is_bounded_by_link_and_compute() -> None:
    assert hoped_s("beside", "before", 0.020, 0.005) == pytest.approx(0.015)
    assert hoped_s("beside", "before", 0.020, 0.019) == pytest.approx(0.020 - 0.95 * 0.001)
    assert hoped_s("before", "in place", 0.020, 0.005) == 0.020
    assert hoped_s("before", "beside", 0.015, 0.005) == pytest.approx(0.020)


def test_nothing_is_tried_for_prompts_or_where_little_comes() -> None:
    tuner = WayTuner(WAYS, ForecastLog())
    seconds = {"before": 0.001, "beside": 0.1, "in place": 0.1}
    assert run(tuner, seconds, 1000, n_tokens=2048) == {"beside": 1000}
    assert run(tuner, seconds, 1000, link_s=LEAST_LINK_S / 2) == {"beside": 1000}
    assert run(WayTuner(("in place",), ForecastLog()), seconds, 1000) == {"in place": 1000}


def test_first_choices() -> None:
    assert [first_way(n, WAYS) for n in (1, ASIDE_TOKENS - 1, ASIDE_TOKENS, 4096)] == ["before"] * 2 + ["beside"] * 2
    assert first_way(64, ("in place",)) == "in place" and first_way(1, (*WAYS, "ahead")) == "ahead"


@given(seed=st.integers(0, 1000))
def test_a_tuner_keeps_what_it_says(seed: int) -> None:
    """Whatever steps take: settings come from `first` and `other` only, a trial that is over has been told, and what is
    kept took less."""
    rng = random.Random(seed)
    tuner: StepTuner[int] = StepTuner(lambda n_tokens: 0, lambda setting, n_failed: (setting + 1 + n_failed) % 4)
    setting, n_trials = 0, 0
    for _ in range(600):
        chosen = tuner.choose(7)
        assert chosen in range(4) and (chosen == tuner.setting_of(7)) == (not tuner.is_trying(7))
        trial = tuner.note(7, chosen, rng.uniform(0.5, 1.0) * (1 + chosen))
        if trial is not None:
            n_trials += 1
            assert trial.was == setting != trial.setting
            assert trial.pays == (trial.took_s < (1 - GAIN) * trial.was_s)
            setting = trial.setting if trial.pays else trial.was
        assert tuner.setting_of(7) == setting
    assert n_trials >= 2


class Store:
    """What StepWays needs of a store."""

    def __init__(self) -> None:
        self.ways, self.way, self.is_watching, self.rates = WAYS, "before", True, StepRates(link_bytes=4e8)

    def use_way(self, way: str) -> None:
        self.way = way


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(ways_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_steps_are_timed_by_each_other(clock: list[float]) -> None:
    """Steps of 32 take 10 ms before, 20 beside; pauses, other lengths and scores in between do not count."""
    store: Any = Store()
    chooser, rng = StepWays(store), random.Random(1)
    for _ in range(3000):
        assert chooser.begin(32) == ("before" if store.way == "in place" else store.way)
        clock[0] += {"before": 0.010, "beside": 0.020, "in place": 0.015}[store.way]
        if rng.random() < 0.1:
            clock[0] += 60.0
        if rng.random() < 0.1:
            chooser.begin(int(rng.choice([1, 7, 500])), is_timed=rng.random() < 0.5)
            clock[0] += 5.0 * rng.random()
    assert chooser.report()["63"] == "before"


def test_resident_steps_have_launches_of_their_own(clock: list[float]) -> None:
    store: Any = Store()
    chooser = StepWays(store)
    store.is_watching = False
    for _ in range(500):
        assert chooser.begin(32) == "resident" == store.way
        clock[0] += 0.01
    assert chooser.report() == {}


def test_the_cpu_and_ways_are_not_tried_at_once(clock: list[float]) -> None:
    store: Any = Store()
    chooser = StepWays(store)
    noted: list[tuple[str, float]] = []
    shares = iter([0.0] * 200 + [0.25] * 12 + [0.0] * 5000)
    tuner = SimpleNamespace(choose=lambda n_tokens, link_s: next(shares), note=lambda *values: None)
    chooser.cpu = SimpleNamespace(tuner=tuner, share=0.0)  # type: ignore[assignment]
    for _ in range(1500):
        launched = chooser.begin(32)
        assert (launched == "cpu") == (chooser.cpu.share > 0.0)
        noted.append((store.way, chooser.cpu.share))
        clock[0] += 0.010 if store.way == "before" else 0.012
    shared = {way for way, share in noted if share}
    assert len(shared) == 1 and sum(share > 0 for _, share in noted) == 12
