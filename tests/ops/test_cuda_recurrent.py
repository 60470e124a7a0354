"""CUDA recurrent layers: the cases of every backend, pieces of a prompt, padding rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.common import Case, compare
from cases.recurrent import CASES, Tokens, delta_case, mamba1_case, mamba2_case

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.ops.cuda.graphs import pad_decode

pytestmark = pytest.mark.gpu

LONG = Tokens([300, 17, 1], [300, 40, 5])
MORE = (
    delta_case("long prompt", LONG, DeltaNetSpec(4, 8, 128, 4, "tiled")),
    mamba2_case("long prompt", LONG, Mamba2Spec(256, 128, 4, 1, 4)),
    mamba1_case("long prompt", LONG, Mamba1Spec(200, 16, 8, 4)),
)


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


@pytest.mark.parametrize("case", (*CASES, *MORE), ids=lambda case: case.name)
def test_case(case: Case, ops: Any) -> None:
    inputs = case.inputs()
    compare(case.run(ops, inputs), case.expected(inputs), max(5e-5, 3 * case.tolerance))


@pytest.mark.parametrize("case", [case for case in CASES if "decode" in case.name], ids=lambda case: case.name)
def test_padding_rows(case: Case, ops: Any) -> None:
    """Sequences without pages leave outputs and states of the others as they are."""
    inputs = case.inputs()
    want = case.run(ops, inputs)
    batch = inputs["batch"]
    n, more = batch.n_seqs, 3
    padded = {
        name: np.concatenate([value, np.full((more, *value.shape[1:]), np.nan, value.dtype)])
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape[:1] == (n,) and value.ndim == 2
        else value
        for name, value in inputs.items()
    }
    padded["batch"] = pad_decode(batch, n + more, max(1, batch.kv_pages.shape[2]))
    got = case.run(ops, padded)
    for name, value in want.items():
        rows = got[name][:n] if value.shape[0] == n and got[name].shape[0] == n + more else got[name]
        assert np.array_equal(rows[: len(value)], value), name
