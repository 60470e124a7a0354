"""The device's store of experts in an engine on the CPU: the twin of the residency step hands out the places."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_twin import device_store

from rimuru import LLM, SamplingParams
from rimuru.commands.bench import use_routing
from rimuru.config import EngineConfig
from rimuru.engine import build
from rimuru.engine.room import ExpertRoom
from rimuru.engine.stores import may_read_in_place
from rimuru.experts import copies
from rimuru.experts.device_places import ALL_COME_TOKENS, SCORE_TOKENS, home_bytes, rule_of
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.replay import FORETOLD_SHARE
from rimuru.experts.ways import ASIDE_TOKENS
from rimuru.memory.adjuster import MOST_FREE_EXPANSIONS
from rimuru.ops.places import BUFFERED, FORETOLD, N_TOTALS
from tools.make_random_gguf import write_random_model

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
N_REQUESTS = 12
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 5) for i in range(N_REQUESTS)]


@pytest.fixture
def ram_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Engines get the device's store; the list's number is what it may take of host memory."""
    limit = [1 << 30]

    def make(self: build._Builder, biases, factors, room):  # type: ignore[no-untyped-def]
        return device_store(self, biases, factors, room, limit[0])

    monkeypatch.setattr(build._Builder, "_make_store", make)
    yield limit


def open_tiny(model: Path, tiny: int, **more: object) -> LLM:
    return LLM(model, device="cpu", memory=tiny, max_step_tokens=64, max_sequences=N_REQUESTS, **more)  # type: ignore[arg-type]


def store_of(llm: LLM) -> DeviceExpertStore:
    store = llm.loaded.store
    assert isinstance(store, DeviceExpertStore)
    return store


