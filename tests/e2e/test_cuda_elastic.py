"""Experts that change places on the device, in a whole engine on a GPU: answers stay, counts are true, tables agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.tiered_store import TieredExpertStore
from rimuru.memory.decisions import EXPERT, N_FILL_FIELDS, PLACE, SLOT, STEP, VICTIM
from rimuru.ops.places import ASKED, BUFFERED, FILLS, FORETOLD, HITS, N_TOTALS
from tools.make_random_gguf import write_random_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(8)]
SWITCHES: dict[str, dict[str, object]] = {
    "recency": {"residency": "recency"},
    "hot set": {"residency": "hotset"},
    "auto": {},
    "forecasts": {"prediction": True},
    "no loading buffers": {"prefetch": False},
    "no loading buffers, recency": {"residency": "recency", "prefetch": False},
    "no fill on read": {"fill_on_read": False},
    "little RAM": {"ram": "200MB"},
}


@pytest.fixture(scope="module", params=["qwen3moe", "qwen35moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elastic") / f"{request.param}.gguf"
    write_random_model(path, arch=request.param, quant="q4_k", seed=3, context_length=1024)
    return path


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    with open_model(model, resident_experts=1.0) as llm:
        return [a.token_ids for a in llm.generate(PROMPTS, GREEDY)]


def open_model(model: Path, **options: object) -> LLM:
    return LLM(
        model, device="cuda", max_sequences=8, max_step_tokens=128, deterministic=True, prefix_cache=False,
        **{"memory": "1GiB", **options},
    )  # type: ignore[arg-type]  # fmt: skip


def store_of(llm: LLM) -> DeviceExpertStore:
    store = llm.loaded.store
    assert isinstance(store, DeviceExpertStore)
    return store


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("resident", [0.4, 0])
def test_who_is_resident_never_changes_a_bit(model: Path, switches: str, resident: float) -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 96).tolist()
    with open_model(model, resident_experts=1.0) as llm:
        expected = [llm.logits(tokens, chunk=chunk) for chunk in (1, 96)]
    with open_model(model, resident_experts=resident, **SWITCHES[switches]) as llm:
        for chunk, wanted in zip((1, 96, 1), (*expected, expected[0]), strict=True):
            assert np.array_equal(llm.logits(tokens, chunk=chunk), wanted)
        llm.loaded.engine.audit()
        store = store_of(llm)
        assert (store.counters.n_filled > 0) == (store.by_device and resident > 0)


@pytest.mark.parametrize("switches", SWITCHES)
def test_batches_of_graphs_answer_alike(model: Path, switches: str, answers: list[list[int]]) -> None:
    with open_model(model, resident_experts=0.4, **SWITCHES[switches]) as llm:
        for _ in range(2):
            assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
            llm.loaded.engine.audit()
        assert llm.loaded.ops.graphs.n_graphs > 0


def test_every_way_of_fetching_answers_alike(
    model: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another way in nearly every step, graphs of each among them."""
    with open_model(model, resident_experts=0.4, prediction=True) as llm:
        store, rng = store_of(llm), np.random.default_rng(0)
        assert store.ways == ("before", "beside", "in place", "ahead")
        taken: list[str] = []

        def choose(n_tokens: int, link_s: float) -> str:
            taken.append(str(rng.choice(store.ways)))
            return taken[-1]

        monkeypatch.setattr(store.chooser.tuner, "choose", choose)
        for _ in range(4):
            assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
            llm.loaded.engine.audit()
        assert set(taken) == set(store.ways) and llm.loaded.ops.graphs.n_graphs >= 3


@pytest.mark.parametrize("prefetch", [True, False])
def test_nothing_is_read_in_place_where_that_is_off(model: Path, answers: list[list[int]], prefetch: bool) -> None:
    """What finds no place comes into loading buffers, enough for a whole layer; without them by the host."""
    with open_model(model, resident_experts=0.4, in_place=False, prefetch=prefetch) as llm:
        assert [a.token_ids for a in llm.generate(PROMPTS, GREEDY)] == answers
        llm.loaded.engine.audit()
        store = llm.loaded.store
        assert store is not None and store.counters.n_read > 0
        if not prefetch:
            assert isinstance(store, TieredExpertStore)
            return
        assert isinstance(store, DeviceExpertStore) and store.ways == ("before", "beside")
        totals = llm.loaded.ops.download(store.places.arrays.totals).reshape(-1, N_TOTALS).sum(axis=0)
        assert totals[FILLS] + totals[BUFFERED] == totals[ASKED] - totals[HITS] > 0


