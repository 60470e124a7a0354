"""How large a share of the missed experts the CPU computes in a step, found by timing whole steps (step_tuner.py).

It is zero where the CPU loses: where a step has little to bring over the link, or costs more by not being replayed as a
graph than is saved.
"""

from __future__ import annotations

import logging

from rimuru.experts.step_tuner import StepTuner
from rimuru.memory.adjuster import MOST_DECODE_TOKENS, ForecastLog, StepForecast

log = logging.getLogger(__name__)

FIRST_SHARE, SHARE_STEP, MOST_SHARE = 0.25, 0.125, 0.75
LEAST_LINK_S = 4e-3
"""With less to bring over the link in a step, sharing cannot pay for what it costs itself."""


def other_share(share: float, n_failed: int) -> float:
    """What to try beside a share: more, and after each trial that failed the other direction."""
    if share == 0.0:
        return FIRST_SHARE
    return max(0.0, share + (SHARE_STEP if n_failed % 2 == 0 and share < MOST_SHARE else -SHARE_STEP))


class ShareTuner:
    """`choose` before a step, `note` when it is known what it took."""

    def __init__(self, forecasts: ForecastLog) -> None:
        self.forecasts = forecasts
        self._tuner: StepTuner[float] = StepTuner(lambda n_tokens: 0.0, other_share)

    def share_of(self, n_tokens: int) -> float:
        """The share that such steps have now, trials left out."""
        return self._tuner.setting_of(n_tokens)

    def choose(self, n_tokens: int, link_s: float) -> float:
        """For the next step, which is expected to keep the link busy for link_s."""
        if n_tokens > MOST_DECODE_TOKENS or link_s < LEAST_LINK_S:
            return 0.0
        return self._tuner.choose(n_tokens)

    def note(self, n_tokens: int, share: float, step_s: float, link_s: float, link_bytes: int) -> None:
        """A step with this share took step_s; steps without one bring link_bytes in link_s."""
        trial = self._tuner.note(n_tokens, share, step_s)
        if trial is None:
            return
        hoped_s = max(0.0, trial.was_s - (trial.setting - trial.was) * link_s)
        n_bytes = int(link_bytes * (1.0 - trial.setting))
        self.forecasts.add(StepForecast("cpu", n_tokens, hoped_s, trial.took_s, n_bytes, n_bytes))
        log.info(
            "steps of %d tokens: %.1f ms where the CPU computes %.0f%% of the missed experts, %.1f ms with %.0f%%: %s",
            n_tokens, 1e3 * trial.took_s, 100 * trial.setting, 1e3 * trial.was_s, 100 * trial.was,
            "kept" if trial.pays else "dropped",
        )  # fmt: skip
