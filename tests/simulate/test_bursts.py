"""Bursts and requests one by one under `cost`: where all fit, nobody waits for another one's end."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from rimuru.arch.common import Gguf
from rimuru.arch.shapes import shape_gguf
from rimuru.memory.adjuster import StepRates
from rimuru.simulate.cards import card_named
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.traces import TraceRequest

Lengths = tuple[tuple[int, int], ...]
"""Tokens of each prompt and of its answer."""
EIGHT = ((282, 144), (434, 82), (247, 230), (94, 71), (190, 113), (568, 103), (460, 214), (81, 167))
SIX = ((637, 70), (546, 245), (317, 59), (50, 87), (728, 200), (531, 244))
BURSTS: dict[str, tuple[str, float, Lengths]] = {
    "small, large": ("qwen3-30b-a3b", 14e9, ((300, 100), (700, 100))),
    "large, small": ("qwen3-30b-a3b", 14e9, ((700, 100), (300, 100))),
    "short prompts": ("qwen3-30b-a3b", 14e9, ((107, 73), (136, 142))),
    "three": ("qwen3-30b-a3b", 14e9, ((293, 201), (607, 83), (428, 204))),
    "prompts of two steps": ("qwen3-30b-a3b", 14e9, SIX),
    "eight": ("qwen3-30b-a3b", 14e9, EIGHT),
    "eight, a fifth of the experts": ("qwen3-30b-a3b", 8e9, EIGHT),
    "one large before many small": ("qwen3-30b-a3b", 14e9, ((6000, 120), *[(100, 60)] * 8)),
    "hybrid": ("qwen3.5-35b-a3b", 14e9, ((300, 100), (700, 100))),
}


@cache
def shape(name: str) -> Gguf:
    return shape_gguf(name, "q4_k_m")[0]


def simulate(name: str, memory_bytes: float, trace: list[TraceRequest], policy: str) -> Simulation:
    simulation = Simulation(shape(name), Settings(int(memory_bytes), card_named("rtx4090"), policy=policy))
    simulation.run(trace)
    return simulation


@pytest.mark.parametrize("case", BURSTS)
def test_a_burst_that_fits_is_let_in_at_once(case: str) -> None:
    name, memory_bytes, lengths = BURSTS[case]
    trace = [TraceRequest(0.0, *tokens) for tokens in lengths]
    cost, *rest = (simulate(name, memory_bytes, trace, policy) for policy in ("cost", "paper", "fixed"))
    assert cost.now_s <= 1.02 * min(other.now_s for other in rest)
    assert cost.recorder.mean_first_s <= 1.2 * min(other.recorder.mean_first_s for other in rest)


def test_a_second_burst_finds_no_other_welcome() -> None:
    """What was measured while few ran must not keep many waiting: the prompts of a burst share what they read."""
    first = [TraceRequest(0.0, 300, 100), TraceRequest(0.0, 700, 100)]
    trace = first + [dataclasses.replace(request, arrival_s=5.0) for request in first]
    cost, paper = (simulate("qwen3-30b-a3b", 14e9, trace, policy) for policy in ("cost", "paper"))
    assert cost.now_s <= 1.02 * paper.now_s
    assert cost.recorder.mean_first_s <= 1.2 * paper.recorder.mean_first_s


def test_who_waits_ends_no_later_for_it() -> None:
    """One by one, faster than they can be answered: some wait, and each of them has his whole answer earlier."""
    trace = [TraceRequest(0.3 * i, 200 + 50 * i, 150) for i in range(8)]
    cost, paper = (simulate("qwen3-30b-a3b", 14e9, trace, policy) for policy in ("cost", "paper"))
    assert cost.now_s < 0.9 * paper.now_s
    for number in range(8):
        assert cost.recorder.last_s(number) <= 1.02 * paper.recorder.last_s(number)


def test_a_crowd_is_not_judged_by_the_steps_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device tells what steps took some steps later. Until then the first pages that a crowd grows by are compared
    with the steps of the one who ran before it, in which a single expert's bytes seem much."""
    alone, crowd = [TraceRequest(0.0, 118, 200)], [TraceRequest(100.0, 118, 24)] * 96
    simulation = Simulation(shape("qwen3-30b-a3b"), Settings(int(14e9), card_named("h200")))
    simulation.run(alone)
    rates = simulation.store.rates
    assert rates.measured_requests == pytest.approx(1.0)
    monkeypatch.setattr(StepRates, "observe", lambda *measured: None)
    simulation.run(crowd)
    assert simulation.scheduler.n_preemptions == 0
