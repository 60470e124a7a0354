"""How many experts to shrink or expand: the paper's algorithm number by number, and what policy `cost` prefers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.memory import adjuster
from rimuru.memory.adjuster import (
    MOST_DECODE_TOKENS,
    MOST_FREE_EXPANSIONS,
    ForecastLog,
    StepClock,
    StepForecast,
    StepRates,
    cost_expand,
    offload_target,
    paper_decision,
    shrink_pays,
    step_seconds,
)


@pytest.mark.parametrize(
    ("need", "free", "expected"),
    [
        (1, 0, (1, 0)), (2, 0, (1, 0)), (3, 100, (2, 0)), (30, 0, (11, 0)),  # ceil((R_b + 1) / 3)
        (0, 0, (1, 0)), (0, 1, (1, 0)), (0, 2, (0, 0)), (0, 9, (0, 0)),  # one below 2, nothing between 2 and 9
        (0, 11, (0, 0)), (0, 12, (0, 1)), (0, 23, (0, 4)), (0, 24, (0, 5)), (0, 10_000, (0, 5)),
    ],
)  # fmt: skip
def test_paper_is_algorithm_1_for_three_pages(need: int, free: int, expected: tuple[int, int]) -> None:
    assert tuple(paper_decision(need, free, 3.0)) == expected


@settings(deadline=None)
@given(need=st.integers(0, 500), free=st.integers(0, 5000), k=st.floats(1.0, 16.0))
def test_paper_in_pages_of_any_size(need: int, free: int, k: float) -> None:
    shrink, expand = paper_decision(need, free, k)
    assert shrink == (math.ceil((need + 1) / k) if need else int(free < 2 / 3 * k))
    assert expand == (min(5, math.floor((free - 3 * k) / k)) if not need and free > 3 * k else 0)
    assert not (shrink and expand)


def test_a_forecast_of_a_step() -> None:
    assert step_seconds(0.010, 0.0, 0.3) == pytest.approx(0.010)
    assert step_seconds(0.010, 0.005, 0.2) == pytest.approx(0.011)
    assert step_seconds(0.010, 0.030, 0.2) == pytest.approx(0.010 + 0.030 - 0.0095)


def target(uses: np.ndarray, expert_s: float, without: float, wanted: float, compute_s: float = 0.015) -> int:
    return offload_target(uses, expert_s, 3.0, without, 12.0, wanted, 30.0, 0.05, compute_s, 0.15, 1.0, 0.0, 12.0, 0.0)


def test_cost_gives_what_hides_and_no_more() -> None:
    """30 requests fit beside all experts; a further one takes 12 pages, which are 4 experts."""
    uses = np.full(1440, 0.9)  # by each token, so nearly always
    hidden = target(uses, 0.0003, 360.0, 1000.0)  # an expert takes 0.3 ms of the link, a step 15 ms
    assert 20 < hidden < 60
    assert target(uses, 0.003, 360.0, 1000.0) == 0  # each expert costs more than a quarter of a request brings
    assert target(uses, 0.0, 360.0, 1000.0) >= 1300  # reads cost nothing: all that brings requests
    assert target(uses, 0.0003, 360.0, 30.0) == 0  # nobody waits
    assert target(uses, 0.0003, 360.0, 32.0) <= 8  # two wait: four experts each
    never = np.concatenate([np.zeros(100), np.ones(1340)])
    assert 80 <= target(never, 0.0003, 360.0, 1000.0) <= 160  # those that nobody uses go first


def test_cost_finds_the_least_where_experts_do_not_fit() -> None:
    uses = np.full(100, 0.5)
    found = target(uses, 0.0003, -150.0, 1.0)  # 50 experts more than fit, and a request of 12 pages
    assert found == 54


def one_request_runs(n_waiting: int, surprise: float, running: int = 1, pool_experts: int = 2170) -> int:
    """Of 6,144 experts of 7 pages; a request takes 12.6 of them. An expert takes 54 us of the link, as on the card."""
    ranks = np.arange(6144) / 6144
    probability = np.exp(5.0 * ranks) / np.exp(5.0 * ranks).mean() * 8 / 128
    without = 7.0 * (pool_experts - 6144 + 12.6)
    total = float(running + n_waiting)
    return offload_target(
        probability, 54e-6, 7.0, without, 88.0, total, running, 0.006, 2.8e-3, 1.0, surprise, running, 88.0, 0.0
    )


def test_the_pages_that_are_lacking_are_no_requests() -> None:
    """A pool that takes a third of the experts and one request: a target below what is absent would admit nobody."""
    n_absent = 6144 - 2170
    assert one_request_runs(0, 1.0) >= n_absent
    assert one_request_runs(95, 1.0) >= n_absent + 80 * 12


def test_few_or_many_but_not_between() -> None:
    """A request that follows its text misses little, a few of them at once much more; many share what they read."""
    n_absent = 6144 - 2170
    assert one_request_runs(7, 0.1) < n_absent + 2 * 13
    assert one_request_runs(95, 0.1) > n_absent + 80 * 12
    assert one_request_runs(7, 1.0) > n_absent + 4 * 12


def test_nobody_fits() -> None:
    for n_now in (0.0, 4.0):
        found = offload_target(
            np.full(10, 0.5), 1e-3, 3.0, -40.0, 12.0, 4.0, 1.0, 0.05, 1e-3, 1.0, 1.0, n_now, 12.0, 0.0
        )
        assert found == 10


def beside_one(pages_per_waiting: float = 60.0, n_waiting: int = 1, starts_per_step: float = 0.0) -> int:
    """1,000 experts of 3 pages of which 500 are absent; one request of 12 pages runs, all others want more. An expert
    takes 0.1 ms of the link."""
    uses = np.geomspace(1e-3, 0.5, 1000)
    without, wanted = -1488.0, 1.0 + n_waiting
    return offload_target(
        uses, 1e-4, 3.0, without, 12.0, wanted, 1.0, 0.0, 3e-3, 1.0, 1.0, 1.0, pages_per_waiting, starts_per_step
    )


def test_who_waits_is_reckoned_with_by_his_own_pages() -> None:
    """A larger request that waits would never fit into what one like the running one takes."""
    assert beside_one(12.0) - 500 == 4
    assert beside_one(60.0) - 500 == 20


def test_prompts_that_begin_together_share_their_reading() -> None:
    """One after the other is a bit faster, until a second reading of all absent experts counts."""
    assert beside_one(900.0) == 500
    assert beside_one(900.0, starts_per_step=1 / 10) == 800
    assert beside_one(900.0, starts_per_step=1 / 1000) == 500


def test_nobody_waits_for_a_rate_that_is_no_better_than_that_of_all() -> None:
    """Two together have 1% more of it than one after the other: both run, though one alone has a shorter step."""
    uses = np.full(100, 1.0)
    for expert_s, n_absent in ((1.0e-5, 4), (1.0e-3, 0)):
        found = offload_target(uses, expert_s, 3.0, 12.0, 12.0, 2.0, 1.0, 0.97, 3e-3, 1.0, 1.0, 1.0, 12.0, 0.0)
        assert found == n_absent


def test_running_requests_keep_their_pages_unless_experts_are_worth_more() -> None:
    assert shrink_pays(1, 0.01, 10.0, 0.0, 0.2, 0.0)  # the last one always
    assert shrink_pays(30, 0.0, 10.0, 0.0, 0.2, 0.0)  # nothing measured yet
    assert shrink_pays(30, 0.01, 0.001, 0.0, 0.2, 0.0)
    assert not shrink_pays(30, 0.01, 0.030, 0.010, 0.2, 0.0)


def test_who_gives_way_costs_what_running_it_again_adds() -> None:
    """One of 50 is 2% of the tokens. Steps of 10.3 instead of 10 ms are worth it, until running it again takes them."""
    kept_s, let_go_s = 0.0015, 0.0
    assert step_seconds(0.010, kept_s, 0.2) == pytest.approx(0.0103)
    assert not shrink_pays(50, 0.010, kept_s, let_go_s, 0.2, 0.0)
    assert not shrink_pays(50, 0.010, kept_s, let_go_s, 0.2, 0.00009)
    assert shrink_pays(50, 0.010, kept_s, let_go_s, 0.2, 0.0001)
    assert shrink_pays(30, 0.010, kept_s, let_go_s, 0.2, 0.0)  # one of 30 is more than they gain


def test_cost_expands_no_faster_than_the_link_carries() -> None:
    assert cost_expand(9, 3.0, 1.0, 0.001) == 0
    assert cost_expand(90, 3.0, 0.005, 0.001) == 5
    assert cost_expand(90, 3.0, 0.0, 0.001) == 1
    assert cost_expand(90, 3.0, 1.0, 0.001) == 27


def test_where_expanding_moves_nothing_pages_wait_for_nobody() -> None:
    assert cost_expand(9, 3.0, 0.0, 0.0) == 0
    assert cost_expand(24, 3.0, 0.0, 0.0) == 5
    assert cost_expand(3000, 3.0, 0.0, 0.0) == MOST_FREE_EXPANSIONS


def test_rates_follow_decode_steps_only() -> None:
    rates = StepRates()
    rates.observe(500, 9.0, 0.0, 0, 0.0)
    assert rates.n_steps == 0 and rates.compute_s == 0.0
    for _ in range(40):
        rates.observe(8, 0.012, 0.002, 50_000_000, 0.005)
    assert rates.compute_s == pytest.approx(0.010, rel=1e-3)
    assert rates.link_bytes_per_s == pytest.approx(1e10, rel=1e-2)
    assert rates.link_s == pytest.approx(0.005, rel=2e-2)
    assert rates.exposed_share == pytest.approx(0.4, rel=1e-2)


def test_means_of_steps_count_as_so_many() -> None:
    """And the requests that ran in them are known: rates of 96 requests say nothing about those of the one before."""
    one_by_one, at_once = StepRates(), StepRates()
    for rates, calls, n_steps in ((one_by_one, 8, 1), (at_once, 1, 8)):
        rates.n_requests = 1
        rates.observe(1, 0.002, 0.0, 0, 0.0)
        rates.n_requests = 96
        for _ in range(calls):
            rates.observe(96, 0.100, 0.080, 4_000_000_000, 0.080, n_steps)
    for name in ("compute_s", "link_bytes", "link_bytes_per_s", "measured_requests"):
        assert getattr(at_once, name) == pytest.approx(getattr(one_by_one, name)), name
    assert at_once.measured_requests == pytest.approx(1 + 95 * (1 - 0.8**8))


def test_forecasts_are_kept_with_what_happened() -> None:
    rates = StepRates(way="fill")
    rates.observe(1, 0.010, 0.0, 0, 0.0)  # nothing is known before the first step
    assert len(rates.forecasts) == 0
    rates.observe(1, 0.010, 0.0, 0, 0.0)
    assert rates.forecasts.last() == StepForecast("resident", 1, pytest.approx(0.010), 0.010, 0, 0)
    rates.observe(4, 0.020, 0.008, 10**8, 0.005)
    last = rates.forecasts.last()
    assert last.way == "fill" and last.n_tokens == 4 and last.expected_bytes == 0 and last.bytes == 10**8
    assert last.expected_s == pytest.approx(0.010) and last.took_s == 0.020
    for _ in range(60):
        rates.observe(4, 0.020, 0.008, 10**8, 0.005)
    assert rates.forecasts.last().expected_bytes == pytest.approx(10**8, rel=0.01)
    by_way = rates.forecasts.snapshot(3)["by_way"]
    assert by_way["fill"]["steps"] == 61 and by_way["resident"]["off"] == pytest.approx(0.0)
    assert by_way["fill"]["took_s"] == pytest.approx(0.020)
    rates.observe(MOST_DECODE_TOKENS + 1, 1.0, 0.0, 0, 0.0)  # a piece of a prompt
    assert len(rates.forecasts.snapshot(3)["last"]) == 3 and rates.forecasts.last().n_tokens == 4


def test_a_forecast_is_of_steps_of_as_many_tokens() -> None:
    """A crowd comes and goes: what its steps took is foretold from the last crowd's, not from those in between."""
    rates = StepRates(way="fill", exposed_share=1.0, link_bytes_per_s=50e9)
    for _ in range(2):
        for _ in range(30):
            rates.observe(1, 0.002, 0.0002, 10_000_000, 0.0002)
        assert rates.forecasts.last().expected_s == pytest.approx(0.002, rel=0.01)
        for _ in range(30):
            rates.observe(96, 0.080, 0.070, 3_500_000_000, 0.070)
    first_of_second = rates.forecasts.snapshot(30)["last"][0]
    assert first_of_second["n_tokens"] == 96
    assert first_of_second["expected_s"] == pytest.approx(0.080, rel=0.01)
    assert first_of_second["expected_bytes"] == pytest.approx(3_500_000_000, rel=0.01)


