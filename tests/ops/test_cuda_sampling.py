"""The CUDA sampler: the cases of every backend, the order of its filters, edges of every parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.common import normal
from cases.sampling import CASES, params_of

from rimuru.ops.base import SampleParams
from rimuru.ops.reference.sampling import kept_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


def sample(ops: Any, logits: np.ndarray, params: SampleParams) -> np.ndarray:
    ids = ops.empty((len(logits),), np.int32)
    ops.sample(ops.upload(logits), params, ids)
    return np.asarray(ops.download(ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Any, ops: Any) -> None:
    """Equal ids, but for draws that fall within rounding of a border between two tokens."""
    inputs = case.inputs()
    got, want = case.run(ops, inputs), case.expected(inputs)
    for name, ids in want.items():
        assert np.mean(got[name] != ids) <= 0.02, name


def drawn_support(ops: Any, logits: np.ndarray, n: int = 256, **fields: Any) -> set[int]:
    """Ids that n evenly spread draws give."""
    rows = np.tile(logits.astype(np.float32), (n, 1))
    params = params_of(n, **{"temperature": 1.0, "uniform": (np.arange(n) + 0.5) / n, **fields})
    return set(sample(ops, rows, params).tolist())


@pytest.mark.parametrize("top_k", [1, 2, 40, 999, 1000, 1001])
def test_top_k_keeps_the_lowest_ids_of_equal_logits(ops: Any, top_k: int) -> None:
    logits = np.zeros(1000, np.float32)
    assert drawn_support(ops, logits, 4096, top_k=top_k) <= set(range(min(top_k, 1000)))
    if top_k <= 40:
        assert drawn_support(ops, logits, 4096, top_k=top_k) == set(range(top_k))


@pytest.mark.parametrize("seed", range(6))
def test_filters_keep_what_the_reference_keeps(ops: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(normal(rng, 60, scale=1.5), 1)  # rounded: equal logits occur
    for top_k, top_p, min_p in ((0, 0.73, 0.0), (7, 1.0, 0.0), (20, 0.81, 0.0), (0, 1.0, 0.13), (13, 0.77, 0.21)):
        want = set(kept_tokens(logits.astype(np.float64), top_k, top_p, min_p).tolist())
        got = drawn_support(ops, logits, 4096, top_k=top_k, top_p=top_p, min_p=min_p, temperature=50.0)
        assert got == want, (top_k, top_p, min_p)


def test_order_of_the_filters(ops: Any) -> None:
    """S01: top_p before the temperature keeps tokens 0 and 1 of [3, 2, 1] at 0.8, even where T = 0.5 sharpens."""
    assert drawn_support(ops, np.array([3.0, 2.0, 1.0]), 4096, top_p=0.8, temperature=0.5) == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("top_p", [1e-9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 500, 501])
def test_cold_draws_are_greedy(ops: Any, temperature: float, top_p: float, top_k: int) -> None:
    logits = normal(np.random.default_rng(1), 16, 500, scale=3.0)
    params = params_of(16, temperature=temperature, top_p=top_p, top_k=top_k, uniform=0.999)
    assert np.array_equal(sample(ops, logits, params), logits.argmax(axis=1))


def test_hot_draws_spread(ops: Any) -> None:
    assert len(drawn_support(ops, np.array([5.0, 0.0, -5.0, 1.0]), temperature=1000.0)) == 4


def test_greedy_ties_take_the_lowest_id(ops: Any) -> None:
    logits = np.zeros((3, 151936), np.float32)
    logits[1, [70000, 99, 151935]] = 1.0
    logits[2, :] = -5.0
    assert sample(ops, logits, params_of(3)).tolist() == [0, 99, 0]


def test_repetition_penalty(ops: Any) -> None:
    """S03: positive logits are divided, negative ones multiplied, once per id."""
    logits = np.array([[2.0, 1.6, -2.0, -2.5]], np.float32)
    params = params_of(1, repetition_penalty=1.3, history=[[0, 2]])
    device = ops.upload(logits)
    ids = ops.empty((1,), np.int32)
    ops.sample(device, params, ids)
    np.testing.assert_allclose(ops.download(device), [[2.0 / 1.3, 1.6, -2.6, -2.5]], rtol=1e-6)
    assert ops.download(ids).tolist() == [1]


def test_draws_follow_the_distribution(ops: Any) -> None:
    """10,000 draws of a three-token distribution."""
    rng = np.random.default_rng(2)
    n, logits = 10000, np.array([1.0, 0.0, -1.0])
    params = params_of(n, temperature=0.7, uniform=rng.random(n))
    counts = np.bincount(sample(ops, np.tile(logits, (n, 1)).astype(np.float32), params), minlength=3)
    shares = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    assert np.abs(counts / n - shares).max() < 0.02
