"""Settings of a step that are found by timing whole steps.

Steps of about as many tokens (the same power of two) belong together. Of each kind the time of the last steps is kept;
now and then some steps run with another setting, and it stays if they took less. So a setting that loses on this
machine, or costs more by not being replayed as a graph than it saves, is not used, whatever the reason.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")

TRIAL_STEPS, SETTLING_STEPS = 12, 4
"""Steps of a trial, and how many of them do not count: the step before still ran in another way."""
GAIN = 0.03
"""What a trial must save to stay."""
FIRST_PAUSE, LONGEST_PAUSE = 48, 6144
"""Steps between two trials; twice as many after each that failed."""


@dataclass(frozen=True, slots=True)
class Trial(Generic[S]):
    """What steps took with a setting, and before with the one that they had."""

    setting: S
    was: S
    took_s: float
    was_s: float
    pays: bool


@dataclass(slots=True)
class _Kind(Generic[S]):
    """Steps of about as many tokens."""

    setting: S
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Of the last steps with `setting`."""
    trial: S | None = None
    trial_s: list[float] = field(default_factory=list)
    pause: int = FIRST_PAUSE
    n_since: int = 0
    n_failed: int = 0


class StepTuner(Generic[S]):
    """`choose` before a step, `note` when it is known what it took.

    first(n_tokens): the setting of steps that nothing is known of. other(setting, n_failed): what to try beside a
    setting, after so many trials that failed."""

    def __init__(self, first: Callable[[int], S], other: Callable[[S, int], S]) -> None:
        self._first, self._other = first, other
        self._kinds: dict[int, _Kind[S]] = {}

    def settings(self) -> dict[int, S]:
        """By the most tokens of their kind: what steps have now, trials left out."""
        return {(1 << bits) - 1: kind.setting for bits, kind in sorted(self._kinds.items())}

    def setting_of(self, n_tokens: int) -> S:
        """What such steps have now, trials left out."""
        kind = self._kinds.get(n_tokens.bit_length())
        return self._first(n_tokens) if kind is None else kind.setting

    def is_trying(self, n_tokens: int) -> bool:
        """Whether such steps run with another setting just now."""
        kind = self._kinds.get(n_tokens.bit_length())
        return kind is not None and kind.trial is not None

    def choose(self, n_tokens: int) -> S:
        """For the next step."""
        kind = self._kinds.setdefault(n_tokens.bit_length(), _Kind(self._first(n_tokens)))
        kind.n_since += 1
        if kind.trial is None and kind.n_since > kind.pause and len(kind.seconds) == kind.seconds.maxlen:
            kind.trial = self._other(kind.setting, kind.n_failed)
            kind.trial_s.clear()
        return kind.setting if kind.trial is None else kind.trial

    def hurry(self, n_tokens: int) -> None:
        """What such steps do has changed: the next trial comes soon."""
        kind = self._kinds.get(n_tokens.bit_length())
        if kind is not None:
            kind.pause = FIRST_PAUSE

    def note(self, n_tokens: int, setting: S, step_s: float) -> Trial[S] | None:
        """A step with this setting took step_s; the trial that ends with it."""
        kind = self._kinds.get(n_tokens.bit_length())
        if kind is None:
            return None
        if kind.trial is None or setting != kind.trial:
            if setting == kind.setting:
                kind.seconds.append(step_s)
            return None
        kind.trial_s.append(step_s)
        return self._judge(kind, kind.trial) if len(kind.trial_s) == TRIAL_STEPS else None

    @staticmethod
    def _judge(kind: _Kind[S], setting: S) -> Trial[S]:
        measured = kind.trial_s[SETTLING_STEPS:]
        took_s, was_s = statistics.median(measured), statistics.median(kind.seconds)
        trial = Trial(setting, kind.setting, took_s, was_s, took_s < (1.0 - GAIN) * was_s)
        if trial.pays:
            kind.setting, kind.pause = setting, FIRST_PAUSE
            kind.seconds = deque(measured, maxlen=kind.seconds.maxlen)
        else:
            kind.n_failed, kind.pause = kind.n_failed + 1, min(2 * kind.pause, LONGEST_PAUSE)
        kind.trial, kind.n_since = None, 0
        return trial