def test_a_link_that_was_measured_slow_is_found_out() -> None:
    """Steps that bring more than the link was thought to carry say so; a single report that counts more bytes than its
    time is of does not."""
    rates = StepRates(link_bytes_per_s=20e9)
    for n_bytes in (10_000_000, 900_000_000, 10_000_000):
        rates.bound_rate(0.010, n_bytes)
    assert rates.link_bytes_per_s == 20e9
    for n_bytes in (400_000_000, 450_000_000):
        rates.bound_rate(0.010, n_bytes)
    assert rates.link_bytes_per_s == pytest.approx(40e9)
    rates.bound_rate(0.010, 100_000_000)
    assert rates.link_bytes_per_s == pytest.approx(40e9)


def test_a_clock_tells_of_the_steps_up_to_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report comes steps after it was asked for; steps in between belong to the next one."""
    now = 0.0
    monkeypatch.setattr(adjuster.time, "perf_counter", lambda: now)
    clock = StepClock()
    clock.tick()
    for seconds in (1.0, 3.0):
        now += seconds
        clock.tick()
    clock.ask()
    now += 10.0
    clock.tick()
    assert clock.mean_s() == pytest.approx(2.0)
    assert clock.mean_s() == 0.0
    clock.stop()
    now += 50.0
    clock.tick()
    clock.ask()
    assert clock.mean_s() == pytest.approx(10.0)


def test_only_the_last_forecasts_are_kept() -> None:
    log = ForecastLog(2)
    for n in range(5):
        log.add(StepForecast("in place", n, 1.0, 2.0, 0, 0))
    assert len(log) == 2 and [row["n_tokens"] for row in log.snapshot()["last"]] == [3, 4]
    assert log.snapshot()["by_way"]["in place"] == {"steps": 5, "expected_s": 1.0, "took_s": 2.0, "off": 0.5}


def test_what_steps_of_a_kind_bring_is_known_apart() -> None:
    """Few and many requests take turns: each kind's bytes are its own; of a kind that never ran, any step's."""
    rates = StepRates(link_bytes_per_s=1e9)
    assert rates.link_bytes_of(8) == 0.0
    for _ in range(200):
        rates.observe(8, 0.010, 0.001, 1_000_000, 0.001)
        rates.observe(96, 0.030, 0.020, 20_000_000, 0.020)
    assert rates.link_bytes_of(9) == pytest.approx(1e6) and rates.link_bytes_of(100) == pytest.approx(20e6)
    assert 1e6 < rates.link_bytes < 20e6 and rates.link_bytes_of(1) == rates.link_bytes
