"""The cases of the residency step on the host: its launchers and kernels against the NumPy twin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases import residency as cases
from cases.common import Case

from rimuru.ops.cuda import residency
from rimuru.ops.host import HostCopier
from rimuru.ops.places import BUFFERED, FILLS, LayerPlaces
from rimuru.ops.reference import ReferenceOps

pytestmark = [
    pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine"),
    pytest.mark.usefixtures("on_the_host"),
]


class EmulatedFetches:
    """The verbs of the residency step by their launchers; what runs beside others on a device runs at once here."""

    upload, copier = staticmethod(emulate.upload), staticmethod(HostCopier)
    fetch_experts, set_places = staticmethod(residency.fetch_experts), staticmethod(residency.set_places)

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def fetch_aside(self, ids: np.ndarray, positions: np.ndarray, places: LayerPlaces) -> None:
        residency.plan_fetch(ids, positions, places)
        residency.bring(places)

    def fetch_ahead(self, ids: np.ndarray, positions: np.ndarray, places: LayerPlaces) -> None:
        residency.plan_fetch(ids, positions, places, foretells=True)
        residency.bring(places)

    def join_fetch(self) -> None: ...


@pytest.mark.parametrize("case", cases.EDGE_CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(EmulatedFetches())  # type: ignore[arg-type]


class KeepingCopier(HostCopier):
    """Its memory lives as long as it does, as that of a device's copier."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[np.ndarray] = []

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        self.kept.append(super().alloc_host(n_bytes))
        return self.kept[-1]


class Recording(ReferenceOps):
    """Keeps what the verbs of a case were called with, and the memory behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.places: Any = None
        self.kept: list[Any] = []

    def upload(self, host: np.ndarray) -> np.ndarray:
        self.kept.append(super().upload(host))
        return self.kept[-1]

    def copier(self) -> HostCopier:
        self.kept.append(KeepingCopier())
        return self.kept[-1]

    def fetch_experts(self, ids: np.ndarray, positions: np.ndarray, places: LayerPlaces) -> None:  # type: ignore[override]
        self.places = places
        self.calls.append(lambda: ReferenceOps.fetch_experts(ids, positions, places))
        self.calls[-1]()

    fetch_aside = fetch_experts  # type: ignore[assignment]


@pytest.mark.parametrize("name", cases.MODEL_FETCHES)
def test_repeated_calls_bring_as_much_every_time(name: str) -> None:
    """As many experts cross as the bytes of a timed case are counted for, however often a benchmark calls it."""
    shape, verb = cases.MODEL_FETCHES[name]
    small, ops = replace(shape, page_bytes=16), Recording()
    case = cases.fetch_case(name, small, verb)
    case.run(ops, case.inputs())
    for _ in range(3):
        before = ops.places.totals[[FILLS, BUFFERED]].sum()
        for call in ops.calls:
            call()
        n_brought = int(ops.places.totals[[FILLS, BUFFERED]].sum() - before)
        assert n_brought == len(ops.calls) * shape.comers
    if case.bytes_over == "link":
        assert case.bytes_moved({}) == n_brought * shape.layout.useful_bytes and n_brought > 0
    else:
        assert n_brought == 0
