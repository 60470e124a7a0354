"""`linear` on a GPU: every case, and results that do not depend on the batch where they must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import matmul as cases
from cases.common import Case

from rimuru.formats.quants import BY_NAME
from rimuru.ops.cuda.matmul import MAX_GEMV_TOKENS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    from rimuru.ops.cuda import CudaOps

    yield CudaOps(deterministic=request.param)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(ops: Any, case: Case) -> None:
    case.check(ops)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q5_0", "mxfp4", "f16"])
def test_rows_do_not_depend_on_the_batch(ops: Any, name: str) -> None:
    rng = np.random.default_rng(5)
    fmt = BY_NAME[name]
    weight = ops.weight(cases.random_rows(rng, fmt, 200, 768), fmt, 768)
    # Without the deterministic switch only up to the batch where tensor cores take over.
    n_tokens = 40 if ops.deterministic else MAX_GEMV_TOKENS
    x = rng.standard_normal((n_tokens, 768)).astype(np.float32)

    def rows(chosen: np.ndarray) -> np.ndarray:
        out = ops.upload(np.zeros((len(chosen), 200), np.float32))
        ops.linear(cases.filled_act(ops, x[chosen]), [weight], [out])
        return np.asarray(ops.download(out))

    whole = rows(np.arange(n_tokens))
    for n in (1, 2, 3, n_tokens):
        chosen = rng.permutation(n_tokens)[:n]
        assert np.array_equal(rows(chosen), whole[chosen])


@pytest.mark.parametrize("n_tokens", [1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 130])
def test_every_switch_of_kernel(ops: Any, n_tokens: int) -> None:
    cases.linear_case(f"switch T={n_tokens}", ["q4_k", "q6_k"], [160, 70], 512, n_tokens, full=True).check(ops)
