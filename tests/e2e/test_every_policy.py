"""32 requests at once in a pool so small that experts move in every step: the same answers under every policy and
residency, with pages poisoned on release and with copies that are late at random. Faults at every point leave a working
engine. On the CPU, on the CPU with the device's store of experts (its twin), and on a GPU with --deterministic."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_twin import device_store

from rimuru import LLM, SamplingParams
from rimuru.base.errors import NotEnoughMemoryError, RimuruError, StoreReadError
from rimuru.engine import build
from rimuru.engine.engine import Engine
from rimuru.engine.resolve import GRANULE_BYTES
from rimuru.engine.room import ExpertRoom
from rimuru.experts.source import GgufExpertSource
from rimuru.experts.store import HostExpertStore
from rimuru.experts.tiered_store import TieredExpertStore
from rimuru.request import Sequence
from tools.make_random_gguf import write_random_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
N_REQUESTS = 32
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 4) for i in range(N_REQUESTS)]
DEVICES = ["cpu", "twin", pytest.param("cuda", marks=pytest.mark.gpu)]
SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'
MOST_SPIN_CYCLES = 3_000_000
"""A millisecond or two."""

ELASTIC: dict[str, dict[str, object]] = {
    "cost": {"policy": "cost"},
    "cost, hot set": {"policy": "cost", "residency": "hotset"},
    "cost, recency": {"policy": "cost", "residency": "recency"},
    "paper": {"policy": "paper"},
    "paper, at most 100 absent": {"policy": "paper", "expert_offload_limit": 100},
    "paper, no fill on read": {"policy": "paper", "fill_on_read": False},
    "cost, no loading buffers": {"policy": "cost", "prefetch": False},
}
FIXED: dict[str, dict[str, object]] = {
    "fixed": {"policy": "fixed", "resident_experts": 0.3},
    "fixed, hot set": {"policy": "fixed", "resident_experts": 0.3, "residency": "hotset"},
    "fixed, recency": {"policy": "fixed", "resident_experts": 0.3, "residency": "recency"},
    "fixed, nothing in place": {"policy": "fixed", "resident_experts": 0.3, "in_place": False},
}


@pytest.fixture(scope="module", params=["qwen3moe", "qwen35moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 layers of 32 experts, 14 MB of them; requests of 19 to 40 tokens, whose pages are a third of that."""
    path = tmp_path_factory.mktemp("policies") / f"{request.param}.gguf"
    shape = {"expert_count": 32, "expert_used_count": 4, "context_length": 256}
    return write_random_model(path, arch=request.param, quant="q4_k", seed=3, **shape)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "twin":
        monkeypatch.setattr(build._Builder, "_make_store", device_store)
    return request.param


def open_model(model: Path, device: str, **more: object) -> LLM:
    options = {"max_sequences": N_REQUESTS, "max_step_tokens": 64, "prefix_cache": False, "context": 256} | more
    options |= {"device": "cuda", "deterministic": True} if device == "cuda" else {"device": "cpu"}
    if device == "cuda":
        options.setdefault("memory", "1GiB")
    return LLM(model, **options)  # type: ignore[arg-type]


_known: dict[tuple[Path, str], tuple[list[list[int]], int]] = {}


def known(model: Path, device: str) -> tuple[list[list[int]], int]:
    """What each prompt is answered when all experts stay, and a budget that half of them fill."""
    key = model, "cuda" if device == "cuda" else "cpu"
    if key not in _known:
        with open_model(model, device, policy="static") as llm:
            together = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
            for i in (0, 9, 31):
                assert llm.generate([PROMPTS[i]], GREEDY)[0].token_ids == together[i]
            report = llm.memory()
        needed = report["dense_bytes"] + report["scratch_bytes"] + report["views"]["buffer"]["bytes"]
        needed += GRANULE_BYTES if device == "cuda" else 0
        _known[key] = together, needed + report["views"]["expert"]["bytes"] // 2
    return _known[key]


def delays(llm: LLM, device: str, chance: random.Random) -> Callable[[], None]:
    """Something to call before each step: what is queued from then on is late by random times. Reads of the CPU's store
    are late by themselves."""
    if device == "cuda":
        import cupy

        ops, store = llm.loaded.ops, llm.loaded.store
        assert store is not None
        spin = cupy.RawKernel(SPIN, "spin")
        streams = [store.copier.stream, llm.loaded.pool.copier.stream, ops._aside._stream, ops.stream]  # type: ignore[union-attr]

        def hold_up() -> None:
            for stream in streams:
                if chance.random() < 0.4:
                    with stream:
                        spin((1,), (1,), (chance.randrange(MOST_SPIN_CYCLES),))
            ops.stream.use()

        return hold_up
    source = llm.loaded.store.source  # type: ignore[union-attr]
    original = source.read_expert

    def late(slot: int, expert: int, out: np.ndarray) -> None:
        if chance.random() < 0.05:
            time.sleep(chance.random() * 0.003)
        original(slot, expert, out)

    source.read_expert = late  # type: ignore[method-assign]
    return lambda: None


