"""How fast prompts run, from the times between the plans of steps; and so what running a request again takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from rimuru.base.units import ceil_div
from rimuru.plan import StepPlan


class PrefillRate:
    """Tokens of prompts per second, from the time between the plans of two steps of which the first was mostly prompt.

    Callers may pause between steps, which only ever makes a step look slow: faster ones count for more.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.tokens_per_s = 0.0
        """0 until something was measured."""
        self.step_s = 0.0
        """Of steps without prompts."""
        self._started = 0.0
        self._n_tokens = 0
        self._is_decode = False

    def begin(self, plan: StepPlan) -> None:
        """A step was planned and will run now."""
        n_prompt = sum(item.n_tokens for item in plan.items if item.n_tokens > 1)
        self._n_tokens = plan.n_tokens if 2 * n_prompt > plan.n_tokens else 0
        self._is_decode = n_prompt == 0 and bool(plan.items)
        self._started = self._clock()

    def end(self, is_busy: bool) -> None:
        """The next step is to be planned. is_busy: there was no time without work in between."""
        took_s = max(self._clock() - self._started, 1e-6)
        if self._n_tokens and is_busy:
            rate = self._n_tokens / took_s
            weight = 1.0 if not self.tokens_per_s else 0.5 if rate > self.tokens_per_s else 0.1
            self.tokens_per_s += weight * (rate - self.tokens_per_s)
        elif self._is_decode and is_busy:
            weight = 1.0 if not self.step_s else 0.5 if took_s < self.step_s else 0.1
            self.step_s += weight * (took_s - self.step_s)
        self._n_tokens, self._is_decode = 0, False

    def added_seconds(self, n_tokens: int, n_step_tokens: int) -> float:
        """What a prompt in pieces of n_step_tokens adds to the steps that others make: these read the weights anyway,
        so only what its tokens take beyond that. 0 until a prompt was measured."""
        if self.tokens_per_s <= 0.0:
            return 0.0
        return max(0.0, n_tokens / self.tokens_per_s - ceil_div(n_tokens, n_step_tokens) * self.step_s)
