"""StepPlan: the scheduler's decision for one step; whatever runs the step only carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field

from rimuru.request import Sequence


@dataclass(frozen=True, slots=True)
class PlannedTokens:
    """`n_tokens` tokens of one sequence, from its n_cached mark on. `samples`: they end the known tokens."""

    sequence: Sequence
    n_tokens: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """Who runs in this step and how far; preempted and failed sequences are reported, not run."""

    items: list[PlannedTokens] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(item.n_tokens for item in self.items)
