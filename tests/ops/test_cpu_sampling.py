"""The CPU's sampler: against the sorting reference, known values of the fault list, extreme parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.common import Case
from cases.sampling import CASES, params_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.ops.base import Ops
from rimuru.ops.cpu import CpuOps
from rimuru.ops.reference import ReferenceOps
from rimuru.ops.reference.sampling import kept_tokens, penalised

BACKENDS = (CpuOps(), ReferenceOps())


def _sample(ops: Ops, logits: Any, **fields: Any) -> np.ndarray:
    rows = np.atleast_2d(np.asarray(logits, np.float32))
    ids = np.full(len(rows), -1, np.int32)
    ops.sample(rows, params_of(len(rows), **fields), ids)
    return ids


def _shares(ops: Ops, logits: list[float], n_draws: int = 10_000, **fields: Any) -> np.ndarray:
    """How often each token is drawn, over evenly spread uniforms."""
    rows = np.tile(np.asarray(logits, np.float32), (n_draws, 1))
    uniform = (np.arange(n_draws) + 0.5) / n_draws
    return np.bincount(_sample(ops, rows, uniform=uniform, **fields), minlength=len(logits)) / n_draws


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_reference(case: Case) -> None:
    case.check(BACKENDS[0])


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
def test_filters_come_before_the_temperature(ops: Ops) -> None:
    """Fault S01: top_p 0.8 of logits 3, 2, 1 keeps two tokens, whatever the temperature does to them afterwards."""
    shares = _shares(ops, [3.0, 2.0, 1.0], temperature=0.5, top_p=0.8)
    first = 1 / (1 + np.exp(-2.0))
    assert np.allclose(shares, [first, 1 - first, 0.0], atol=2e-4)
    flat = _shares(ops, [3.0, 2.0, 1.0], temperature=1.0)
    assert np.allclose(flat, [0.6652, 0.2447, 0.0900], atol=2e-4)


def test_repetition_penalty_values() -> None:
    """Fault S03: positive logits are divided, negative ones multiplied, once per distinct token."""
    params = params_of(1, repetition_penalty=1.3, history=[[0, 1]])
    assert np.allclose(penalised(np.array([2.0, -2.0, 1.0], np.float32), params, 0), [2 / 1.3, -2.6, 1.0], atol=1e-6)


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
def test_penalties_change_the_choice(ops: Ops) -> None:
    logits = [2.0, 1.9, -1.0, -1.1]
    assert _sample(ops, logits, repetition_penalty=1.3, history=[[0]]).tolist() == [1]
    assert _sample(ops, [-9.0, -9.0, -1.0, -1.1], repetition_penalty=1.3, history=[[2]]).tolist() == [3]
    assert _sample(ops, logits, presence_penalty=0.2, output_ids=[[0]], output_counts=[[3]]).tolist() == [1]
    assert _sample(ops, logits, frequency_penalty=0.05, output_ids=[[0]], output_counts=[[1]]).tolist() == [0]
    assert _sample(ops, logits, frequency_penalty=0.05, output_ids=[[0]], output_counts=[[3]]).tolist() == [1]
    assert _sample(ops, logits, bias_ids=[[3]], bias_values=[[100.0]]).tolist() == [3]
    # the prompt's tokens count for the repetition penalty only
    assert _sample(ops, logits, presence_penalty=5.0, history=[[0]]).tolist() == [0]


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 6, 7])
@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-7, 1e-4, 2.0, 1e6])
def test_extreme_parameters(ops: Ops, temperature: float, top_k: int, top_p: float) -> None:
    """Fault S05: no parameter divides by zero or overflows; equal logits go to the lowest id when nothing is drawn."""
    logits = [1.0, 4.0, -2.0, 4.0, 0.5, 3.9]
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = {int(_sample(ops, logits, uniform=u, **fields)[0]) for u in (0.0, 0.3, 0.6, 0.9999999)}
    if temperature == 0.0 or top_k == 1 or top_p < 1e-3:
        assert drawn == {1}
    elif temperature < 1e-3:
        assert drawn <= {1, 3}
    elif temperature > 1e3 and top_p == 1.0:
        assert len(drawn) == 4
    else:
        assert drawn <= set(range(6))


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
def test_a_large_temperature_reaches_every_token(ops: Ops) -> None:
    shares = _shares(ops, [5.0, 0.0, -5.0, 1.0], temperature=1e6)
    assert np.allclose(shares, 0.25, atol=2e-4)


@pytest.mark.parametrize("ops", BACKENDS, ids=lambda ops: ops.name)
def test_banned_tokens_are_never_drawn(ops: Ops) -> None:
    shares = _shares(ops, [1.0, float("-inf"), 1.0], temperature=1.0, top_k=3)
    assert np.allclose(shares, [0.5, 0.0, 0.5], atol=2e-4)


def test_logits_are_left_as_they_are() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    before = logits.copy()
    ids = np.empty(3, np.int32)
    fields = {"bias_ids": [[1], [2], []], "bias_values": [[1.0], [2.0], []], "repetition_penalty": 1.5}
    BACKENDS[0].sample(logits, params_of(3, temperature=1.0, history=[[3]] * 3, **fields), ids)
    assert np.array_equal(logits, before)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
    st.integers(0, 61),
    st.sampled_from((0.05, 0.3, 0.7, 0.95, 1.0)),
    st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    st.floats(0.0, 0.99),
)
def test_draws_stay_in_the_kept_prefix(
    n_vocab: int, seed: int, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    # Few different values, so that ties are common; not on the filters' own borders.
    logits = np.random.default_rng(seed).integers(-8, 8, n_vocab).astype(np.float32) * np.float32(0.37)
    kept = kept_tokens(logits.astype(np.float64), top_k, top_p, min_p)
    fields = {"temperature": 0.9, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = int(_sample(BACKENDS[0], logits, uniform=u, **fields)[0])
    assert got in kept
    if min_p == 1.0:
        assert logits[got] == logits.max()
    # the last kept token is reachable: the prefix is not too short
    assert int(_sample(BACKENDS[0], logits, uniform=1 - 2.0**-24, **{**fields, "temperature": 1e6})[0]) == kept.max()
