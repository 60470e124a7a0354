"""The CPU's pointwise verbs and router: against the reference in float64, and on their own terms."""

from __future__ import annotations

import numpy as np
import pytest
from cases.common import Case, normal
from cases.moe import ROUTE_CASES
from cases.pointwise import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.arch.spec import MoeSpec
from rimuru.ops.cpu import CpuOps
from rimuru.ops.cpu.lanes import W
from rimuru.ops.cpu.simd_launch import set_threads, threads

OPS = CpuOps()


@pytest.mark.parametrize("case", [*CASES, *ROUTE_CASES], ids=lambda case: case.name)
def test_matches_the_reference(case: Case) -> None:
    case.check(OPS)


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "model"], ids=lambda case: case.name)
def test_threads_change_no_bit(case: Case) -> None:
    inputs, before = case.inputs(), threads()
    results = []
    try:
        for n in (1, 2, 3):
            set_threads(n)
            results.append(case.run(OPS, inputs))
    finally:
        set_threads(before)
    for result in results[1:]:
        for name, value in result.items():
            assert np.array_equal(value, results[0][name])


def test_rows_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(1)
    x, gate, weight = normal(rng, 70, 300), normal(rng, 70, 300), normal(rng, 300)
    for rows in (slice(0, 70), slice(3, 4), slice(17, 60)):
        n_tokens = rows.stop - rows.start
        norm, glu = OPS.act(n_tokens, 300), OPS.act(n_tokens, 300)
        OPS.rms_norm(x[rows], weight, 1e-5, norm)
        OPS.glu(gate[rows], x[rows], "silu", glu)
        if rows.start == 0:
            whole = norm.f32.copy(), glu.f32.copy()
        assert np.array_equal(norm.f32, whole[0][rows]) and np.array_equal(glu.f32, whole[1][rows])


def test_column_slices_are_read_through_their_strides() -> None:
    rng = np.random.default_rng(2)
    wide, weight = normal(rng, 6, 3 * W * 5), normal(rng, W * 5)
    part = wide[:, W * 5 : 2 * W * 5]
    for call in (
        lambda x, out: OPS.rms_norm(x, weight, 1e-5, out),
        lambda x, out: OPS.glu(x, x, "silu", out),
        lambda x, out: OPS.gated_norm(x, x, weight, 1e-5, 5, True, out),
        lambda x, out: OPS.multiply(x, x, out),
    ):
        sliced, copied = OPS.act(6, W * 5), OPS.act(6, W * 5)
        call(part, sliced)
        call(part.copy(), copied)
        assert np.array_equal(sliced.f32, copied.f32)


def test_verbs_fill_the_eight_bit_form() -> None:
    from rimuru.ops.cpu.quantize import dequantize_records

    x = normal(np.random.default_rng(3), 4, 256)
    out = OPS.act(4, 256)
    OPS.rms_norm(x, np.ones(256, np.float32), 1e-6, out)
    restored = dequantize_records(out.quant.records, 256)
    assert np.abs(restored - out.f32).max() < np.abs(out.f32).max() / 200


def _route(logits: list[float], **fields: object) -> tuple[np.ndarray, np.ndarray]:
    spec = MoeSpec(n_experts=len(logits), width=64, **fields)  # type: ignore[arg-type]
    ids, weights = np.empty((1, spec.top_k), np.int32), np.empty((1, spec.top_k), np.float32)
    OPS.route(np.array([logits], np.float32), spec, None, ids, weights)
    return ids[0], weights[0]


def test_known_router_values() -> None:
    """Fault E01: weights are renormalised over the chosen experts exactly when the model says so."""
    logits = [1.2, 0.7, 0.1, -0.3, -1.0, 0.9, 0.0, -2.0]
    ids, weights = _route(logits, top_k=2, renormalise=True)
    assert ids.tolist() == [0, 5] and np.allclose(weights, (0.5744, 0.4256), atol=5e-5)
    ids, weights = _route(logits, top_k=2, renormalise=False)
    assert ids.tolist() == [0, 5] and np.allclose(weights, (0.2980, 0.2207), atol=5e-5)
    selected = _route(logits, top_k=2, gating="softmax_selected")
    assert np.allclose(selected[1], (0.5744, 0.4256), atol=5e-5)


def test_high_experts_win() -> None:
    """Fault E05: experts above 256 are chosen, for counts that are no power of two as well."""
    for n_experts in (512, 300, 1024):
        logits = [0.0] * n_experts
        for place, expert in enumerate((n_experts - 1, 257, 280)):
            logits[expert] = 5.0 - place
        assert _route(logits, top_k=3)[0].tolist() == sorted((n_experts - 1, 257, 280), key=lambda e: -logits[e])


def test_equal_scores_go_to_the_lowest_id() -> None:
    assert _route([1.0] * 40, top_k=5)[0].tolist() == [0, 1, 2, 3, 4]
    assert _route([0.0, 2.0, 2.0, 1.0, 2.0], top_k=4)[0].tolist() == [1, 2, 4, 3]


def test_groups_of_one_expert() -> None:
    """A group with a single expert counts that expert's score."""
    ids, _ = _route([0.1, 3.0, 0.2, 2.0, 0.3], top_k=2, gating="sigmoid", n_groups=5, n_groups_used=2)
    assert ids.tolist() == [1, 3]


def test_vanishing_sum_is_clamped() -> None:
    """Step 7 of the router: the sum of the chosen weights counts at least 6.103515625e-5."""
    _, weights = _route([-30.0, -31.0, -40.0], top_k=2, gating="sigmoid", renormalise=True)
    expected = 1 / (1 + np.exp([30.0, 31.0])) / 6.103515625e-5
    assert np.allclose(weights, expected, rtol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 24),
    st.sampled_from(("softmax", "sigmoid", "softmax_selected", "sqrt_softplus")),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_route_against_a_plain_oracle(
    n_experts: int, gating: str, renormalise: bool, seed: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, n_experts))
    # Few different values, so that ties are common.
    logits = np.random.default_rng(seed).integers(-6, 7, n_experts) / 2.0
    ids, weights = _route(logits.tolist(), top_k=top_k, gating=gating, renormalise=renormalise)
    expected = sorted(range(n_experts), key=lambda e: (-logits[e], e))[:top_k]
    assert ids.tolist() == expected
    chosen = logits[expected]
    if gating == "softmax":
        plain = np.exp(chosen) / np.exp(logits).sum()
    elif gating == "sigmoid":
        plain = 1 / (1 + np.exp(-chosen))
    elif gating == "sqrt_softplus":
        plain = np.sqrt(np.log1p(np.exp(chosen)))
    else:
        plain = np.exp(chosen) / np.exp(chosen).sum()
    if renormalise:
        plain = plain / max(plain.sum(), 6.103515625e-5)
    assert np.allclose(weights, plain, rtol=2e-6)
