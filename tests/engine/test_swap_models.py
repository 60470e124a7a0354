"""Answers that give way to others through host memory, on real models: equal to solo, nothing left behind."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import NotEnoughMemoryError
from rimuru.engine.engine import Engine
from rimuru.request import Sequence
from tools.make_random_gguf import write_random_model

ARCHS = ("qwen3moe", "granitehybrid", "gpt-oss")
"""Attention alone, recurrent states beside it, windows."""
N_REQUESTS = 6


@pytest.fixture(
    scope="module",
    params=[
        *((arch, {"device": "cpu", "threads": 2}) for arch in ARCHS),
        *(
            pytest.param((arch, {"device": "cuda", "memory": "1GiB", "deterministic": True}), marks=pytest.mark.gpu)
            for arch in ARCHS
        ),
    ],
    ids=lambda param: f"{param[0]} {param[1]['device']}",
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    arch, options = request.param
    path = write_random_model(tmp_path_factory.mktemp("swap") / "model.gguf", arch)
    with LLM(path, swap="8MiB", policy="paper", max_step_tokens=48, max_sequences=8, context=256, **options) as model:
        yield model


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def engine(llm: LLM, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Idle, with an empty prefix cache, told that running prompts again is slow."""
    engine = llm.loaded.engine
    monkeypatch.setattr(engine, "overlaps", request.param)
    empty(engine)
    slow(engine)
    return engine


def slow(engine: Engine) -> None:
    """Recompute costs much from now on (measuring prompts is switched off)."""
    engine.scheduler.prefill.tokens_per_s = 1e-3
    engine.scheduler.prefill.end = lambda is_busy: None  # type: ignore[method-assign]


def empty(engine: Engine) -> None:
    while engine.cache.evict_prefix(1 << 20) or engine.cache.evict_prefix(1 << 20, states_first=True):
        pass


def prompts(seed: int, n_vocab: int) -> list[list[int]]:
    """Half of them begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(n_vocab) for _ in range(40)]
    starts = [common[: rng.randrange(40)] if i % 2 else [] for i in range(N_REQUESTS)]
    return [start + [rng.randrange(n_vocab) for _ in range(rng.randrange(1, 60))] for start in starts]


def params(i: int) -> SamplingParams:
    """Greedy and sampled answers in turn, some with penalties (whose next token needs the last one on the host)."""
    penalty = 1.2 if i % 3 == 2 else 1.0
    return SamplingParams(20 + 5 * i, 0.0 if i % 2 else 0.9, seed=i, ignore_eos=True, repetition_penalty=penalty)


def solo(engine: Engine, all_prompts: list[list[int]], ways: list[SamplingParams]) -> list[list[int]]:
    answers = []
    for prompt, way in zip(all_prompts, ways, strict=True):
        sequence = engine.add(prompt, way)
        engine.run_until([sequence])
        answers.append(sequence.output_ids)
        empty(engine)
    return answers


def check_nothing_is_left(engine: Engine) -> None:
    engine.audit()
    assert not engine.has_work and len(engine.cache) == 0
    assert not engine.cache.swap.saved and engine.cache.swap.used_bytes() == 0
    empty(engine)
    allocator = engine.pool.allocator
    assert all(allocator.pages_in_use(kind) == 0 for kind in ("kv", "ssm", "conv") if allocator.has(kind))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_preemption_and_resizing_change_no_answer(llm: LLM, engine: Engine, seed: int) -> None:
    """Whoever is last gives way at random steps, through host memory or (at random) by recompute; the pool shrinks and
    grows; prefixes vanish; some requests are cancelled. Every structure is audited after every step."""
    rng, all_prompts = random.Random(seed), prompts(seed, llm.loaded.engine.n_vocab)
    expected = solo(engine, all_prompts, [params(i) for i in range(N_REQUESTS)])
    n_before, total = engine.cache.swap.n_loaded, llm.memory()["total_bytes"]
    sequences = [engine.add(prompt, params(i)) for i, prompt in enumerate(all_prompts)]
    doomed = [engine.add(prompt, params(i)) for i, prompt in enumerate(all_prompts[:2])]
    n_steps = 0
    while engine.has_work:
        engine.step()
        n_steps += 1
        engine.audit()
        if rng.random() < 0.25:
            engine.scheduler.prefill.tokens_per_s = rng.choice([1e-3, 1e-3, 1e-3, 1e12])
            engine.scheduler.preempt_youngest()
            engine.audit()
        if rng.random() < 0.1:
            empty(engine)
        if rng.random() < 0.05:
            shrink(llm, int(total * rng.uniform(0.6, 1.0)))
        if n_steps == 9:
            for sequence in doomed:
                engine.abort(sequence)
    llm.resize(total)
    assert [s.output_ids for s in sequences] == expected
    assert engine.cache.swap.n_loaded > n_before, "nobody came back from host memory"
    assert all(s.error is None for s in sequences)
    check_nothing_is_left(engine)


def shrink(llm: LLM, n_bytes: int) -> None:
    try:
        llm.resize(n_bytes)
    except NotEnoughMemoryError:
        llm.loaded.engine.audit()  # the pool works on as it was


@dataclasses.dataclass
class Crowd:
    """As many requests as run at once, and their answers one by one. Together they need more than the least pool, which
    a device maps in whole granules; where windows give pages back, less than their length says."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def crowd(llm: LLM) -> Crowd:
    n_output = 200 if llm.loaded.resolved.device == "cuda" else 40
    all_prompts = [[(i * 37 + j * (i + 3)) % 200 for j in range(40)] for i in range(8)]
    ways = [dataclasses.replace(params(i), max_tokens=n_output) for i in range(8)]
    return Crowd(all_prompts, ways, solo(llm.loaded.engine, all_prompts, ways))


