"""The CPU's recurrent verbs: against the reference in float64, and their independence of pieces, batch and threads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases.common import Case, Inputs, Outputs
from cases.recurrent import CASES, LONG, MIXED, Tokens, conv_case, delta_case, mamba1_case, mamba2_case

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.ops.cpu import CpuOps
from rimuru.ops.cpu.simd_launch import set_threads, threads

OPS = CpuOps()
PER_TOKEN = ("u", "qkv", "beta", "alpha", "xbc", "dt", "x", "b", "c")


def _families(tokens: Tokens) -> list[Case]:
    return [
        conv_case("", tokens, 300, 4, True, True),
        delta_case("", tokens, DeltaNetSpec(2, 4, 32, 4, "tiled")),
        mamba2_case("", tokens, Mamba2Spec(96, 24, 4, 2, 4)),
        mamba1_case("", tokens, Mamba1Spec(70, 16, 8, 4)),
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_reference(case: Case) -> None:
    case.check(OPS)


def _take(case: Case, inputs: Inputs, seq: int, first: int, last: int, fresh: bool, pool: np.ndarray) -> Outputs:
    """Run tokens first .. last - 1 of one sequence of a batch, on a pool that is changed in place."""
    batch = inputs["batch"]
    start = int(batch.query_start[seq])
    rows = slice(start + first, start + last)
    part = dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        seq_of_token=np.zeros(last - first, np.int32),
        query_start=np.array([0, last - first], np.int32),
        context_len=batch.context_len[seq : seq + 1],
        ssm_pages=batch.ssm_pages[seq : seq + 1],
        conv_pages=batch.conv_pages[seq : seq + 1],
        fresh_state=np.array([fresh]),
    )
    cut = {name: value[rows] if name in PER_TOKEN else value for name, value in inputs.items()}

    class Kept(CpuOps):
        """Uploads everything but the pool."""

        def upload(self, host: np.ndarray) -> np.ndarray:
            return pool if host is pool else super().upload(host)

    return case.run(Kept(), {**cut, "batch": part, "pool": pool})


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("size", [1, 7, 64, 100])
def test_pieces_change_no_bit(index: int, size: int) -> None:
    """A prompt of 150 tokens in pieces, alone, equals the same prompt at once beside another sequence."""
    case = _families(LONG)[index]
    inputs = case.inputs()
    whole = case.run(OPS, inputs)
    pool = inputs["pool"].copy()
    for first in range(0, 150, size):
        last = min(first + size, 150)
        got = _take(case, inputs, 0, first, last, first == 0, pool)
        assert np.array_equal(got["out"], whole["out"][first:last])
    assert np.array_equal(got["states"][0], whole["states"][0])


@pytest.mark.parametrize("index", range(4))
def test_the_batch_changes_no_bit(index: int) -> None:
    case = _families(MIXED)[index]
    inputs = case.inputs()
    together = case.run(OPS, inputs)
    for seq, n_new in enumerate(MIXED.n_new):
        fresh = bool(inputs["batch"].fresh_state[seq])
        alone = _take(case, inputs, seq, 0, n_new, fresh, inputs["pool"].copy())
        start = int(inputs["batch"].query_start[seq])
        assert np.array_equal(alone["out"], together["out"][start : start + n_new])
        assert np.array_equal(alone["states"][0], together["states"][seq])


@pytest.mark.parametrize("index", range(4))
def test_threads_change_no_bit(index: int) -> None:
    case = _families(Tokens([200, 90, 1], [200, 95, 7]))[index]
    inputs, before, results = case.inputs(), threads(), []
    try:
        for n in (1, 2, 5):
            set_threads(n)
            results.append(case.run(OPS, inputs))
    finally:
        set_threads(before)
    for result in results[1:]:
        assert np.array_equal(result["out"], results[0]["out"])
        assert np.array_equal(result["states"], results[0]["states"])


@pytest.mark.parametrize("index", range(4))
def test_other_pages_stay_untouched(index: int) -> None:
    """Only the layer's own pages change, and of those only the state's bytes."""
    case = _families(MIXED)[index]
    inputs = case.inputs()
    pool = inputs["pool"].copy()

    class Kept(CpuOps):
        def upload(self, host: np.ndarray) -> np.ndarray:
            return pool if host is inputs["pool"] else super().upload(host)

    out = case.run(Kept(), inputs)
    assert np.isfinite(out["states"]).all() and np.isfinite(out["out"]).all()
    n_changed = np.count_nonzero(pool != inputs["pool"])
    assert 0 < n_changed <= out["states"].nbytes