@pytest.mark.parametrize("poison", ["0", "1"])
def test_places_come_go_and_move_while_graphs_run(
    model: Path, answers: list[list[int]], poison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIMURU_POISON", poison)
    with open_model(model) as llm:
        store, engine, rng = store_of(llm), llm.loaded.engine, np.random.default_rng(1)
        assert store.by_device
        for _ in range(2):
            sequences, step = [engine.add(p, GREEDY) for p in PROMPTS], 0
            while not all(s.is_finished for s in sequences):
                engine.step()
                step += 1
                store.shrink(int(rng.integers(0, 12)))
                if step % 2:
                    store.expand(int(rng.integers(0, 14)))
                if step % 5 == 0:
                    llm.resize(int(rng.integers(600, 1000)) << 20)
                if step % 4 == 0:
                    engine.audit()
            assert [s.output_ids for s in sequences] == answers
            engine.audit()
        assert store.counters.n_filled > 0


def test_the_device_counts_what_was_chosen(model: Path) -> None:
    """Against the ids that the layers use, step by step; and a graph's steps count like others."""
    tokens = np.random.default_rng(2).integers(0, 200, 40).tolist()
    with open_model(model, resident_experts=0.5) as llm:
        store, ops = store_of(llm), llm.loaded.ops
        chosen = np.zeros_like(store.residency.n_chosen)
        n_asked = 0

        def note(slot: int, ids: object) -> None:
            nonlocal n_asked
            found, n = np.unique(ops.download(ids), return_counts=True)
            chosen[slot, found] += n
            n_asked += len(found)

        before, asked_before = store.residency.n_chosen.copy(), store.counters.n_asked
        llm.loaded.engine.runner.model.tap.chosen = note
        for chunk in (1, 7, 40):
            llm.logits(tokens, chunk=chunk)
        llm.loaded.engine.runner.model.tap.chosen = None
        assert np.array_equal(store.residency.n_chosen - before, chosen)
        assert store.counters.n_asked - asked_before == n_asked
        before_all = store.residency.n_chosen.sum()
        llm.generate([PROMPTS[0]], GREEDY)
        per_token = int(chosen.sum()) // (3 * len(tokens))
        n_tokens = (store.residency.n_chosen.sum() - before_all) / per_token
        assert n_tokens == len(PROMPTS[0]) + GREEDY.max_tokens - 1
        assert 0.0 < store.counters.hit_rate < 1.0


@pytest.mark.parametrize("prediction", [False, True])
def test_fills_replayed_are_the_holders(model: Path, prediction: bool) -> None:
    """The device's log, as reports brought it between graphs: every fill is there, in its order, with its step."""
    with open_model(model, resident_experts=0.4, residency="recency", prediction=prediction) as llm:
        store, ops = store_of(llm), llm.loaded.ops
        store.catch_up()
        fills, arrays = store.fills, store.places.arrays
        fills.rows = np.zeros((1 << 16, N_FILL_FIELDS), np.int64)
        held, first, step = ops.download(arrays.holders).copy(), fills.n_known, store.residency.step
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[2:5]):
            llm.generate(prompts, GREEDY)
        store.catch_up()
        assert fills.n_lost == 0 and fills.n_known == int(ops.download(arrays.log)[0]) > first
        for row in fills.rows[first : fills.n_known]:
            place = store.view.rows_before[row[SLOT]] + row[PLACE]
            assert held[place] == row[VICTIM]
            held[place] = row[EXPERT]
            assert step - 1 <= row[STEP] <= store.residency.step  # a step more where a report met one that was running
            step = int(row[STEP])
        assert np.array_equal(held, ops.download(arrays.holders))
        totals = ops.download(arrays.totals).reshape(-1, N_TOTALS)
        assert fills.per_layer.tolist() == (totals[:, FILLS] + totals[:, FORETOLD]).tolist()
        assert fills.n_foretold == totals[:, FORETOLD].sum()
        record = llm.memory()["decisions"]["fills"]["last"][-1]
        assert (record["step"], record["expert"]) == (step, int(row[EXPERT]))


def test_a_text_makes_its_experts_resident(model: Path) -> None:
    for residency in ("hotset", "recency"):
        with open_model(model, resident_experts=0.5, residency=residency) as llm:
            store, rates = store_of(llm), []
            for _ in range(3):
                before = store.counters.n_asked, store.counters.n_hits
                llm.generate([PROMPTS[0]], SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True))
                rates.append((store.counters.n_hits - before[1]) / (store.counters.n_asked - before[0]))
            assert rates[-1] > 0.5, rates


def test_nothing_is_allocated_while_experts_move(model: Path) -> None:
    import cupy

    with open_model(model, resident_experts=0.4) as llm:
        llm.generate(PROMPTS, GREEDY)
        store_of(llm).shrink(1)
        store_of(llm).expand(1)
        llm.loaded.ops.synchronize()
        used = cupy.get_default_memory_pool().used_bytes()
        llm.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
        assert cupy.get_default_memory_pool().used_bytes() == used
        assert llm.memory()["total_bytes"] <= 1 << 30


def test_the_cpu_computes_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of which the CPU takes half of the missed experts, between others that are graphs: the same answers but for
    rounding, and nothing where results must not depend on placement."""
    path = write_random_model(tmp_path / "shared.gguf", arch="qwen3moe", quant="q4_k", seed=3, context_length=1024)
    options = {"device": "cuda", "memory": "1GiB", "max_sequences": 8, "max_step_tokens": 128, "prefix_cache": False}
    first = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1)
    answers, turns = [], iter(range(1 << 20))
    for shares in (False, True):
        with LLM(path, resident_experts=0.3, cpu_experts=shares, **options) as llm:  # type: ignore[arg-type]
            lender = llm.loaded.store.helpers[0] if shares else None  # type: ignore[union-attr]
            if lender is not None:
                monkeypatch.setattr(lender.tuner, "choose", lambda *_: 0.5 if next(turns) % 3 else 0.0)
            found = [llm.generate(PROMPTS, first) for _ in range(4)]
            llm.generate(PROMPTS, GREEDY)
            llm.loaded.engine.audit()
            assert lender is None or lender.n_computed > 50
        answers.append(found)
    for plain, shared in zip(*answers, strict=True):
        same = [a.token_ids[0] == b.token_ids[0] for a, b in zip(plain, shared, strict=True)]
        off = [abs(a.logprobs[0].logprob - b.logprobs[0].logprob) for a, b in zip(plain, shared, strict=True)]
        assert sum(same) >= len(PROMPTS) - 2 and float(np.median(off)) < 0.02, (same, off)
    with open_model(path, resident_experts=0.3, cpu_experts=True) as llm:
        assert not store_of(llm).helpers