def serve(llm: LLM, device: str, seed: int, moves: bool) -> tuple[list[Sequence], int]:
    """Answer all prompts at once, audited now and then; with `moves`, experts leave and come before every step. How
    many of them did."""
    engine, store, room, chance = llm.loaded.engine, llm.loaded.store, llm.loaded.room, random.Random(seed)
    assert store is not None
    hold_up = delays(llm, device, chance)
    sequences, n_moved, step = [engine.add(prompt, GREEDY) for prompt in PROMPTS], 0, 0
    while not all(sequence.is_finished for sequence in sequences):
        hold_up()
        if moves:
            assert isinstance(room, ExpertRoom)
            n_moved += room.shrink(chance.randrange(1, 5), "the test says so")
            n_moved += len(store.expand(chance.randrange(1, 6)))
        engine.step()
        step += 1
        if step % 5 == 0:  # an audit waits for everything: not in every step
            engine.audit()
    assert not moves or n_moved >= step
    engine.audit()
    return sequences, n_moved


@pytest.mark.parametrize("name", [*ELASTIC, *FIXED])
def test_the_same_answers_under_every_policy(
    model: Path, device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, tight = known(model, device)
    monkeypatch.setenv("RIMURU_POISON", "1")
    options = ELASTIC.get(name) or FIXED[name]
    memory: dict[str, object] = {"memory": tight} if name in ELASTIC else {}
    with open_model(model, device, **memory, **options) as llm:
        store = llm.loaded.store
        assert store is not None and llm.loaded.pool._poisons
        assert store.residency.n_resident <= 0.7 * store.layout.n_experts
        for turn in range(2 if device == "cuda" else 1):
            sequences, _ = serve(llm, device, turn, moves=name in ELASTIC)
            assert [sequence.output_ids for sequence in sequences] == expected
        store.catch_up()
        assert 0 < store.counters.n_hits < store.counters.n_asked
        if isinstance(llm.loaded.room, ExpertRoom) and name in ELASTIC:
            counts = llm.loaded.room.decisions.counts
            assert counts["shrink"] > llm.loaded.engine.n_steps // 2
        if device == "cuda" and not isinstance(store, TieredExpertStore):
            assert llm.loaded.ops.graphs.n_graphs > 0


def test_static_keeps_everybody_and_refuses_where_it_cannot(model: Path, device: str) -> None:
    expected, tight = known(model, device)
    with open_model(model, device, policy="static") as llm:
        sequences, _ = serve(llm, device, 0, moves=False)
        assert [sequence.output_ids for sequence in sequences] == expected
        assert llm.loaded.store is not None and llm.loaded.store.residency.n_resident == 128
    with pytest.raises(NotEnoughMemoryError):
        open_model(model, device, policy="static", memory=tight)


# ---- faults
PERIODS = {
    "copy_in": 40,
    "copy_out": 17,
    "copy_within": 30,
    "resize": 3,
    "allocate": 11,
    "allocate_expert": 9,
    "read_expert": 150,
}
"""Every so manieth call of a kind fails, of others every fifth."""
READS = ("copy_in", "read_expert")
"""What a step waits for: without it, requests whose tokens chose the expert end."""
STORES: dict[str, dict[str, object]] = {
    "by the device": {"policy": "cost"},
    "by the host": {"policy": "paper", "fill_on_read": False},
    "by waves": {"policy": "paper", "in_place": False, "fill_on_read": False},
}


class Faults:
    """Calls that fail now and then, while `is_on`; those in `spared` do not, those in `outage` always."""

    def __init__(self) -> None:
        self.is_on = False
        self.spared: tuple[str, ...] = ()
        self.outage: tuple[str, ...] = ()
        self.n_calls: Counter[str] = Counter()
        self.n_failed: Counter[str] = Counter()
        self.last = "nothing"

    def told(self) -> str:
        """For the line of a failing test."""
        return f"failed last: {self.last}; failed {dict(self.n_failed)} of {dict(self.n_calls)}"

    def may_fail(self, owner: object, name: str, answer: Any = None) -> None:
        """From now on calls of owner.name raise at times, or give None where `answer` says so."""
        call = getattr(owner, name)

        def called(*args: object, **more: object) -> object:
            self.n_calls[name] += self.is_on
            is_turn = self.n_calls[name] % PERIODS.get(name, 5) == 0 and name not in self.spared
            if self.is_on and (is_turn or name in self.outage):
                self.n_failed[name] += 1
                self.last = f"{name}, call {self.n_calls[name]}"
                if answer == "none":
                    return None
                raise OSError(f"{name} fails now")
            return call(*args, **more)

        setattr(owner, name, called)


def slow_prompts(engine: Engine) -> None:
    """Who gives way moves to host memory: running prompts again would take long."""
    engine.scheduler.prefill.tokens_per_s = 1e-3
    engine.scheduler.prefill.end = lambda is_busy: None  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", STORES)
def test_faults_anywhere_in_resizes_expansions_and_fetches(
    model: Path, device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, reads, mapping of memory and allocations fail while experts come and go and the pool shrinks and grows:
    a request is answered as ever, or ends with that error; tables agree after every step; afterwards all is well.

    First all but what a step waits for fails: nobody ends. Then that too, as often as the rest: a step that needs many
    copies ends all its requests. Then all of it in one step that takes some of the prompts: these end, and the others
    are answered."""
    expected, tight = known(model, device)
    monkeypatch.setenv("RIMURU_POISON", "1")
    n_requests = 8
    with open_model(model, device, memory=tight, swap="64MiB", **STORES[kind]) as llm:
        engine, store, room, pool = llm.loaded.engine, llm.loaded.store, llm.loaded.room, llm.loaded.pool
        assert store is not None and isinstance(room, ExpertRoom) and pool.copier is not None
        step_bytes = max(pool.layout.huge_bytes, GRANULE_BYTES if device == "cuda" else 0)  # what is mapped or not
        slow_prompts(engine)
        faults, chance = Faults(), random.Random(5)
        for copier in {id(copier): copier for copier in (pool.copier, store.copier)}.values():
            for name in ("copy_in", "copy_out", "copy_within"):
                faults.may_fail(copier, name)
        faults.may_fail(store.source, "read_expert")
        faults.may_fail(pool.memory, "resize")
        faults.may_fail(pool.allocator, "allocate", "none")
        faults.may_fail(pool.allocator, "allocate_expert", "none")
        n_refused = 0
        for turn in range(3):
            n_ended = n_answered = 0
            faults.is_on, n_before = True, engine.n_steps
            sequences = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:n_requests]]
            while not all(sequence.is_finished for sequence in sequences):
                for move in (lambda: room.shrink(6), lambda: store.expand(6)):
                    try:
                        move()
                    except OSError:
                        n_refused += 1
                try:
                    llm.resize(tight - chance.randrange(3) * step_bytes)
                except (OSError, NotEnoughMemoryError):
                    n_refused += 1
                if engine.n_steps % 4 == 3:
                    engine.scheduler.preempt_youngest()
                print(f"turn {turn}, step {engine.n_steps}, {pool.total_bytes} bytes: {faults.last}")  # where one fails
                faults.spared = READS if turn != 1 else ()
                faults.outage = READS if turn == 2 and engine.n_steps == n_before else ()
                engine.step()
                faults.spared = faults.outage = ()
                faults.is_on = False  # an audit asks the device
                engine.audit()
                faults.is_on = True
            faults.is_on = False
            for sequence, answer in zip(sequences, expected, strict=False):
                if sequence.error is None:
                    n_answered += 1
                    assert sequence.output_ids == answer, (turn, sequence.seq_id, sequence.n_preemptions)
                else:
                    n_ended += 1
                    assert isinstance(sequence.error, RimuruError) and str(sequence.error)
            told = f"turn {turn}: answered {n_answered}, ended {n_ended}, {faults.told()}"
            waits = isinstance(store, HostExpertStore)  # the device's store reads experts at home, where nothing fails
            least, most = (0, n_requests) if turn == 1 else (1, n_requests - 1) if turn == 2 and waits else (0, 0)
            assert least <= n_ended <= most, told
            llm.resize(tight)
            again = [answer.token_ids for answer in llm.generate(PROMPTS[:n_requests], GREEDY)]
            assert again == expected[:n_requests]
            engine.audit()
        told = f"refused {n_refused}, {faults.told()}, {engine.cache.swap.stats()}"
        assert n_refused > 0 and faults.n_calls["resize"] > 0, told
        assert engine.cache.swap.n_saved > 0 and faults.n_failed["copy_out"] > 0, told
        assert faults.n_failed["allocate"] + faults.n_failed["allocate_expert"] > 0, told


def test_a_file_that_cannot_be_read_is_no_engine(model: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading while the model is loaded: one clear error, and the next attempt is as good as the first."""
    expected, tight = known(model, device)
    with monkeypatch.context() as broken:
        broken.setattr(GgufExpertSource, "read_expert", _mismatch)
        with pytest.raises(StoreReadError, match="checksum mismatch"):
            open_model(model, device, memory=tight)
    with open_model(model, device, memory=tight) as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS[:4], GREEDY)] == expected[:4]


def _mismatch(self: GgufExpertSource, slot: int, expert: int, out: np.ndarray) -> None:
    raise StoreReadError(f"expert {expert} of slot {slot}: checksum mismatch")
