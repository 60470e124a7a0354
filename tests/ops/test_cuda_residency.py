"""The residency step on a GPU: who comes and goes, every byte that is brought, and the host's commands."""

from __future__ import annotations

from typing import Any

import pytest
from cases import residency as cases
from cases.common import Case

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(ops: Any, case: Case) -> None:
    case.check(ops)
