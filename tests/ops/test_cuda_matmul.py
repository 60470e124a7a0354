"""`linear` on a GPU: every case, and results that do not depend on the batch where they must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import matmul as cases
from cases.common import Case

from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS
from rimuru.ops.cuda.matmul import MAX_GEMV_TOKENS, linear_strip, takes_strips

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    from rimuru.ops.cuda import CudaOps

    yield CudaOps(deterministic=request.param)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(ops: Any, case: Case) -> None:
    case.check(ops)


FINISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared expert": {"add": True, "scale": 0.22, "row_scale": True},
    "residual": {"add": True, "scale": 0.22, "bias": True},
}


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("n_out", [200, 1100])
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q5_0", "mxfp4", "iq2_s", "nvfp4", "f16", "bf16", "f32"])
def test_rows_do_not_depend_on_the_batch(ops: Any, name: str, n_out: int, finish: str) -> None:
    """Every tile of the integer kernel, with one row and two rows a lane: more than 1024 rows, more than 64 tokens."""
    rng = np.random.default_rng(5)
    fmt = BY_NAME[name]
    # Without the deterministic switch only up to the batch where tensor cores take over.
    n_tokens = 130 if ops.deterministic else MAX_GEMV_TOKENS
    wanted = FINISHES[finish]
    weight = ops.weight(cases.random_rows(rng, fmt, n_out, 768), fmt, 768)
    x = rng.standard_normal((n_tokens, 768)).astype(np.float32)
    before = rng.standard_normal((n_tokens, n_out)).astype(np.float32)
    factors = rng.uniform(0.1, 1.0, n_tokens).astype(np.float32)
    bias = ops.upload(rng.standard_normal(n_out).astype(np.float32)) if wanted.get("bias") else None

    def rows(chosen: np.ndarray) -> np.ndarray:
        out = ops.upload(before[chosen])
        row_scale = ops.upload(factors[chosen]) if wanted.get("row_scale") else None
        act = cases.filled_act(ops, x[chosen])
        ops.linear(act, [weight], [out], [bias], wanted.get("add", False), wanted.get("scale", 1.0), row_scale)
        return np.asarray(ops.download(out))

    whole = rows(np.arange(n_tokens))
    for n in (1, 2, 3, 5, 8, 9, 64, 65, n_tokens):
        chosen = rng.permutation(n_tokens)[:n]
        assert np.array_equal(rows(chosen), whole[chosen]), n


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 130])
def test_every_switch_of_kernel(ops: Any, n_tokens: int) -> None:
    cases.linear_case(f"switch T={n_tokens}", ["q4_k", "q6_k"], [160, 70], 512, n_tokens, full=True).check(ops)


@pytest.mark.parametrize("n_tokens", [5, 8, 9, 16, 17])
def test_strips_of_many_rows(ops: Any, n_tokens: int) -> None:
    """So many that activations go through shared memory, in two parts of K; two types in one launch."""
    assert linear_strip(10301, 2304, n_tokens)[3]
    cases.linear_case(f"many rows T={n_tokens}", ["q4_k", "q6_k"], [8100, 2201], 2304, n_tokens, full=True).check(ops)


@pytest.mark.parametrize("n_tokens", [7, 16])
@pytest.mark.parametrize("name", [fmt.name for fmt in ENGINE_FORMATS if fmt.name != "f32"])
def test_strips_whose_warps_share_rows(ops: Any, name: str, n_tokens: int) -> None:
    """8 warps or 16, of which some have a step more than others: every type, for weights are asked for a step ahead."""
    for width in (2560, 4352):
        assert linear_strip(40, width, n_tokens)[1:] == (1, 16 if n_tokens <= 8 and width == 4352 else 8, False)
        cases.linear_case(f"{name} 40x{width} T={n_tokens}", [name], [40], width, n_tokens, full=True).check(ops)


@pytest.mark.parametrize("name", [fmt.name for fmt in ENGINE_FORMATS])
def test_tiles(ops: Any, name: str) -> None:
    """So many rows that 130 tokens go to the tiles, which decode weights into shared memory: every type."""
    assert not takes_strips(130, 2761)
    cases.linear_case(f"tiles of {name}", [name], [2761], 256, 130, full=True).check(ops)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q2_k", "q4_k", "q6_k", "iq3_s"])
def test_widths(ops: Any, name: str) -> None:
    """Q01: every width that whole blocks give, with rows and tokens that no tile divides."""
    widths = (32, 64, 96, 288, 320, 1408, 1440) if BY_NAME[name].block_elements == 32 else (256, 512, 768, 2816)
    for width in widths:
        for n_rows, n_tokens in ((1, 1), (3, 5), (5, 9), (127, 40)):
            label = f"width {width} {name} {n_rows} T={n_tokens}"
            tolerance = 0.08 if n_rows == 127 else 0.3  # of activations in 8 bits; few outputs may all be small
            cases.linear_case(label, [name], [n_rows], width, n_tokens, tolerance=tolerance).check(ops)
