"""What a room asks of a store of experts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rimuru.experts.residency import Residency
from rimuru.memory.adjuster import StepRates
from rimuru.memory.decisions import FillLog
from rimuru.memory.views import ExpertView


class ElasticStore(Protocol):
    """See experts/residents.py."""

    @property
    def view(self) -> ExpertView: ...
    @property
    def residency(self) -> Residency: ...
    @property
    def rates(self) -> StepRates: ...
    @property
    def fills(self) -> FillLog: ...
    def shrink(self, n_experts: int) -> list[tuple[int, int]]: ...
    def expand(self, n_experts: int) -> list[tuple[int, int]]: ...
    @property
    def expands_freely(self) -> bool: ...
    def finish_reads(self) -> None: ...
    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None: ...