def test_too_little_memory_for_all(llm: LLM, engine: Engine, crowd: Crowd) -> None:
    """Requests that together need much more than the pool: they take turns, and nothing runs twice."""
    total, loaded = llm.memory()["total_bytes"], llm.loaded
    least_bytes = max(loaded.least_pool_bytes, request_need(engine, 40 + crowd.params[0].max_tokens))
    llm.resize(loaded.dense_bytes + loaded.scratch_bytes + least_bytes)
    try:
        n_saved, n_preempted = engine.cache.swap.n_saved, engine.scheduler.n_preemptions
        sequences = [engine.add(prompt, way) for prompt, way in zip(crowd.prompts, crowd.params, strict=True)]
        engine.run_until(sequences)
        assert [s.output_ids for s in sequences] == crowd.answers
        n_gave_way = engine.scheduler.n_preemptions - n_preempted
        assert engine.cache.swap.n_saved - n_saved == n_gave_way
        if not engine.cache.states:  # states are had at once or not at all: those requests wait instead
            assert n_gave_way > 0
    finally:
        llm.resize(total)
    check_nothing_is_left(engine)


def request_need(engine: Engine, n_tokens: int) -> int:
    """A pool that holds about two of the requests beside what must stay."""
    needs = engine.cache.peak_pages(n_tokens, 48)
    n_bytes = sum(n * engine.pool.allocator.unit_bytes(kind) for kind, n in needs.items())
    return 2 * n_bytes + 2 * engine.layout.huge_bytes


def test_a_swapped_request_can_be_cancelled(engine: Engine) -> None:
    sequence = engine.add([5, 6, 7, 8] * 10, params(1))
    while sequence.n_output < 3:
        engine.step()
    assert engine.scheduler.preempt_youngest()
    assert engine.cache.swap.used_bytes() > 0 and sequence.state == "waiting"
    engine.abort(sequence)
    while engine.has_work:
        engine.step()
    check_nothing_is_left(engine)


def test_what_is_cheaper_is_done(engine: Engine) -> None:
    """Fast prompts, or a full host memory: the request is run again. Slow prompts: its pages move."""
    for rate, limit_bytes, moved in ((1e12, 1 << 20, 0), (1e-3, 100, 0), (1e-3, 1 << 20, 1), (0.0, 1 << 20, 0)):
        swap = engine.cache.swap
        swap.slots.limit_bytes = swap.slots.taken_bytes + limit_bytes if moved else limit_bytes
        sequence: Sequence = engine.add([5, 6, 7, 8] * 10, params(1))
        engine.step()
        engine.scheduler.prefill.tokens_per_s, n_before = rate, swap.n_saved
        engine.scheduler.preempt_youngest()
        assert swap.n_saved - n_before == moved, rate
        swap.slots.limit_bytes = 8 << 20
        engine.run_until([sequence])
        empty(engine)
    check_nothing_is_left(engine)


def test_prompts_are_timed(llm: LLM) -> None:
    engine = llm.loaded.engine
    engine.scheduler.prefill = type(engine.scheduler.prefill)()
    sequence = engine.add([int(i) for i in np.arange(150) % 97], SamplingParams(4, 0.0, ignore_eos=True))
    engine.run_until([sequence])
    assert 10 < engine.scheduler.prefill.tokens_per_s < 1e7
