"""Experts that the CPU computes for a device: what is taken out of a step comes back in the sum, and timing decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_twin import device_store
from hypothesis import given
from hypothesis import strategies as st

from rimuru import LLM, SamplingParams
from rimuru.engine import build, stores
from rimuru.experts.cpu_experts import CpuExperts, choose_pairs, without_pairs
from rimuru.experts.cpu_share import FIRST_SHARE, LEAST_LINK_S, ShareTuner
from rimuru.experts.step_tuner import FIRST_PAUSE, TRIAL_STEPS
from rimuru.memory.adjuster import ForecastLog
from tools.make_random_gguf import write_random_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 3) for i in range(8)]


@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0))
def test_pairs_are_whole_experts_and_leave_every_token_one(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    n_tokens, top_k, n_experts = int(rng.integers(1, 20)), int(rng.integers(1, 5)), 16
    ids = np.array([rng.permutation(n_experts)[:top_k] for _ in range(n_tokens)], np.int32)
    is_missed = rng.random(n_experts) < 0.5
    weights = rng.random(ids.shape).astype(np.float32)
    pairs = choose_pairs(ids, is_missed, share)
    taken = set(ids[pairs].tolist())
    assert all(is_missed[expert] for expert in taken)
    assert not taken & set(ids[~pairs].tolist())
    assert len(taken) <= share * len(set(ids[is_missed[ids]].tolist()))
    assert not pairs.all(axis=1).any()
    kept_ids, kept_weights = without_pairs(ids, weights, pairs)
    assert not taken & set(kept_ids.ravel().tolist()) and not kept_weights[pairs].any()
    assert (kept_ids[~pairs] == ids[~pairs]).all() and (kept_weights[~pairs] == weights[~pairs]).all()
    for row, kept in zip(ids, kept_ids, strict=True):
        assert set(kept.tolist()) <= set(row.tolist())


def run_steps(tuner: ShareTuner, seconds, n_steps: int, link_s: float = 0.05, n_tokens: int = 32) -> list[float]:  # type: ignore[no-untyped-def]
    """The shares of so many steps that take seconds(share)."""
    shares = []
    for _ in range(n_steps):
        shares.append(tuner.choose(n_tokens, link_s))
        tuner.note(n_tokens, shares[-1], seconds(shares[-1]), link_s, 1000)
    return shares


def test_the_share_settles_where_steps_are_shortest() -> None:
    """The link takes 60 ms; the CPU would take 140 for all; not replaying a graph costs 8."""
    tuner = ShareTuner(ForecastLog())
    run_steps(tuner, lambda share: 0.06 if not share else 0.008 + max(0.06 * (1 - share), 0.14 * share), 20_000)
    assert tuner.share_of(32) == 0.25
    forecast = tuner.forecasts.snapshot(400)
    assert forecast["by_way"]["cpu"]["steps"] >= 3
    first = forecast["last"][0]
    assert first["expected_s"] == pytest.approx(0.06 - 0.25 * 0.05) and first["took_s"] == pytest.approx(0.053)


def test_it_is_zero_where_that_loses_and_trials_grow_rare() -> None:
    tuner = ShareTuner(ForecastLog())
    shares = run_steps(tuner, lambda share: 0.02 + 0.1 * share, 4000)
    assert tuner.share_of(32) == 0.0
    assert set(shares) == {0.0, FIRST_SHARE}
    assert TRIAL_STEPS < sum(share > 0 for share in shares) <= 8 * TRIAL_STEPS
    assert not any(shares[:FIRST_PAUSE])


def test_nothing_is_tried_where_the_link_has_little_to_do_or_for_prompts() -> None:
    tuner = ShareTuner(ForecastLog())
    assert not any(run_steps(tuner, lambda share: 0.01, 500, LEAST_LINK_S / 2))
    assert not any(run_steps(tuner, lambda share: 0.01, 500, n_tokens=2048))


@pytest.fixture
def lenders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CpuExperts]]:
    """Engines on the CPU get the device's store, and a second set of the CPU's verbs for what it misses."""
    made: list[CpuExperts] = []

    def share(store, model, config, device, threads):  # type: ignore[no-untyped-def]
        found = stores.cpu_share(store, model, config, "cuda", threads)
        if found is not None:
            made.append(found)
        return found

    monkeypatch.setattr(build._Builder, "_make_store", device_store)
    monkeypatch.setattr(build, "cpu_share", share)
    yield made


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "nemotron_h_moe"])
def test_shared_steps_give_the_same_answers(
    arch: str, tmp_path: Path, lenders: list[CpuExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, other activations and latent experts included; layer by layer up to the order of sums."""
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    path = write_random_model(tmp_path / "m.gguf", arch=arch, quant="q8_0", seed=5, context_length=256)
    with LLM(path, device="cpu", resident_experts=0.25, max_step_tokens=64, max_sequences=8) as llm:
        expected = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
    with LLM(path, device="cpu", resident_experts=0.25, max_step_tokens=64, max_sequences=8, cpu_experts=True) as llm:
        (lender,) = lenders
        differences: list[float] = []
        monkeypatch.setattr(lender.tuner, "choose", lambda n_tokens, link_s: 0.6)
        watch_sums(lender, differences)
        found = [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]
        assert lender.n_computed > 20 and max(differences) < 1e-4
        n_equal = sum(a == b for a, b in zip(found, expected, strict=True))
        assert n_equal >= len(PROMPTS) - 2  # another order of sums turns an 8-bit value, and a near tie, now and then
        n_before = lender.n_computed
        llm.logits(PROMPTS[2])
        assert lender.n_computed == n_before  # scores do not depend on timing


def watch_sums(lender: CpuExperts, differences: list[float]) -> None:
    """Of each layer: what the CPU computed against the same experts by the device's verbs."""
    compute = lender._compute

    def checked(slot, spec, fetch_x, ids, weights, pairs):  # type: ignore[no-untyped-def]
        x = fetch_x()
        total = compute(slot, spec, lambda: x, ids, weights, pairs)
        wanted = np.zeros_like(total)
        for t, k in zip(*np.nonzero(pairs), strict=True):
            one = np.zeros((1, ids.shape[1]), np.bool_)
            one[0, 0] = True
            args = (np.full((1, ids.shape[1]), ids[t, k], np.int32), np.full((1, ids.shape[1]), weights[t, k]), one)
            wanted[t] += compute(slot, spec, lambda t=t: x[t : t + 1], *args)[0]
        differences.append(float(np.abs(total - wanted).max() / max(1e-6, np.abs(wanted).max())))
        return total

    lender._compute = checked  # type: ignore[method-assign]


def test_who_wants_results_independent_of_placement_shares_nothing(
    model: Path, tiny: int, lenders: list[CpuExperts], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model, device="cpu", memory=tiny, cpu_experts=True, deterministic=True, max_step_tokens=64) as llm:
        llm.generate(PROMPTS[:2], GREEDY)
    assert not lenders and "independent" not in caplog.text.lower() and "do not depend on placement" in caplog.text
