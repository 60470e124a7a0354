"""The scheduler's core, without weights: budget, order, admission by pages, preemption, cancellation, no leaks."""

from __future__ import annotations

import random

import pytest
from engine_fakes import N_VOCAB, PAGE_TOKENS, expected_answer, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.base.errors import BadInputError, ContextLengthError, NotEnoughMemoryError
from rimuru.request import SamplingParams, Sequence


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "overlapped"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test runs with steps one after another, and with the host one step behind."""
    monkeypatch.setattr("engine_fakes.fake_engine.__kwdefaults__", {"overlaps": request.param})
    return bool(request.param)


GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def prompt(seed: int, n_tokens: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(N_VOCAB) for i in range(n_tokens)]


def run(engine, sequences: list[Sequence], most_steps: int = 2000) -> None:  # type: ignore[no-untyped-def]
    for _ in range(most_steps):
        if all(s.is_finished for s in sequences):
            return
        engine.step()
    raise AssertionError("the sequences did not end")


def test_several_prompts_give_what_each_gives_alone() -> None:
    engine = fake_engine(n_huge=8)
    prompts = [prompt(i, n) for i, n in enumerate((1, 3, 4, 5, 17, 30))]
    sequences = [engine.add(p, GREEDY) for p in prompts]
    run(engine, sequences)
    assert [s.output_ids for s in sequences] == [expected_answer(p, 6) for p in prompts]


def test_budget_is_never_exceeded_and_decoding_is_never_starved() -> None:
    engine = fake_engine(n_huge=8, max_step_tokens=8)
    first = engine.add(prompt(1, 2), SamplingParams(max_tokens=12, temperature=0.0))
    engine.step()
    long = engine.add(prompt(2, 40), GREEDY)
    outputs = []
    while not first.is_finished:
        engine.step()
        outputs.append(first.n_output)
    assert (
        outputs == list(range(outputs[0], 13)) and outputs[0] <= 2
    )  # one token in every step beside the long prompt's pieces
    run(engine, [long])
    assert max(engine.runner.steps) <= 8
    assert long.output_ids == expected_answer(prompt(2, 40), 6)


def test_waiting_requests_start_in_order_and_priority_goes_first() -> None:
    engine = fake_engine(n_huge=8, max_sequences=1)
    sequences = [engine.add(prompt(i, 3), GREEDY) for i in range(3)]
    urgent = engine.add(prompt(9, 3), GREEDY, priority=1)
    ended: list[Sequence] = []
    while len(ended) < 4:
        ended += engine.step().ended
    assert ended == [urgent, *sequences]


def test_nobody_is_held_back_for_the_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room wants one to run. Who is first in the queue waits a second for each that runs, unless one ends."""
    engine = fake_engine(n_huge=8)
    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler.room, "admits", lambda *_: False)
    scheduler.clock = lambda: now
    now, params = 0.0, SamplingParams(max_tokens=30, temperature=0.0)
    sequences = [engine.add(prompt(i, 3), params) for i in range(4)]
    running = []
    for step in range(20):
        now = 0.25 * step
        engine.step()
        running.append(len(scheduler.running))
    assert running == [1] * 4 + [2] * 8 + [3] * 8  # at 1 s, 2 s later, and the fourth 3 s after that
    engine.abort(sequences[0])
    engine.step()
    now += 3.25
    engine.step()
    assert len(scheduler.running) == 3 and sequences[3] in scheduler.running
    run(engine, sequences[1:])
    assert [s.output_ids for s in sequences[1:]] == [expected_answer(prompt(i, 3), 30) for i in range(1, 4)]


def test_preemption_by_recompute_keeps_the_answers() -> None:
    """Eight pages of four tokens for three requests that grow to 20 tokens each: somebody has to give way."""
    engine = fake_engine(n_huge=1)
    params = SamplingParams(max_tokens=14, temperature=0.0)
    prompts = [prompt(i, 6) for i in range(3)]
    sequences = [engine.add(p, params) for p in prompts]
    run(engine, sequences)
    assert engine.scheduler.n_preemptions > 0
    assert [s.output_ids for s in sequences] == [expected_answer(p, 14) for p in prompts]


def test_a_request_that_can_never_fit_fails_alone() -> None:
    engine = fake_engine(n_huge=1)  # 32 tokens
    ok = engine.add(prompt(1, 4), GREEDY)
    too_long = engine.add(prompt(2, 40), GREEDY)
    after = engine.add(prompt(3, 4), GREEDY)
    run(engine, [ok, too_long, after])
    assert isinstance(too_long.error, NotEnoughMemoryError)
    assert after.output_ids == expected_answer(prompt(3, 4), 6)