def watch_fetches(store: DeviceExpertStore, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Tokens of every fetch from now on, of those beside the computing and of those before it."""
    turns: dict[str, list[int]] = {"aside": [], "at once": []}

    def watch(name: str, way: str) -> None:
        fetch = getattr(store.ops, name)

        def watched(ids: np.ndarray, *more: object) -> None:
            turns[way].append(len(ids))
            fetch(ids, *more)

        monkeypatch.setattr(store.ops, name, watched, raising=False)

    watch("fetch_aside", "aside")
    watch("fetch_experts", "at once")
    return turns


VARIANTS: dict[str, dict[str, object]] = {
    "cost": {},
    "paper": {"policy": "paper"},
    "a fifth, hot set": {"resident_experts": 0.2, "residency": "hotset"},
    "a fifth, recency": {"resident_experts": 0.2, "residency": "recency"},
    "a fifth, no loading buffers": {"resident_experts": 0.2, "prefetch": False},
    "a fifth": {"resident_experts": 0.2},
    "none": {"resident_experts": 0},
    "paper, no fill on read": {"policy": "paper", "fill_on_read": False},
    "no room at home": {"policy": "paper"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_whoever_decides(
    model: Path, tiny: int, answers: list[list[int]], name: str, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are poisoned when they are given back, and every structure is audited after every step."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    if name == "no room at home":
        monkeypatch.setattr(DeviceExpertStore, "_keeps_all_at_home", lambda self, ram_bytes: False)
    with open_tiny(model, tiny, **VARIANTS[name]) as llm:
        store = store_of(llm)
        turns = watch_fetches(store, monkeypatch)
        found = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
        assert found == answers
        counters = store.counters
        assert counters.n_asked > 0 and 0.0 <= counters.hit_rate < 1.0
        assert counters.n_asked - counters.n_hits <= counters.n_read
        assert (counters.n_filled > 0) == (store.by_device and not name.startswith("none"))
        assert bool(turns["aside"]) == store.by_device and turns["at once"]
        assert min(turns["aside"], default=ASIDE_TOKENS) >= ASIDE_TOKENS
        assert not store.by_device or max(turns["at once"]) < ASIDE_TOKENS
        if name.startswith("none"):
            assert counters.n_hits == 0


def test_every_way_of_fetching_answers_alike(
    model: Path, tiny: int, answers: list[list[int]], ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another way in nearly every step: each expert is computed once, and no place is given twice."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    with open_tiny(model, tiny, resident_experts=0.2, prediction=True) as llm:
        store, rng = store_of(llm), random.Random(0)
        assert store.ways == ("before", "beside", "in place", "ahead")
        taken: list[str] = []

        def choose(n_tokens: int, link_s: float) -> str:
            taken.append(rng.choice(store.ways))
            return taken[-1]

        monkeypatch.setattr(store.chooser.tuner, "choose", choose)
        turns = watch_fetches(store, monkeypatch)
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == answers
        assert set(taken) == set(store.ways) and turns["aside"] and turns["at once"]


@pytest.mark.parametrize("off", ["in_place", "prefetch", "fill_on_read"])
def test_a_switch_that_is_off_leaves_no_way_of_its_kind(
    model: Path, tiny: int, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    """Also trials keep to what the user wants."""
    ways = {"in_place": ("before", "beside"), "prefetch": ("before", "beside"), "fill_on_read": ("in place",)}
    with open_tiny(model, tiny, resident_experts=0.2, **{off: False}) as llm:
        assert store_of(llm).ways == ways[off]
    with open_tiny(model, tiny, resident_experts=0.2) as llm:
        assert store_of(llm).ways == ("before", "beside", "in place")


def n_buffered(llm: LLM) -> int:
    """Experts that came into loading buffers since the start."""
    totals = llm.loaded.ops.download(store_of(llm).places.arrays.totals)
    return int(totals.reshape(-1, N_TOTALS)[:, BUFFERED].sum())


def test_nothing_comes_into_buffers_while_reading_in_place(
    model: Path, tiny: int, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffered = {}
    for way in ("before", "in place"):
        with open_tiny(model, tiny, resident_experts=0.2, residency="hotset") as llm:
            store = store_of(llm)
            monkeypatch.setattr(store.chooser.tuner, "choose", lambda n_tokens, link_s, way=way: way)
            before = n_buffered(llm)
            llm.generate(PROMPTS, GREEDY)
            buffered[way] = n_buffered(llm) - before
            assert llm.memory()["ways"] == {} and set(llm.memory()["forecasts"]["by_way"]) <= {way, "resident"}
    assert buffered["before"] > 0 == buffered["in place"]


def test_a_link_that_sleeps_at_first_is_timed_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the start stays for long: the first copies may take several times what later ones do."""
    now, took = [0.0], iter((4.0, 1.0, 2.0))

    class Link:
        def wait(self) -> None: ...

    def copy_in(*copied: object) -> None:
        now[0] += next(took)

    monkeypatch.setattr(copies, "copy_in", copy_in)
    monkeypatch.setattr(copies.time, "perf_counter", lambda: now[0])
    data = np.zeros(100, np.uint8)
    assert copies.link_rate(Link(), None, [(data, np.arange(1))]) == pytest.approx(100.0)  # type: ignore[arg-type]


def test_pages_of_who_has_ended_are_experts_at_once(model: Path, tiny: int, ram_bytes: list[int]) -> None:
    """Many run, all but one end: in the next step all their pages but the reserve are places."""
    with open_tiny(model, tiny, prefix_cache=False) as llm:
        engine, store, room = llm.loaded.engine, store_of(llm), llm.loaded.room
        assert isinstance(room, ExpertRoom) and store.by_device and store.expands_freely
        long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        sequences = [engine.add(prompt, long) for prompt in PROMPTS]
        while not all(sequence.n_output > 4 for sequence in sequences):
            engine.step()
        n_before = store.residency.n_resident
        for sequence in sequences[1:]:
            engine.abort(sequence)
        engine.step()
        n_first = store.residency.n_resident - n_before
        assert n_first > 2
        assert n_first == MOST_FREE_EXPANSIONS or room.free_pages < 4 * room.pages_per_expert
        engine.abort(sequences[0])
        while engine.has_work:
            engine.step()
        engine.audit()


def test_auto_knows_at_once_how_many_run(model: Path, tiny: int, ram_bytes: list[int]) -> None:
    """Scores forget the sooner, the fewer run: a prompt, or who ran before, does not count for a hundred steps."""
    with open_tiny(model, tiny, prefix_cache=False) as llm:
        engine, residency = llm.loaded.engine, store_of(llm).residency
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        sequences = [engine.add(prompt, params) for prompt in PROMPTS]
        while not all(sequence.n_output > 1 for sequence in sequences):
            engine.step()
        by_recency, all_come, decay_tokens = rule_of(residency)
        assert (by_recency, all_come) == (False, False) and len(sequences) > ALL_COME_TOKENS
        for sequence in sequences[1:]:
            engine.abort(sequence)
        engine.step()
        assert rule_of(residency) == (False, True, SCORE_TOKENS) and decay_tokens > SCORE_TOKENS
        engine.abort(sequences[0])
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_places_come_go_and_move_while_serving(
    arch: str, tmp_path: Path, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts leave and come at random, the pool shrinks and grows, states force huge pages to be emptied."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    path = write_random_model(tmp_path / f"{arch}.gguf", arch=arch, quant="q8_0", seed=5, context_length=256)
    prompts = PROMPTS[:8]
    with LLM(path, device="cpu", prefix_cache=False) as llm:
        expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
        whole = llm.memory()["total_bytes"]
    rng = random.Random(4)
    with LLM(path, device="cpu", memory=whole, prefix_cache=False, max_sequences=8, max_step_tokens=64) as llm:
        store, engine = store_of(llm), llm.loaded.engine
        assert store.by_device
        sequences = [engine.add(prompt, GREEDY) for prompt in prompts]
        step = 0
        while not all(s.is_finished for s in sequences):
            engine.step()
            step += 1
            store.shrink(rng.randrange(12))
            if step % 2:
                store.expand(rng.randrange(16))
            if step % 4 == 0:
                llm.resize(whole * rng.randrange(80, 101) // 100)
            if step % 3 == 0:
                engine.audit()
        assert [s.output_ids for s in sequences] == expected
        engine.audit()
        assert store.counters.n_filled > 20


def test_a_place_stays_counted_until_somebody_holds_it(model: Path, ram_bytes: list[int]) -> None:
    """Places that were just added are residents in name, each another expert, also after reports that name holders."""
    with LLM(model, device="cpu", resident_experts=0.75) as llm:
        store, engine = store_of(llm), llm.loaded.engine
        n_before = store.residency.n_resident
        store.shrink(10)
        assert store.residency.n_resident == n_before - 10
        engine.audit()
        begun = store.expand(7)
        assert len(begun) == 7 and store.residency.n_resident == n_before - 3
        for n_steps in (1, 1, 30):
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=n_steps, temperature=0.0, ignore_eos=True))
            assert store.residency.n_resident == n_before - 3
            engine.audit()


def test_the_hot_become_resident(model: Path, ram_bytes: list[int]) -> None:
    """Whatever was resident at the start: after some hundred tokens of one text a hot set holds what it uses."""
    with LLM(model, device="cpu", resident_experts=0.5, residency="hotset", prefix_cache=False) as llm:
        store = store_of(llm)
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        rates = []
        for _ in range(4):
            before = store.counters.n_asked, store.counters.n_hits
            llm.generate(PROMPTS[0], sampling)
            rates.append((store.counters.n_hits - before[1]) / (store.counters.n_asked - before[0]))
        probabilities = store.residency.probabilities()
        resident = store.residency.resident
        assert rates[-1] > rates[0]
        for slot in range(len(resident)):
            order = np.argsort(-probabilities[slot], kind="stable")
            n = int(resident[slot].sum())
            assert len(set(order[:n].tolist()) & set(np.flatnonzero(resident[slot]).tolist())) >= n - 1


def test_probabilities_are_those_of_a_token_after_long_prompts(model: Path, ram_bytes: list[int]) -> None:
    """A token chooses two experts of a layer, in a prompt as in an answer, whatever a step of prompts counts for."""
    with LLM(model, device="cpu", resident_experts=0.5, prefix_cache=False) as llm:
        store = store_of(llm)
        for _ in range(3):
            llm.generate([5 + i % 90 for i in range(220)], GREEDY)
            assert store.residency.probabilities().sum(axis=1) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("share, settled", [(1.0, True), (0.5, False)])
def test_routers_get_the_table_while_nobody_is_brought_in(
    share: float, settled: bool, model: Path, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the one that the experts are then computed with; where experts may come between, routers get none."""
    with LLM(model, device="cpu", resident_experts=share, prefix_cache=False) as llm:
        store, ops = store_of(llm), llm.loaded.ops
        seen: list[tuple[str, object]] = []
        choose, compute = ops.choose_experts, ops.moe_experts

        def chosen(*arguments: Any) -> None:
            ahead = arguments[8]
            seen.append(("router", ahead and (ahead[0], ahead[1])))
            choose(*arguments)

        def computed(x: Any, ids: Any, table: Any, active: Any, spec: Any, scratch: Any) -> None:
            seen.append(("experts", (table, scratch)))
            compute(x, ids, table, active, spec, scratch)

        monkeypatch.setattr(ops, "choose_experts", chosen)
        monkeypatch.setattr(ops, "moe_experts", computed)
        llm.generate(PROMPTS[0], GREEDY)
        assert store.is_watching != settled
        ahead = [given for name, given in seen if name == "router"]
        assert ahead and all((given is not None) == settled for given in ahead)
        if settled:
            pairs = list(zip(seen[::2], seen[1::2], strict=True))
            assert all(a[0] == "router" and b[0] == "experts" for a, b in pairs)
            assert all(x is y for (_, a), (_, b) in pairs for x, y in zip(a, b, strict=True))  # type: ignore[call-overload]


def test_when_nothing_need_be_read_in_place(model: Path) -> None:
    """Where everybody is resident, or buffers take all of a layer, from memory that holds everybody."""
    with LLM(model, device="cpu") as llm:
        layout = llm.loaded.pool.layout.expert
    assert layout is not None
    widest, enough = max(layer.n_experts for layer in layout.layers), home_bytes(layout)
    everybody = [layer.n_experts for layer in layout.layers]
    config = EngineConfig(in_place=False)
    assert not may_read_in_place(layout, config, everybody, 0, 0)
    assert not may_read_in_place(layout, config, None, widest, enough)
    assert may_read_in_place(layout, config, None, widest - 1, enough)
    assert may_read_in_place(layout, config, None, widest, enough - 1)
    for off in ("prefetch", "fill_on_read"):
        assert may_read_in_place(layout, EngineConfig(in_place=False, **{off: False}), None, widest, enough)


def test_forecasts_bring_experts_early_and_change_no_answer(
    model: Path, tiny: int, answers: list[list[int]], ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is brought early is missed less; whoever was chosen is counted once."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    counted = []
    for prediction in (False, True):
        with open_tiny(model, tiny, resident_experts=0.2, prediction=prediction) as llm:
            store = store_of(llm)
            assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == answers
            store.catch_up()
            foretold = llm.loaded.ops.download(store.places.arrays.totals).reshape(-1, N_TOTALS)[:, FORETOLD]
            assert (foretold[1:] > 0).all() == prediction and foretold[0] == 0
            counted.append((store.residency.n_chosen.copy(), store.counters.n_asked))
    assert np.array_equal(counted[0][0], counted[1][0]) and counted[0][1] == counted[1][1]


def watch_ids(store: DeviceExpertStore, verb: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, np.ndarray]]:
    """(layer slot, ids) of every call of a verb from now on."""
    calls: list[tuple[int, np.ndarray]] = []
    call = getattr(store, verb)

    def watched(slot: int, ids: np.ndarray, positions: np.ndarray) -> object:
        calls.append((slot, ids.copy()))
        return call(slot, ids, positions)

    monkeypatch.setattr(store, verb, watched)
    return calls


def test_replayed_routing_brings_its_own_forecasts(
    model: Path, tiny: int, ram_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is foretold of a layer, about the known share is what its tokens use; answers are those without."""
    answers = []
    for prediction in (False, True):
        with open_tiny(model, tiny, resident_experts=0.2, prediction=prediction) as llm:
            use_routing(llm, "synthetic", "auto", None, N_REQUESTS, 64, 1)
            foretold, used = (watch_ids(store_of(llm), verb, monkeypatch) for verb in ("foresee", "waves"))
            answers.append([answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)])
        if not prediction:
            assert not foretold
            continue
        later = [(slot, ids) for slot, ids in used if slot]  # no layer foretells the first
        assert [slot for slot, _ in foretold] == [slot for slot, _ in later]
        found = [
            (told[:, :, None] == ids[:, None, :]).any(axis=2).ravel()
            for (_, told), (_, ids) in zip(foretold, later, strict=True)
        ]
        assert FORETOLD_SHARE < np.concatenate(found).mean() < 0.95
    assert answers[0] == answers[1]
