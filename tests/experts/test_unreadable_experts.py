"""Experts that cannot be read, at every point of a run: exactly the requests whose tokens chose them end, with the
reason; all others answer as if nothing had happened, in both stores that read while a step runs, hybrids included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import NotEnoughMemoryError, RimuruError, StoreReadError
from rimuru.commands.profile import RoutingRecorder
from rimuru.engine import build, stores
from rimuru.engine.room import ExpertRoom
from rimuru.experts.source import GgufExpertSource
from rimuru.experts.store import HostExpertStore
from rimuru.experts.tiered_store import TieredExpertStore
from rimuru.plan import PlannedTokens
from rimuru.request import Sequence
from tools.make_random_gguf import write_random_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99][: 1 + i % 4] for i in range(6)]
ARCHITECTURES = ("qwen3moe", "qwen35moe", "granitehybrid")
STORES = ("host", "tiered")
Place = tuple[int, int]
PERIODS = {"copy_within": 40, "resize": 3}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unreadable") / "random.gguf"
    return write_random_model(path, arch=request.param, quant="q8_0", seed=3, context_length=256)


@pytest.fixture(scope="module")
def known(model: Path) -> tuple[list[list[int]], list[set[Place]]]:
    """Of each prompt: its answer, and the experts (layer slot, expert) that it takes."""
    answers, used = [], []
    with LLM(model, device="cpu", prefix_cache=False) as llm:
        for prompt in PROMPTS:
            with RoutingRecorder(llm) as recorder:
                answers.append(llm.generate(prompt, GREEDY)[0].token_ids)
            ids = recorder.ids()
            used.append({(slot, int(e)) for slot in range(ids.shape[1]) for e in np.unique(ids[:, slot])})
    return answers, used


@pytest.fixture(params=STORES)
def open_model(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Opens the model with six experts resident, in an engine with one of the stores."""

    def make(self: build._Builder, biases: list, factors: list, room: ExpertRoom) -> TieredExpertStore:
        layout = self.layout.expert
        assert layout is not None
        self.source = self.source or GgufExpertSource(self.gguf, layout)
        parts = stores.StoreParts(
            layout, self.pool, self.source, self.ops, self.ops.copier, biases, factors, self.quotas, room, self.config,
            2,
        )  # fmt: skip
        return parts.tiered(self.n_buffers, 8 * layout.max_pages * layout.page_bytes)

    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    if request.param == "tiered":
        monkeypatch.setattr(build._Builder, "_make_store", make)
        monkeypatch.setattr("rimuru.experts.tiered_store.N_STAGING", 3)

    def open_it(**more: object) -> LLM:
        options = {
            "policy": "fixed",
            "resident_experts": 6,
            "max_sequences": len(PROMPTS),
            "prefix_cache": False,
        } | more
        llm = LLM(model, device="cpu", **options)  # type: ignore[arg-type]
        assert type(llm.loaded.store) is (TieredExpertStore if request.param == "tiered" else HostExpertStore)
        return llm

    yield open_it


