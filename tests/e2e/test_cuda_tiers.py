"""On a GPU: experts that are on disk, host memory that cannot be pinned, and recorded routing change no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import StoreReadError
from rimuru.commands.bench import counters, use_routing
from rimuru.experts.tiered_store import TieredExpertStore
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(6)]
OPTIONS: dict[str, object] = {"memory": "1GiB", "max_sequences": 8, "max_step_tokens": 128, "deterministic": True}


@pytest.fixture(scope="module", params=["qwen3moe", "granitehybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiers") / f"{request.param}.gguf"
    return write_random_model(path, arch=request.param, quant="q4_k", seed=3, context_length=1024)


def open_model(model: Path, **more: object) -> LLM:
    return LLM(model, device="cuda", **(OPTIONS | more))  # type: ignore[arg-type]


def answers(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with open_model(model) as llm:
        return answers(llm)


@pytest.mark.parametrize("residents", [0, 0.4, None])
def test_experts_on_disk(
    model: Path, expected: list[list[int]], residents: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rimuru.engine.build.needs_disk", lambda *_: True)
    monkeypatch.setenv("RIMURU_POISON", "1")
    with open_model(model, resident_experts=residents, ram="4MiB", swap="0", policy="auto") as llm:
        store = llm.loaded.store
        assert isinstance(store, TieredExpertStore)
        assert answers(llm) == expected
        llm.loaded.engine.audit()
        if residents is not None:
            tiers = llm.memory()["tiers"]
            assert tiers["read_from_disk"] + tiers["read_from_ram"] > 10


def test_host_memory_that_cannot_be_pinned(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rimuru.ops.cuda.copier.CudaCopier.is_pinned", lambda self, array: False)
    with open_model(model, resident_experts=0.5) as llm:
        assert isinstance(llm.loaded.store, TieredExpertStore)
        assert answers(llm) == expected
        llm.loaded.engine.audit()


@pytest.mark.parametrize("nth", [5, 60])
def test_an_expert_that_does_not_come_ends_who_wanted_it(
    model: Path, expected: list[list[int]], nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy to the device fails while steps are queued one ahead: the others answer as if nothing had happened."""
    monkeypatch.setattr("rimuru.engine.build.needs_disk", lambda *_: True)
    with open_model(model, resident_experts=0, ram="4MiB", swap="0", prefix_cache=False) as llm:
        engine, store, n_copies = llm.loaded.engine, llm.loaded.store, 0
        assert isinstance(store, TieredExpertStore)
        copy_in = store.copier.copy_in

        def fails_once(address: int, source: np.ndarray) -> None:
            nonlocal n_copies
            n_copies += 1
            if n_copies == nth:
                raise OSError("the copy fails")
            copy_in(address, source)

        store.copier.copy_in = fails_once  # type: ignore[method-assign]
        sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        engine.run_until(sequences)
        assert any(sequence.error is not None for sequence in sequences)
        for sequence, answer in zip(sequences, expected, strict=True):
            if sequence.error is None:
                assert sequence.output_ids == answer
            else:
                assert isinstance(sequence.error, StoreReadError) and "the copy fails" in str(sequence.error)
        engine.audit()
        assert answers(llm) == expected


def test_recorded_routing_in_graphs_and_prompts(model: Path) -> None:
    """Everything resident, half of it by recency, none: the same answers, whose experts are the recording's."""
    found, hits = [], []
    for residents in (1.0, 0.5, 0):
        with open_model(model, resident_experts=residents, residency="recency", prefix_cache=False) as llm:
            use_routing(llm, "synthetic", "auto", None, 8, 128, 1)
            found.append(answers(llm))
            asked, hit, _ = counters(llm)
            hits.append(hit / max(asked, 1))
            llm.loaded.engine.audit()
            if residents == 1.0:
                use_routing(llm, "model", "auto", None, 8, 128, 1)
                assert answers(llm) != found[0], "the choice of experts does not matter here"
    assert found[0] == found[1] == found[2]
    assert hits[2] < hits[1] < 1.0 and np.isfinite(hits).all()
