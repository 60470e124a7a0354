"""How many experts to shrink or expand, once per step, and why: policies `paper` and `cost` (design sections 3 and 4).

`paper` is Algorithm 1. `cost` knows that an expert that is not resident is read again in every step that uses it. Reads
that hide behind the step's compute are nearly free; beyond that each one makes the step longer for everybody. So it
computes how many experts should be absent for the best rate of tokens of all requests together, and admits requests
as far as these pages, and no others, hold them. (The scheduler does not hold anybody back for long: see its HOLD_S.)
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import numba
import numpy as np

N_EXPAND_PER_STEP = 5
HIDDEN_SHARE = 0.95
"""Of a step's compute behind which copies can hide at best."""
RATE_SLACK = 0.04
"""What a shorter step is worth: so much of the best rate, but none of the rate of all together (the last of those who
wait would end later than with all at once)."""
GROUPS = 128
"""Experts of like warmth are reckoned with together, in so many groups."""
CHOICE_GROWTH, MOST_CHOICES = 1.08, 96
"""Numbers of requests that are weighed against each other: each the next whole one that is larger by this factor; so
many of them go beyond 2,000 requests."""
MOST_FREE_EXPANSIONS = 16
"""Experts that get pages in a step where that moves nothing: what the host does for each takes tens of microseconds."""
MOST_DECODE_TOKENS = 128
"""A step with more tokens is one of prompts."""
_SMOOTHING = 0.2
_RECORDS = 512


@numba.njit(cache=True, nogil=True, fastmath=False)
def paper_decision(need_pages: int, free_pages: int, pages_per_expert: float) -> tuple[int, int]:
    """(experts to shrink, experts to expand) for R_b = need_pages and F_b = free_pages in expert pages.

    With k = pages_per_expert:  R_b > 0: shrink ceil((R_b + 1) / k);  F_b < 2/3 k: shrink one;
    F_b > 3 k: expand min(5, floor((F_b - 3 k) / k)). k = 3 gives the paper's thresholds 2 and 9.
    """
    k = pages_per_expert
    if need_pages > 0:
        return math.ceil((need_pages + 1) / k), 0
    if free_pages < 2.0 / 3.0 * k:
        return 1, 0
    if free_pages > 3.0 * k:
        return 0, min(N_EXPAND_PER_STEP, math.floor((free_pages - 3.0 * k) / k))
    return 0, 0


@numba.njit(cache=True, nogil=True, fastmath=False)
def step_seconds(compute_s: float, link_s: float, exposed_share: float) -> float:
    """Forecast of a step whose transfers keep the link busy for link_s: a measured share of them does not hide behind
    the compute, and none of what goes beyond HIDDEN_SHARE of it."""
    return compute_s + max(exposed_share * link_s, link_s - HIDDEN_SHARE * compute_s)


@numba.njit(cache=True, nogil=True, fastmath=False)
def offload_target(
    probability: np.ndarray,  # float64 [n_experts]: that a token uses each expert, the coldest expert first
    expert_link_s: float,
    pages_per_expert: float,
    pages_without: float,  # for requests while all experts are resident; negative where they do not even fit
    pages_per_request: float,
    n_wanted: float,  # requests that there are to run
    n_running: float,  # in the steps that the figures below are of
    growing_share: float,  # of compute_s: grows with the number of requests
    compute_s: float,  # of a step of n_running requests
    exposed_share: float,
    surprise: float,  # link time of a step of n_running requests, against what the probabilities foretell
    n_now: float,  # requests that have pages already, pages_per_request each
    pages_per_waiting: float,  # for each beyond these
    starts_per_step: float,  # 1 / tokens of an answer where all requests begin together, else 0
) -> int:
    """How many experts should be absent: the fewest that give the best rate of tokens, within RATE_SLACK of it,
    and no worse than that of all n_wanted.

    n requests need the pages of A(n) experts, and a step of theirs takes T = step_seconds(compute, link time of the
    A(n) coldest, each used with 1 - (1 - p) ** n). The rate is n / T. It need not have one peak: few requests find
    most of what they use resident, many of them use every absent expert in every step anyway, and share it; in between
    it may be lower than on either side. Requests that follow a text use fewer of the cold experts than those of a
    sum of texts, so the surprise is less, the fewer they are: it fades as n_running / n.

    Where all begin together, their prompts share one reading of the absent experts, which prompts use all of; those
    who are left for later have another. So much of it as falls on one of their steps counts with T.
    """
    n_experts = probability.size
    n_groups = min(n_experts, GROUPS)
    stays, ends = np.zeros(n_groups), np.empty(n_groups, np.int64)  # mean log(1 - p) of a group; where it ends
    first = 0
    for group in range(n_groups):
        ends[group] = (group + 1) * n_experts // n_groups
        for i in range(first, ends[group]):
            stays[group] += math.log1p(-min(probability[i], 1.0 - 1e-12))
        stays[group] /= ends[group] - first
        first = ends[group]
    beyond = pages_without + n_experts * pages_per_expert - n_now * pages_per_request
    n_wanted = min(n_wanted, n_now + math.floor(beyond / (pages_per_waiting if beyond > 0.0 else pages_per_request)))
    rates, absents = np.zeros(MOST_CHOICES), np.zeros(MOST_CHOICES, np.int64)
    n_choices, n = 0, 0.0
    while n < n_wanted and n_choices < MOST_CHOICES:
        n = min(math.ceil(max(1.0, n * CHOICE_GROWTH)), n_wanted)
        n_pages = min(n, n_now) * pages_per_request + max(0.0, n - n_now) * pages_per_waiting
        n_absent = max(0, math.ceil((n_pages - pages_without) / pages_per_expert))
        link_s, first = 0.0, 0
        for group in range(n_groups):
            if first >= n_absent:
                break
            link_s += (min(ends[group], n_absent) - first) * -math.expm1(n * stays[group])
            first = ends[group]
        link_s *= expert_link_s * (1.0 + (surprise - 1.0) * min(1.0, n_running / n))
        step_compute_s = compute_s * max(0.0, 1.0 + growing_share * (n / n_running - 1.0))
        step_s = step_seconds(step_compute_s, link_s, exposed_share) + starts_per_step * n_absent * expert_link_s
        rates[n_choices] = n / max(step_s, 1e-9)
        absents[n_choices] = n_absent
        n_choices += 1
    if n_choices:
        enough = max((1.0 - RATE_SLACK) * rates[:n_choices].max(), rates[n_choices - 1])
        for choice in range(n_choices):
            if rates[choice] >= enough:
                return absents[choice]
    return n_experts  # not even one request fits beside any expert


