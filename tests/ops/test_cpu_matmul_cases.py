"""The cases that all backends share, on the CPU backend."""

from __future__ import annotations

import pytest
from cases import matmul, moe
from cases.common import Case

from rimuru.ops.cpu import CpuOps


@pytest.mark.parametrize("case", matmul.EDGE_CASES, ids=lambda case: case.name)
def test_linear(case: Case) -> None:
    case.check(CpuOps())


@pytest.mark.parametrize("case", moe.EDGE_CASES, ids=lambda case: case.name)
def test_experts(case: Case) -> None:
    case.check(CpuOps())
