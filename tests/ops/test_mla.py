"""The verbs that latent attention brings, on the CPU: against float64, independence of the batch, known algebra."""

from __future__ import annotations

import numpy as np
import pytest
from cases.common import Case, normal
from cases.matmul import random_rows
from cases.mla import HEAD_LINEAR_CASES, LATENT_ROW_CASES

from rimuru.formats.quants import BY_NAME
from rimuru.ops.base import Act
from rimuru.ops.cpu import CpuOps, matmul
from rimuru.ops.cpu.simd_launch import set_threads, threads

OPS = CpuOps()


@pytest.mark.parametrize("case", [*HEAD_LINEAR_CASES, *LATENT_ROW_CASES], ids=lambda case: case.name)
def test_matches_the_reference(case: Case) -> None:
    case.check(OPS)


def head_linear(kind: str, x: np.ndarray, raw: np.ndarray, n_head: int, n_in: int, n_out: int) -> np.ndarray:
    rest = x.shape[1] // n_head - n_in
    out = Act(np.empty((len(x), n_head * (n_out + rest)), np.float32), None)
    OPS.head_linear(x, OPS.weight(raw, BY_NAME[kind], n_in), n_head, OPS.act(len(x) * n_head, n_in), out)
    return out.f32


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_k"])
def test_batch_and_threads_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_MAX_JOBS", 13)  # several launches
    n_head, n_in, n_out = 30, 256, 40
    rng = np.random.default_rng(3)
    x, raw = normal(rng, 66, n_head * (n_in + 8)), random_rows(rng, BY_NAME[kind], n_head * n_out, n_in)
    whole = head_linear(kind, x, raw, n_head, n_in, n_out)
    before = threads()
    try:
        set_threads(1)
        assert np.array_equal(head_linear(kind, x, raw, n_head, n_in, n_out), whole)
    finally:
        set_threads(before)
    for first, last in ((0, 1), (1, 3), (3, 10), (10, 66)):
        part = np.ascontiguousarray(x[first:last])
        assert np.array_equal(head_linear(kind, part, raw, n_head, n_in, n_out), whole[first:last])


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q6_k"])
def test_one_head_is_linear(kind: str) -> None:
    rng = np.random.default_rng(4)
    x, raw = normal(rng, 5, 256), random_rows(rng, BY_NAME[kind], 48, 256)
    act, out = OPS.act(5, 256), np.empty((5, 48), np.float32)
    OPS.multiply(x, np.ones_like(x), act)
    OPS.linear(act, [OPS.weight(raw, BY_NAME[kind], 256)], [out])
    assert np.array_equal(head_linear(kind, x, raw, 1, 256, 48), out)


def test_what_follows_a_heads_input_is_carried_over() -> None:
    rng = np.random.default_rng(5)
    x, raw = normal(rng, 7, 4 * 48), random_rows(rng, BY_NAME["q4_0"], 4 * 10, 32)
    out = head_linear("q4_0", x, raw, 4, 32, 10).reshape(7, 4, 26)
    assert np.array_equal(out[:, :, 10:], x.reshape(7, 4, 48)[:, :, 32:])