def test_pages_that_were_not_to_be_had_once_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only request fits, and gets no pages for three steps: it starts in the fourth. For longer: it fails."""
    engine = fake_engine(n_huge=8)
    extend, n_refusals = engine.cache.extend, 3

    def refusing(seq_id: int, n_tokens: int) -> bool:
        nonlocal n_refusals
        n_refusals -= 1
        return n_refusals < 0 and extend(seq_id, n_tokens)

    monkeypatch.setattr(engine.cache, "extend", refusing)
    first = engine.add(prompt(1, 5), GREEDY)
    run(engine, [first])
    assert first.output_ids == expected_answer(prompt(1, 5), 6)
    n_refusals = 6  # prefixes that nobody uses go first
    second = engine.add(prompt(2, 5), GREEDY)
    run(engine, [second])
    assert isinstance(second.error, NotEnoughMemoryError)
    third = engine.add(prompt(3, 5), GREEDY)
    run(engine, [third])
    assert third.output_ids == expected_answer(prompt(3, 5), 6)
    engine.audit()


def test_prompts_are_checked_before_any_page_is_taken() -> None:
    engine = fake_engine(n_huge=8, context=16)
    for bad in ([], [N_VOCAB], [-1]):
        with pytest.raises(BadInputError):
            engine.add(bad, GREEDY)
    with pytest.raises(ContextLengthError, match="16 tokens"):
        engine.add(prompt(1, 16), GREEDY)
    with pytest.raises(BadInputError):
        engine.add([1], SamplingParams(logit_bias={N_VOCAB: 1.0}))
    edge = engine.add(prompt(1, 15), GREEDY)
    run(engine, [edge])
    assert edge.finish_reason == "length" and edge.n_output == 1


def test_end_of_generation_tokens_stop_unless_ignored() -> None:
    start = prompt(5, 3)
    answer = expected_answer(start, 6)
    engine = fake_engine(n_huge=8, eog=frozenset({answer[2]}))
    stopped, ignoring = engine.add(start, GREEDY), engine.add(start, SamplingParams(6, 0.0, ignore_eos=True))
    run(engine, [stopped, ignoring])
    first = answer.index(answer[2])
    assert (stopped.output_ids, stopped.finish_reason) == (answer[: first + 1], "stop")
    assert (ignoring.output_ids, ignoring.finish_reason) == (answer, "length")


def test_max_tokens_zero_ends_at_once() -> None:
    engine = fake_engine(n_huge=2)
    sequence = engine.add([1, 2], SamplingParams(max_tokens=0))
    assert sequence.is_finished and sequence.finish_reason == "length" and not engine.has_work


@pytest.mark.parametrize("n_shared", [PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS, 15])
def test_prefix_reuse_is_truthful_and_changes_nothing(n_shared: int) -> None:
    engine = fake_engine(n_huge=8)
    first = prompt(1, 16)
    second = first[:n_shared] + prompt(2, 16 - n_shared)
    a = engine.add(first, GREEDY)
    run(engine, [a])
    n_before = sum(engine.runner.steps)
    b = engine.add(second, GREEDY)
    run(engine, [b])
    assert b.output_ids == expected_answer(second, 6)
    assert b.n_reused == n_shared // PAGE_TOKENS * PAGE_TOKENS
    assert sum(engine.runner.steps) - n_before == len(second) - b.n_reused + 5


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(4, 20), st.booleans())
def test_random_requests_and_cancels_leave_nothing_behind(
    rng: random.Random, n_huge: int, budget: int, prefix: bool
) -> None:
    """Requests come and are cancelled at every stage; the rest answer as alone; then every page is back (M05)."""
    engine = fake_engine(n_huge, max_step_tokens=budget, max_sequences=4, context=30, prefix_cache=prefix)
    alive: list[tuple[Sequence, list[int], int]] = []
    for number in range(30):
        if rng.random() < 0.7:
            start = prompt(rng.randrange(5), rng.randrange(1, 12))
            n_new = rng.randrange(1, 9)
            alive.append((engine.add(start, SamplingParams(n_new, 0.0)), start, n_new))
        if alive and rng.random() < 0.25:
            engine.abort(alive.pop(rng.randrange(len(alive)))[0])
        if number % 2:
            engine.step()
            engine.audit()
    run(engine, [s for s, _, _ in alive])
    for sequence, start, n_new in alive:
        assert sequence.output_ids == expected_answer(start, n_new)
    engine.step()  # takes in the last cancellations
    assert not engine.has_work and len(engine.cache) == 0
    engine.cache.evict_prefix(1 << 20)
    assert engine.pool.stats()["free_bytes"] == engine.pool.total_bytes


def test_a_step_that_breaks_fails_its_requests_only() -> None:
    engine = fake_engine(n_huge=8, max_sequences=1)
    doomed, waiting = engine.add(prompt(1, 3), GREEDY), engine.add(prompt(2, 3), GREEDY)
    engine.runner.fail_next = True
    report = engine.step()
    assert report.ended == [doomed] and doomed.error is not None and "on fire" in str(doomed.error)
    run(engine, [waiting])
    assert waiting.output_ids == expected_answer(prompt(2, 3), 6)
    engine.audit()
