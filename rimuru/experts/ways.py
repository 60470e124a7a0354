"""How a step's missed experts come to those who compute: one way for a whole step, chosen by what steps take.

    before    brought into places and loading buffers, then all experts are computed
    beside    those that are there are computed while the others come, which follow in a second turn
    in place  only who gets a place is brought; the others are read where they lie in host memory
    ahead     what the next layer will likely miss comes while this one computes; besides, as before or beside

The first choice is what was best on the test card (tools/LOG.md). From then on steps of about as many tokens are timed,
and now and then another way is tried (step_tuner.py). Every trial is logged with what was expected of it: by the link's
rate, and once two ways have been compared, by that comparison. Results are the same in every way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rimuru.experts.step_tuner import StepTuner
from rimuru.memory.adjuster import HIDDEN_SHARE, MOST_DECODE_TOKENS, ForecastLog, StepForecast

if TYPE_CHECKING:
    from rimuru.experts.cpu_experts import CpuExperts
    from rimuru.experts.device_store import DeviceExpertStore

log = logging.getLogger(__name__)

ASIDE_TOKENS = 5
"""From so many tokens on, the first choice is to fetch beside computing. Fewer have few to compute meanwhile: not worth
the launches of a second turn."""
LEAST_LINK_S = 2e-4
"""With less to bring over the link in a step, no way is worth a trial."""
OTHER_LINK = 2.0
"""Where steps bring so many times more or less than at their last trial, what it found may no longer be true."""
LONG_PAUSE_S = 2.0
"""Between two steps: nothing ran meanwhile, and the time says nothing."""


def ways_of(by_device: bool, in_place: bool, foresees: bool) -> tuple[str, ...]:
    """The ways that a DeviceExpertStore has, the plainest one first. in_place: it is one of them, and another than
    `before`; foresees: the user wants forecasts tried."""
    if not by_device:
        return ("in place",)
    return "before", "beside", *(("in place",) if in_place else ()), *(("ahead",) if foresees else ())


def is_beside(way: str, n_tokens: int) -> bool:
    """Whether a layer's missed experts come in a turn of their own."""
    return way == "beside" or (way == "ahead" and n_tokens >= ASIDE_TOKENS)


def first_way(n_tokens: int, ways: Sequence[str]) -> str:
    """Of steps that nothing is known of. Forecasts are only among the ways where somebody asked for them."""
    if "ahead" in ways:
        return "ahead"
    return "beside" if n_tokens >= ASIDE_TOKENS and "beside" in ways else ways[0]


def launched_as(way: str) -> str:
    """The way whose launches a step has: where nothing else comes than who gets a place, they are the same."""
    return "before" if way == "in place" else way


def hoped_s(way: str, was: str, was_s: float, link_s: float) -> float:
    """What a step should take in another way, by what it takes in one (was_s) and keeps the link busy."""
    hidden_s = min(link_s, HIDDEN_SHARE * max(0.0, was_s - link_s))
    hides = {"before": 0.0, "in place": 0.0, "beside": hidden_s, "ahead": hidden_s}
    return max(0.0, was_s + hides[was] - hides[way])


