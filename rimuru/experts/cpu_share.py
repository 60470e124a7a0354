"""How large a share of the missed experts the CPU computes in a step, found by timing whole steps.

Steps of about as many tokens (the same power of two) belong together. Of each kind the time of the last steps is kept;
now and then some steps run with another share, and it stays if they took less. So the share is zero where the CPU
loses: where a step has little to bring over the link, or costs more by not being replayed as a graph than is saved.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass, field

from rimuru.memory.adjuster import MOST_DECODE_TOKENS, ForecastLog, StepForecast

log = logging.getLogger(__name__)

FIRST_SHARE, SHARE_STEP, MOST_SHARE = 0.25, 0.125, 0.75
TRIAL_STEPS, SETTLING_STEPS = 12, 4
"""Steps of a trial, and how many of them do not count: the step before still ran in another way."""
GAIN = 0.03
"""What a trial must save to stay."""
FIRST_PAUSE, LONGEST_PAUSE = 48, 6144
"""Steps between two trials; twice as many after each that failed."""
LEAST_LINK_S = 4e-3
"""With less to bring over the link in a step, sharing cannot pay for what it costs itself."""


@dataclass(slots=True)
class _Kind:
    """Steps of about as many tokens."""

    share: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Of the last steps with `share`."""
    trial: float | None = None
    trial_s: list[float] = field(default_factory=list)
    pause: int = FIRST_PAUSE
    n_since: int = 0
    grows: bool = True


class ShareTuner:
    """`choose` before a step, `note` when it is known what it took."""

    def __init__(self, forecasts: ForecastLog) -> None:
        self.forecasts = forecasts
        self._kinds: dict[int, _Kind] = {}

    def share_of(self, n_tokens: int) -> float:
        """The share that such steps have now, trials left out."""
        kind = self._kinds.get(n_tokens.bit_length())
        return 0.0 if kind is None else kind.share

    def choose(self, n_tokens: int, link_s: float) -> float:
        """For the next step, which is expected to keep the link busy for link_s."""
        if n_tokens > MOST_DECODE_TOKENS or link_s < LEAST_LINK_S:
            return 0.0
        kind = self._kinds.setdefault(n_tokens.bit_length(), _Kind())
        kind.n_since += 1
        if kind.trial is None and kind.n_since > kind.pause and len(kind.seconds) == kind.seconds.maxlen:
            kind.trial = self._next(kind)
            kind.trial_s.clear()
        return kind.share if kind.trial is None else kind.trial

    @staticmethod
    def _next(kind: _Kind) -> float:
        if kind.share == 0.0:
            return FIRST_SHARE
        share = kind.share + (SHARE_STEP if kind.grows and kind.share < MOST_SHARE else -SHARE_STEP)
        return max(0.0, share)

    def note(self, n_tokens: int, share: float, step_s: float, link_s: float, link_bytes: int) -> None:
        """A step with this share took step_s; steps without one bring link_bytes in link_s."""
        kind = self._kinds.get(n_tokens.bit_length())
        if kind is None:
            return
        if kind.trial is None or share != kind.trial:
            if share == kind.share:
                kind.seconds.append(step_s)
            return
        kind.trial_s.append(step_s)
        if len(kind.trial_s) == TRIAL_STEPS:
            self._judge(kind, n_tokens, link_s, link_bytes)

    def _judge(self, kind: _Kind, n_tokens: int, link_s: float, link_bytes: int) -> None:
        assert kind.trial is not None
        measured = kind.trial_s[SETTLING_STEPS:]
        took_s, was_s = statistics.median(measured), statistics.median(kind.seconds)
        hoped_s = max(0.0, was_s - (kind.trial - kind.share) * link_s)
        n_bytes = int(link_bytes * (1.0 - kind.trial))
        self.forecasts.add(StepForecast("cpu", n_tokens, hoped_s, took_s, n_bytes, n_bytes))
        pays = took_s < (1.0 - GAIN) * was_s
        log.info(
            "steps of %d tokens: %.1f ms where the CPU computes %.0f%% of the missed experts, %.1f ms with %.0f%%: %s",
            n_tokens, 1e3 * took_s, 100 * kind.trial, 1e3 * was_s, 100 * kind.share, "kept" if pays else "dropped",
        )  # fmt: skip
        if pays:
            kind.share, kind.pause = kind.trial, FIRST_PAUSE
            kind.seconds = deque(measured, maxlen=kind.seconds.maxlen)
        else:
            kind.grows, kind.pause = not kind.grows, min(2 * kind.pause, LONGEST_PAUSE)
        kind.trial, kind.n_since = None, 0