def break_reads(llm: LLM, is_broken: Callable[[Place], bool]) -> None:
    """Reads of experts for which is_broken(place) holds fail, after half of their bytes."""
    store = llm.loaded.store
    assert isinstance(store, HostExpertStore)
    original = store.source.read_expert

    def read(slot: int, expert: int, out: np.ndarray) -> None:
        if is_broken((slot, expert)):
            out.reshape(-1)[: out.size // 2] = 0xFF
            raise StoreReadError(f"expert {expert} of slot {slot}: checksum mismatch")
        original(slot, expert, out)

    store.source.read_expert = read  # type: ignore[method-assign, assignment]


def run(llm: LLM) -> list[Sequence]:
    engine = llm.loaded.engine
    sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    engine.run_until(sequences)
    engine.audit()
    return sequences


def test_an_expert_that_stays_unreadable_ends_exactly_those_who_choose_it(
    known: tuple[list[list[int]], list[set[Place]]], open_model: Callable[..., LLM]
) -> None:
    answers, used = known
    places = sorted(set.union(*used))
    some = [place for place in places if 0 < sum(place in u for u in used) < len(used)]
    assert len(some) > 5
    n_ended = 0
    with open_model() as llm:
        store = llm.loaded.store
        assert isinstance(store, HostExpertStore)
        broken: set[Place] = set()
        break_reads(llm, broken.__contains__)
        for place in some[:: len(some) // 5]:
            if store.residency.resident[place]:
                continue
            if isinstance(store, TieredExpertStore) and store.ram.get(place) is not None:
                store.ram.drop(place)
            broken.clear()
            broken.add(place)
            for sequence, answer, chosen in zip(run(llm), answers, used, strict=True):
                if place in chosen:
                    n_ended += 1
                    assert isinstance(sequence.error, RimuruError) and "checksum" in str(sequence.error)
                else:
                    assert sequence.error is None and sequence.output_ids == answer
        broken.clear()
        assert [s.output_ids for s in run(llm)] == answers
    assert n_ended > 2


@pytest.mark.parametrize("seed", range(3))
def test_a_read_that_fails_once_ends_exactly_the_rows_that_wanted_it(
    known: tuple[list[list[int]], list[set[Place]]], open_model: Callable[..., LLM], seed: int
) -> None:
    """The n-th read fails, for numbers n from the whole run; what the step's router chose says whom it concerns."""
    answers, rng = known[0], np.random.default_rng(seed)
    with open_model() as llm:
        engine, n_reads, fail_at, failed = llm.loaded.engine, 0, -1, list[Place]()
        chosen: dict[int, np.ndarray] = {}
        concerned: set[int] = set()

        def is_broken(place: Place) -> bool:
            nonlocal n_reads
            n_reads += 1
            if n_reads == fail_at:
                failed.append(place)
            return n_reads == fail_at

        launch = engine._launch

        def launched(plan):  # type: ignore[no-untyped-def]
            items: list[PlannedTokens] = list(plan.items)
            n_before = len(failed)
            flight = launch(plan)
            for slot, expert in failed[n_before:]:
                first = 0
                for item in items:
                    if (chosen[slot][first : first + item.n_tokens] == expert).any():
                        concerned.add(item.sequence.seq_id)
                    first += item.n_tokens
            return flight

        engine._launch = launched  # type: ignore[method-assign]
        engine.runner.model.tap.chosen = lambda slot, ids: chosen.__setitem__(slot, np.array(ids))
        break_reads(llm, is_broken)
        assert [s.output_ids for s in run(llm)] == answers
        n_run, shares = n_reads, []
        for _ in range(8):
            n_reads, fail_at = 0, int(rng.integers(1, n_run))
            concerned.clear()
            failed.clear()
            sequences = run(llm)
            assert bool(concerned) == bool(failed)  # residents differ from run to run, and so do numbers of reads
            shares += [len(concerned)] if failed else []
            for sequence, answer in zip(sequences, answers, strict=True):
                if sequence.seq_id in concerned:
                    assert isinstance(sequence.error, RimuruError) and "checksum" in str(sequence.error)
                    assert sequence.output_ids == answer[: sequence.n_output]
                else:
                    assert sequence.error is None and sequence.output_ids == answer
        assert len(shares) >= 3 and min(shares) < len(PROMPTS)
        fail_at = -1
        assert [s.output_ids for s in run(llm)] == answers


def test_scores_of_a_text_that_needs_an_unreadable_expert_are_refused(open_model: Callable[..., LLM]) -> None:
    with open_model() as llm:
        engine, is_broken = llm.loaded.engine, False
        break_reads(llm, lambda place: is_broken)
        want = [rows for piece in engine.score(list(range(20)), 10) for rows in piece]
        is_broken = True
        with pytest.raises(StoreReadError):
            list(engine.score(list(range(100, 140)), 10))
        engine.audit()
        is_broken = False
        got = [rows for piece in engine.score(list(range(20)), 10) for rows in piece]
        assert np.array_equal(np.concatenate(got), np.concatenate(want))


# ---- experts that move beside the steps
def test_faults_anywhere_in_resizes_expansions_and_reads(
    known: tuple[list[list[int]], list[set[Place]]], open_model: Callable[..., LLM], model: Path
) -> None:
    """The pool shrinks and grows between steps while every seventh call that reads or copies fails, every 40th
    copy within the pool, every third mapping of memory."""
    answers = known[0]
    small = {"context": 64, "max_step_tokens": 16}
    with open_model(policy="static", resident_experts=None, **small) as llm:
        report = llm.memory()
        whole = report["total_bytes"] + 4 * llm.loaded.pool.layout.huge_bytes
        part = whole - report["views"]["expert"]["bytes"] * 3 // 4
    with open_model(policy="paper", resident_experts=None, memory=whole, **small) as llm:
        engine, store, pool = llm.loaded.engine, llm.loaded.store, llm.loaded.pool
        room = llm.loaded.room
        assert isinstance(store, HostExpertStore) and isinstance(room, ExpertRoom) and pool.copier is not None
        is_on = False
        calls: Counter[str] = Counter()
        faults: Counter[str] = Counter()

        def may_fail(owner: object, name: str) -> None:
            call = getattr(owner, name)

            def called(*args: object) -> object:
                calls[name] += is_on
                if is_on and calls[name] % PERIODS.get(name, 7) == 0:
                    faults[name] += 1
                    raise OSError(f"{name} fails now")
                return call(*args)

            setattr(owner, name, called)

        for name in ("copy_in", "copy_out", "copy_within"):
            may_fail(pool.copier, name)
        if store.copier is not pool.copier:
            may_fail(store.copier, "copy_in")
            may_fail(store.copier, "copy_out")
        may_fail(store.source, "read_expert")
        may_fail(pool.memory, "resize")
        n_refused = n_ended = 0
        for turn in range(6):
            is_on = True
            sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
            while not all(sequence.is_finished for sequence in sequences):
                engine.step()
                room.shrink(8)
                try:
                    llm.loaded.resize(part if engine.n_steps % 4 else whole)
                except (OSError, NotEnoughMemoryError):
                    n_refused += 1
                engine.audit()
            for sequence, answer in zip(sequences, answers, strict=True):
                if sequence.error is None:
                    assert sequence.output_ids == answer, turn
                else:
                    n_ended += 1
                    assert isinstance(sequence.error, RimuruError) and "fails now" in str(sequence.error)
            is_on = False
            assert [s.output_ids for s in run(llm)] == answers
        assert n_refused > 0 and n_ended > 2, (n_refused, n_ended)
        assert faults["read_expert"] > 5 and faults["resize"] > 0, faults
        if isinstance(store, TieredExpertStore):
            assert faults["copy_in"] > 1