class WayTuner:
    """`choose` before a step, `note` when it is known what it took. ways: those that there are, the plainest first."""

    def __init__(self, ways: Sequence[str], forecasts: ForecastLog) -> None:
        self.ways, self.forecasts = tuple(ways), forecasts
        self._tuner: StepTuner[str] = StepTuner(lambda n_tokens: first_way(n_tokens, self.ways), self._other)
        self._ratios: dict[tuple[int, str, str], float] = {}
        """Time of a kind's steps in one way, against another, when they were compared last."""
        self._tried_at: dict[int, float] = {}
        """Link seconds of a kind's steps at the last trial."""

    def _other(self, way: str, n_failed: int) -> str:
        others = [other for other in self.ways if other != way]
        return others[n_failed % len(others)]

    def is_trying(self, n_tokens: int) -> bool:
        """Whether such steps run in another way than they did, to time it."""
        return self._tuner.is_trying(n_tokens)

    def choose(self, n_tokens: int, link_s: float) -> str:
        """For the next step, which is expected to keep the link busy for link_s."""
        if n_tokens > MOST_DECODE_TOKENS:  # pieces of prompts are too unlike each other to be compared
            return first_way(n_tokens, self.ways)
        if link_s < LEAST_LINK_S or len(self.ways) < 2:
            return self._tuner.setting_of(n_tokens)
        tried_at = self._tried_at.get(n_tokens.bit_length(), link_s)
        if not tried_at / OTHER_LINK < link_s < tried_at * OTHER_LINK:
            self._tuner.hurry(n_tokens)
        return self._tuner.choose(n_tokens)

    def note(self, n_tokens: int, way: str, step_s: float, link_s: float, link_bytes: int) -> None:
        """A step in this way took step_s; such steps bring link_bytes in link_s."""
        trial = self._tuner.note(n_tokens, way, step_s)
        if trial is None:
            return
        self._tried_at[n_tokens.bit_length()] = link_s
        pair = n_tokens.bit_length(), trial.was, trial.setting
        ratio = self._ratios.get(pair)
        expected_s = hoped_s(way, trial.was, trial.was_s, link_s) if ratio is None else ratio * trial.was_s
        self._ratios[pair] = trial.took_s / trial.was_s
        self._ratios[pair[0], way, trial.was] = trial.was_s / trial.took_s
        self.forecasts.add(StepForecast(way, n_tokens, expected_s, trial.took_s, link_bytes, link_bytes))
        log.info(
            "steps of %d tokens: %.2f ms with missed experts %s (%.2f expected), %.2f ms %s: %s",
            n_tokens, 1e3 * trial.took_s, way, 1e3 * expected_s, 1e3 * trial.was_s, trial.was,
            "kept" if trial.pays else "dropped",
        )  # fmt: skip

    def snapshot(self) -> dict[int, str]:
        """By the most tokens of such a step: the way that it has now."""
        return self._tuner.settings()


class StepWays:
    """Chooses for the steps of a DeviceExpertStore, and times them: `begin` before each."""

    def __init__(self, store: DeviceExpertStore) -> None:
        self.store = store
        self.cpu: CpuExperts | None = None
        """Computes a share of what is missed, in steps where that pays."""
        self.tuner = WayTuner(store.ways, store.rates.forecasts)
        self._began, self._n_tokens = 0.0, 0

    def begin(self, n_tokens: int, is_timed: bool = True) -> str:
        """A step of n_tokens starts. Returns what distinguishes its launches from those of other steps: "resident" (all
        experts are), "before", "beside", "ahead"; "cpu" where the host has a part in every layer."""
        now = time.perf_counter()
        if is_timed and 0.0 < now - self._began < LONG_PAUSE_S and n_tokens == self._n_tokens:
            self._note(n_tokens, now - self._began)
        self._began, self._n_tokens = now, n_tokens if is_timed else -1
        store, share = self.store, 0.0
        if not store.is_watching:
            self._run("resident", 0.0)
            return "resident"
        link_s = store.rates.link_bytes_of(n_tokens) / store.rates.link_bytes_per_s
        if self.cpu is not None and is_timed and n_tokens >= ASIDE_TOKENS and not self.tuner.is_trying(n_tokens):
            share = self.cpu.tuner.choose(n_tokens, link_s)
        # While the CPU's share is tried out, everything else stays as it is.
        way = self.tuner.choose(n_tokens, link_s if share == 0.0 and is_timed else 0.0)
        self._run(way, share)
        return "cpu" if share > 0.0 else launched_as(way)

    def _run(self, way: str, share: float) -> None:
        self.store.use_way(way)
        if self.cpu is not None:
            self.cpu.share = share

    def _note(self, n_tokens: int, step_s: float) -> None:
        """What the last step took."""
        rates, way = self.store.rates, self.store.way
        if way == "resident":
            return
        link_bytes, share = rates.link_bytes_of(n_tokens), 0.0
        link_s = link_bytes / rates.link_bytes_per_s
        if self.cpu is not None:
            share = self.cpu.share
            self.cpu.tuner.note(n_tokens, share, step_s, link_s, int(link_bytes))
        if share == 0.0:
            self.tuner.note(n_tokens, way, step_s, link_s, int(link_bytes))

    def report(self) -> dict[str, Any]:
        """The way of steps of up to so many tokens, as found until now."""
        return {str(n_tokens): way for n_tokens, way in self.tuner.snapshot().items()}