@numba.njit(cache=True, nogil=True, fastmath=False)
def shrink_pays(
    n_running: int, compute_s: float, kept_link_s: float, let_go_link_s: float, exposed_share: float, again_s: float
) -> bool:
    """Whether experts give way for the next pages of a running request. The other choice is to let one request go,
    whose pages then hold experts, and to run it again later: n / T(kept) against (n - 1) / (T(let go) + again_s).

    again_s: what running it again adds to the others' steps, for each step that it misses."""
    if n_running <= 1 or compute_s <= 0.0:
        return True
    kept_s = step_seconds(compute_s, kept_link_s, exposed_share)
    let_go_s = step_seconds(compute_s, let_go_link_s, exposed_share) + again_s
    return n_running * let_go_s >= (n_running - 1) * kept_s


@numba.njit(cache=True, nogil=True, fastmath=False)
def cost_expand(free_pages: int, pages_per_expert: float, idle_link_s: float, expert_link_s: float) -> int:
    """Experts to expand into pages that nobody wants: as `paper`, but no more at a time than the link carries beside
    the step (one at least, because an expert that is absent is read again and again). expert_link_s = 0: expanding
    moves nothing."""
    k = pages_per_expert
    n = math.floor((free_pages - 3.0 * k) / k)
    if n <= 0:
        return 0
    n_idle = int(idle_link_s / expert_link_s) if expert_link_s > 0.0 else MOST_FREE_EXPANSIONS
    return min(n, max(1, n_idle))


@dataclass(frozen=True, slots=True)
class StepForecast:
    """How a step's absent experts were used, what that was expected to cost, and what it did. On a device whose reports
    cover several steps: their means."""

    way: str
    """"resident": none was absent; "before", "beside", "in place", "ahead": see experts/ways.py; "cpu": the CPU did
    a part. By the host: "fill": into the pool on the way; "buffers": into loading buffers; "staged": from RAM or disk
    through staging buffers."""
    n_tokens: int
    expected_s: float
    took_s: float
    expected_bytes: int
    bytes: int


class ForecastLog:
    """The last forecasts, oldest first, and how far off they were, by way."""

    def __init__(self, n_kept: int = _RECORDS) -> None:
        self._kept: deque[StepForecast] = deque(maxlen=n_kept)
        self._sums: dict[str, list[float]] = {}

    def add(self, forecast: StepForecast) -> None:
        self._kept.append(forecast)
        sums = self._sums.setdefault(forecast.way, [0, 0.0, 0.0, 0.0])
        off = abs(forecast.took_s - forecast.expected_s) / forecast.took_s
        for i, value in enumerate((1, forecast.expected_s, forecast.took_s, off)):
            sums[i] += value

    def __len__(self) -> int:
        return len(self._kept)

    def last(self) -> StepForecast:
        return self._kept[-1]

    def snapshot(self, n: int = 20) -> dict[str, Any]:
        """For reports: means by way since the start (`off`: of the difference, as a share of what a step took), and the
        last n forecasts as dicts."""
        by_way = {
            way: {
                "steps": int(n_steps),
                "expected_s": expected / n_steps,
                "took_s": took / n_steps,
                "off": off / n_steps,
            }
            for way, (n_steps, expected, took, off) in self._sums.items()
        }
        return {"by_way": by_way, "last": [asdict(forecast) for forecast in list(self._kept)[-n:]]}


