"""Conversations on the real shape of a hybrid, without weights (hybrid_world.py): what is computed again, and what not.

Every answer is checked: it is right only if states and KV were those of exactly the prefix.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hybrid_world import CALL, END, N_VOCAB, World, expected_answer, make_world, read_token

from rimuru.request import SamplingParams

GB = 10**9
OVERLAPS = pytest.mark.parametrize("overlaps", [False, True], ids=["serial", "overlapped"])


def text(rng: np.random.Generator, n_tokens: int) -> list[int]:
    """A turn: n_tokens, the last of which ends it."""
    return [*rng.integers(3, N_VOCAB, n_tokens - 1).tolist(), END]


@OVERLAPS
@pytest.mark.parametrize(
    ("memory_bytes", "host_bytes", "policy"),
    [(24 * GB, 0, "cost"), (16 * GB, 0, "cost"), (16 * GB, 0, "paper"), (12 * GB, 2 * GB, "paper")],
)
def test_every_later_turn_computes_only_its_own_tokens(
    memory_bytes: int, host_bytes: int, policy: str, overlaps: bool
) -> None:
    """8,000 tokens, then turns that add at most 100 each; at 16 GB and below the pool is full of experts."""
    world = make_world(memory_bytes=memory_bytes, host_bytes=host_bytes, policy=policy, overlaps=overlaps)
    rng = np.random.default_rng(0)
    prompt = text(rng, 500) + text(rng, 7500)
    before: list[int] = []
    for turn in range(12):
        n_run = world.runner.n_run
        sequence = world.ask(prompt)
        n_known = len(before)  # the last answer's last token was chosen, but not always run
        assert n_known - 1 <= sequence.n_reused <= n_known or (turn == 0 and sequence.n_reused == 0)
        n_beyond = 1 if overlaps else 0  # the step that was queued before the end was known
        assert world.runner.n_run - n_run <= len(prompt) - sequence.n_reused + sequence.n_output - 1 + n_beyond
        if turn:
            assert len(prompt) - sequence.n_reused <= 100
        before = sequence.tokens
        prompt = before + ([] if before[-1] == END else [END]) + text(rng, 58)


@OVERLAPS
def test_edits_repeats_and_branches_compute_what_differs(overlaps: bool) -> None:
    world = make_world(memory_bytes=16 * GB, overlaps=overlaps)
    rng = np.random.default_rng(1)
    system, first = text(rng, 300), text(rng, 200)
    answer = world.ask(system + first).output_ids
    assert world.ask(system + first).n_reused == 499, "the same again: all but the last token"
    history = system + first + answer + ([] if answer[-1] == END else [END])
    second = text(rng, 80)
    world.ask(history + second)
    edited = world.ask(history + text(rng, 70))
    assert len(history) - 2 <= edited.n_reused <= len(history), "the last turn was edited"
    assert world.ask(system + text(rng, 40)).n_reused == 300, "another conversation after the same system prompt"
    other = system[:-2] + [5, 6, 7] + first
    assert world.ask(other).n_reused == 0, "no snapshot stands for a part of a system prompt"


@OVERLAPS
def test_the_turn_after_a_tool_call_reuses_everything_up_to_the_call(overlaps: bool) -> None:
    """The call comes back as the template writes it, which is not always as the model wrote it."""
    world = make_world(memory_bytes=16 * GB, overlaps=overlaps)
    rng = np.random.default_rng(2)
    prompt = text(rng, 600) + text(rng, 150)
    while CALL not in expected_answer(prompt, 40)[4:-4]:
        prompt = prompt[:-4] + text(rng, 4)
    sequence = world.ask(prompt)
    at = sequence.output_ids.index(CALL)
    assert at >= 4
    as_written = sequence.tokens + ([] if sequence.tokens[-1] == END else [END]) + text(rng, 60)
    assert world.ask(as_written).n_reused >= len(sequence.tokens) - 1
    rewritten = sequence.tokens[: len(prompt) + at + 1] + [9, 8, 7, END] + text(rng, 60)
    assert rewritten[len(prompt) + at + 1] != sequence.tokens[len(prompt) + at + 1]
    assert world.ask(rewritten).n_reused == len(prompt) + at + 1
    without_call = prompt + sequence.output_ids[: max(1, at // 2)] + text(rng, 20)
    assert world.ask(without_call).n_reused == len(prompt) - 1


def borders(*marks: int) -> list[int]:
    return sorted({k + d for k in marks for d in (-1, 0, 1) if k + d > 0})


@OVERLAPS
def test_prompts_that_part_at_every_border(overlaps: bool) -> None:
    """k shared tokens around page, chunk and snapshot borders: the hit is the longest snapshot within them, and the
    answers (checked in `ask`) are those of a cold engine."""
    world = make_world(memory_bytes=64 * GB, overlaps=overlaps, max_step_tokens=64)
    assert world.cache.kv is not None
    n_unit = world.cache.kv.n_unit
    rng = np.random.default_rng(3)
    base = text(rng, 90) + text(rng, 70) + text(rng, 100)
    known: list[list[int]] = []

    def ask_and_check(prompt: list[int]) -> None:
        sequence = world.ask(prompt, 3, ignore_end=True)
        longest = max((len(p) for p in known if len(p) < len(prompt) and prompt[: len(p)] == p), default=0)
        assert sequence.n_reused == longest, (sequence.n_reused, longest)
        ends = [i + 1 for i, token_id in enumerate(prompt) if token_id == END]
        points = {*ends[:1], *ends[-3:], len(prompt) - 1}
        known.extend(prompt[:n] for n in points if n < len(prompt))
        known.append(sequence.tokens[:-1])

    ask_and_check(base)
    marks = [n_unit * i for i in range(1, len(base) // n_unit + 1)] + [64, 128, 192, 256, 90, 160, len(base) - 1]
    for k in borders(*marks):
        ask_and_check(base[:k] + [3 + (token + 1) % 90 for token in (base * 2)[k : k + 20]])
    assert len(known) > 80


@OVERLAPS
def test_many_requests_in_one_batch_share_and_do_not_mix(overlaps: bool) -> None:
    """Sixteen prompts with prefixes of each other, prefilled together, cold and warm."""
    world = make_world(memory_bytes=64 * GB, overlaps=overlaps, max_step_tokens=200)
    rng = np.random.default_rng(4)
    system = text(rng, 130)
    users = [text(rng, 60) for _ in range(4)]
    prompts = [system + users[i % 4][: 20 + i] + text(rng, 1 + i) for i in range(16)]
    cold = world.ask_all(prompts)
    assert cold[0].n_reused == 0 and all(s.n_reused < s.n_prompt for s in cold)
    for sequence, prompt in zip(world.ask_all(prompts), prompts, strict=True):
        assert sequence.n_reused == len(prompt) - 1


def test_a_cold_request_gets_no_state_of_another() -> None:
    """Pages are used again and again, by states, KV and experts: `fresh` is what makes a state empty."""
    world = make_world(memory_bytes=8 * GB)
    rng = np.random.default_rng(5)
    for _ in range(20):
        prompts = [text(rng, int(rng.integers(1, 200))) for _ in range(6)]
        assert all(sequence.n_reused == 0 for sequence in world.ask_all(prompts, 4))
    assert any(read_token(0, i) != 0 for i in range(3, N_VOCAB))


# ---- snapshots in RAM
def conversations(world: World, n: int, rng: np.random.Generator) -> list[list[int]]:
    prompts = []
    for _ in range(n):
        prompt = text(rng, 400)
        world.ask(prompt, 4)
        prompts.append(prompt)
    return prompts


def test_snapshots_move_to_ram_and_back() -> None:
    """A pool that is full of experts: states to keep go to RAM, and come back from there, in bounded memory."""
    world = make_world(memory_bytes=8 * GB, host_bytes=3 * GB)
    host = world.cache.snapshots.host
    assert host.n_slots == 3 * GB // host.slot_bytes >= 40
    rng = np.random.default_rng(6)
    n_resident = world.store.residency.n_resident if world.store else 0
    prompts = conversations(world, 6, rng)
    assert host.n_used > 0 and world.copier.host_bytes <= 3 * GB
    n_gone = n_resident - (world.store.residency.n_resident if world.store else 0)
    n_in = world.copier.n_in
    for prompt in prompts:
        assert world.ask(prompt + text(rng, 20), 4).n_reused >= len(prompt) - 1
    assert world.copier.n_in > n_in
    assert n_gone < 250, "states of one request and the KV of six, not the snapshots, took pages of experts"


def test_the_least_recently_used_snapshots_leave_first() -> None:
    world = make_world(memory_bytes=8 * GB, host_bytes=10 * 66_000_000)
    host = world.cache.snapshots.host
    rng = np.random.default_rng(7)
    prompts = conversations(world, 4, rng)
    again = world.ask(prompts[0] + [7], 2, ignore_end=True)  # the oldest is of use again
    assert again.n_reused >= 399
    prompts += conversations(world, 12, rng)
    assert host.is_full and world.copier.host_bytes <= 10 * 66_000_000
    hits = [world.ask(prompt + [8], 1).n_reused > 0 for prompt in reversed(prompts)]
    assert hits[0] and not hits[-2], "the newest is there, an old one is not"
    assert world.cache.snapshots.host.n_used <= host.n_slots


def test_snapshots_take_a_bounded_share_from_experts() -> None:
    world = make_world(memory_bytes=12 * GB)
    rng = np.random.default_rng(8)
    conversations(world, 40, rng)
    allocator = world.pool.allocator
    held = sum(ids.size * allocator.unit_bytes(k) for s in world.cache.snapshots.all() for k, ids in s.pages.items())
    assert 0 < held <= world.pool.total_bytes / 8
    assert world.store is not None and world.store.residency.n_resident > 3500


# ---- every way out
@OVERLAPS
@pytest.mark.parametrize("host_bytes", [0, GB])
def test_cancels_at_any_time_leave_nothing_behind(overlaps: bool, host_bytes: int) -> None:
    """400 requests with random cancels: before the first step, in a prompt, while decoding; then all is as at first."""
    world = make_world(memory_bytes=8 * GB, overlaps=overlaps, host_bytes=host_bytes, max_step_tokens=96)
    engine, rng, choose = world.engine, np.random.default_rng(9), random.Random(9)
    system = text(rng, 60)
    running = []
    for number in range(400):
        prompt = (system if number % 2 else []) + text(rng, choose.randrange(1, 150))
        params = SamplingParams(max_tokens=choose.randrange(1, 30), temperature=0.0)
        running.append((prompt, params, engine.add(prompt, params)))
        for _ in range(choose.randrange(3)):
            engine.step()
        if choose.random() < 0.5:
            engine.abort(choose.choice(running)[2])
        if number % 50 == 0:
            engine.audit()
        running = [entry for entry in running if not check_finished(*entry)]
    engine.run_until([sequence for _, _, sequence in running])
    while engine.has_work:
        engine.step()
    assert all(check_finished(*entry) for entry in running)
    assert len(world.cache) == 0
    world.cache.audit()
    while world.cache.evict_prefix(10_000):
        pass
    while (oldest := world.cache.snapshots.oldest()) is not None:
        world.cache.snapshots.release(world.cache.snapshots.forget(oldest))
    in_use = {kind: world.pool.allocator.pages_in_use(kind) for kind in ("ssm", "conv", "kv")}
    assert in_use == {"ssm": 0, "conv": 0, "kv": 0} and world.cache.snapshots.host.n_used == 0
    assert world.ask(text(rng, 20_000), 2).n_reused == 0, "a request of full size is admitted"


def check_finished(prompt: list[int], params: SamplingParams, sequence: object) -> bool:
    if not sequence.is_finished:  # type: ignore[attr-defined]
        return False
    output = sequence.output_ids  # type: ignore[attr-defined]
    assert output == expected_answer(prompt, params.max_tokens)[: len(output)]
    return True


@OVERLAPS
def test_a_failing_step_keeps_no_state_of_its_requests(overlaps: bool) -> None:
    world = make_world(memory_bytes=16 * GB, overlaps=overlaps)
    rng = np.random.default_rng(10)
    prompt = text(rng, 90)
    run = world.runner.run

    def fail(batch: object) -> np.ndarray:
        world.runner.run = run  # type: ignore[method-assign]
        raise OSError("the device is gone")

    sequence = world.engine.add(prompt, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        world.engine.step()
    world.runner.run = fail  # type: ignore[method-assign]
    world.engine.run_until([sequence])
    assert sequence.error is not None
    world.engine.audit()
    assert world.ask(prompt).n_reused <= len(prompt) - 1