@dataclass(slots=True)
class StepRates:
    """What steps cost, smoothed over the last ones. Seconds and bytes per step."""

    compute_s: float = 0.0
    """Of a step whose experts are all resident."""
    link_bytes: float = 0.0
    """Expert bytes brought because a step used them."""
    link_bytes_per_s: float = 20e9
    exposed_share: float = 0.2
    """Of the time that the link is busy, how much makes the step longer."""
    n_requests: int = 0
    """That run now."""
    measured_requests: float = 0.0
    """That ran in the steps that these figures are of, smoothed alike."""
    n_steps: int = 0
    way: str = "resident"
    """How absent experts are used now: see StepForecast."""
    forecasts: ForecastLog = field(default_factory=ForecastLog)
    _kinds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of steps of about as many tokens (the same power of two): compute seconds and link bytes, smoothed alike. A
    forecast is of these; what is decided goes by all steps, which follow each other."""
    _least_rate: float = 0.0
    """What the link must have carried in the steps of the last observation: their bytes in their time."""

    @property
    def link_s(self) -> float:
        return self.link_bytes / self.link_bytes_per_s

    def link_bytes_of(self, n_tokens: int) -> float:
        """Of a step of so many tokens, where such have been observed; else of any."""
        return self._kinds.get(n_tokens.bit_length(), (0.0, self.link_bytes))[1]

    def observe(
        self, n_tokens: int, step_s: float, waited_s: float, link_bytes: int, link_busy_s: float, n_steps: int = 1
    ) -> None:
        """A step of n_tokens took step_s, of which it waited_s for transfers; they kept the link busy for link_busy_s.
        These may be means of n_steps.

        Steps with long pieces of prompts say nothing about the steps that answers are made of, and are left out.
        """
        if n_tokens > MOST_DECODE_TOKENS:
            return
        a = 1.0 - (1.0 - _SMOOTHING) ** n_steps if self.n_steps else 1.0
        self._foretell(n_tokens, step_s, waited_s, link_bytes, a)
        self.n_steps += 1
        self.measured_requests += a * (self.n_requests - self.measured_requests)
        self.compute_s += a * (max(step_s - waited_s, 0.0) - self.compute_s)
        self.link_bytes += a * (link_bytes - self.link_bytes)
        if link_busy_s > 0.0 and link_bytes:
            self.link_bytes_per_s += a * (link_bytes / link_busy_s - self.link_bytes_per_s)
        if 0.1 * self.compute_s < link_busy_s < 0.8 * self.compute_s:  # beyond, it says what cannot hide at all
            self.exposed_share += a * (min(1.0, waited_s / link_busy_s) - self.exposed_share)

    def _foretell(self, n_tokens: int, step_s: float, waited_s: float, link_bytes: int, weight: float) -> None:
        """Note what was expected of such a step, and learn from what it took."""
        compute_s, expected_bytes = self._kinds.get(n_tokens.bit_length(), (self.compute_s, self.link_bytes))
        if self.n_steps and step_s > 0.0:
            expected_s = step_seconds(compute_s, expected_bytes / self.link_bytes_per_s, self.exposed_share)
            way = self.way if link_bytes else "resident"
            self.forecasts.add(StepForecast(way, n_tokens, expected_s, step_s, round(expected_bytes), int(link_bytes)))
        if n_tokens.bit_length() not in self._kinds:
            weight = 1.0
        compute_s += weight * (max(step_s - waited_s, 0.0) - compute_s)
        self._kinds[n_tokens.bit_length()] = compute_s, expected_bytes + weight * (link_bytes - expected_bytes)

    def bound_rate(self, step_s: float, link_bytes: int) -> None:
        """Steps that wait for all that comes over the link brought so much in this time: a rate that was measured when
        the link had other work is too low. Two observations must say so: in one, reports and clocks may disagree."""
        rate = link_bytes / step_s
        self.link_bytes_per_s = max(self.link_bytes_per_s, min(rate, self._least_rate))
        self._least_rate = rate


class StepClock:
    """Mean time from one step's start to the next one's, pauses left out, of the steps that a report is of."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._sum_s, self._n = 0.0, 0
        self._asked_s, self._n_asked = 0.0, 0

    def tick(self) -> None:
        """A step starts."""
        now = time.perf_counter()
        if self._last is not None:
            self._sum_s, self._n = self._sum_s + now - self._last, self._n + 1
        self._last = now

    def stop(self) -> None:
        """Nothing runs until the next step."""
        self._last = None

    def ask(self) -> None:
        """A report is asked for: it is of the steps up to now, whenever it comes."""
        self._asked_s, self._n_asked = self._asked_s + self._sum_s, self._n_asked + self._n
        self._sum_s, self._n = 0.0, 0

    def mean_s(self) -> float:
        """Of the steps that the report which has come is of; 0 where none of them has followed another."""
        mean = self._asked_s / self._n_asked if self._n_asked else 0.0
        self._asked_s, self._n_asked = 0.0, 0
        return mean
