"""Prefix reuse of hybrids in a real engine: a warm answer is the cold one bit for bit, and says how much of its prompt
was not computed. Small random models of every kind of state, on the CPU and (marked `gpu`) on a card, there with
`deterministic`, since a warm prompt is run in other pieces than a cold one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, Completion, SamplingParams
from rimuru.base.units import MIB, ceil_div
from rimuru.engine.room import ExpertRoom
from tools.make_random_gguf import write_random_model

ARCHITECTURES = ("qwen35moe", "qwen3next", "granitehybrid", "nemotron_h_moe", "jamba", "lfm2moe")
END = 160 - 1
CHUNK = 32
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=5)
DRAWN = SamplingParams(max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / f"{request.param}.gguf"
    n_blocks = 16 if request.param == "nemotron_h_moe" else 4  # more experts than a few of its huge pages hold
    return write_random_model(
        path, request.param, "q8_0", seed=4, tokenizer=False, context_length=512, block_count=n_blocks
    )


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_model(model: Path, device: str, **more: object) -> LLM:
    """A model without a tokenizer has no token that ends a turn: END is made one."""
    own: dict[str, object] = {"threads": 2} if device == "cpu" else {"deterministic": True, "memory": "1GB"}
    options = {"device": device, "max_step_tokens": CHUNK} | own | more
    llm = LLM(model, **options)  # type: ignore[arg-type]
    llm.loaded.engine.eog_ids = frozenset((END,))
    return llm


@pytest.fixture(scope="module")
def cold(model: Path, device: str) -> Iterator[LLM]:
    """Never reuses anything."""
    with open_model(model, device, prefix_cache=False) as llm:
        yield llm


def text(rng: np.random.Generator, n_tokens: int) -> list[int]:
    return [*rng.integers(0, END, n_tokens - 1).tolist(), END]


def same(found: Completion, expected: Completion) -> bool:
    """Equal tokens, and log-probabilities equal bit for bit."""
    return found.token_ids == expected.token_ids and found.logprobs == expected.logprobs


def parting(base: list[int], k: int, n_more: int) -> list[int]:
    """A prompt that shares exactly k tokens with base."""
    return base[:k] + [(token + 1) % END for token in (base * 2)[k : k + n_more]]


def test_warm_equals_cold_at_every_border(model: Path, device: str, cold: LLM) -> None:
    """Shared tokens around page, chunk and snapshot borders: what is reused is the longest snapshot within them."""
    rng = np.random.default_rng(0)
    base = text(rng, 41) + text(rng, 30) + text(rng, 29)
    known: list[list[int]] = []
    with open_model(model, device, memory="1GB") as llm:
        kv = llm.loaded.engine.cache.kv
        assert kv is not None
        marks = [kv.n_unit * i for i in range(1, 100 // kv.n_unit + 1)] + [CHUNK, 2 * CHUNK, 41, 71, 99]
        ks = sorted({k + d for k in marks for d in (-1, 0, 1)})
        for prompt in (base, base, *(parting(base, k, 9) for k in ks)):
            warm = llm.generate([prompt], GREEDY)[0]
            assert same(warm, cold.generate([prompt], GREEDY)[0]), len(prompt)
            longest = max((len(p) for p in known if len(p) < len(prompt) and prompt[: len(p)] == p), default=0)
            assert warm.cached_tokens == longest and warm.prompt_tokens == len(prompt)
            ends = [i + 1 for i, token_id in enumerate(prompt) if token_id == END]
            known.extend(prompt[:n] for n in {*ends[:1], *ends[-3:], len(prompt) - 1} if n < len(prompt))
            known.append(prompt + warm.token_ids[:-1])
        assert not llm.loaded.engine.cache.open("none", [0, 1, 2, 3]).n_cached_tokens
        llm.loaded.engine.cache.release("none")
        llm.loaded.engine.audit()


def test_warm_logits_equal_cold_logits(model: Path, device: str, cold: LLM) -> None:
    """The whole row of next-token logits after a hit, over cuts of one prompt: log-probabilities of all tokens."""
    rng = np.random.default_rng(1)
    base = text(rng, 60)
    everything = SamplingParams(max_tokens=1, temperature=0.0, logprobs=160)
    with open_model(model, device, memory="1GB") as llm:
        for n in (30, 31, 47, 48, 49, 60):
            warm, expected = (one.generate([base[:n]], everything)[0] for one in (llm, cold))
            assert warm.logprobs is not None and len(warm.logprobs[0].top) == 160
            assert same(warm, expected) and (warm.cached_tokens > 0) == (n > 30)


def prompts_of_a_batch(rng: np.random.Generator) -> list[list[int]]:
    """Sixteen prompts; some share a system prompt, some are others' beginnings."""
    system = text(rng, 37)
    users = [text(rng, 33) for _ in range(4)]
    return [
        *(system + user for user in users),
        *(system + users[i][: 10 + i] + text(rng, 5) for i in range(4)),
        *(system + users[i] + text(rng, 20) for i in range(4)),
        *(text(rng, int(n)) for n in rng.integers(1, 60, 4)),
    ]


@pytest.mark.parametrize("overlaps", [False, True], ids=["serial", "overlapped"])
def test_many_in_one_batch_cold_and_warm(model: Path, device: str, cold: LLM, overlaps: bool) -> None:
    prompts = prompts_of_a_batch(np.random.default_rng(2))
    expected = [cold.generate([prompt], DRAWN)[0].token_ids for prompt in prompts]
    with open_model(model, device, memory="1GB") as llm:
        llm.loaded.engine.overlaps = overlaps
        for round_ in range(2):
            found = llm.generate(prompts, DRAWN)
            assert [answer.token_ids for answer in found] == expected
            for answer, prompt in zip(found, prompts, strict=True):
                assert answer.cached_tokens == len(prompt) - 1 if round_ else answer.cached_tokens < len(prompt)
        llm.loaded.engine.audit()


def test_clients_never_see_each_other(model: Path, device: str, cold: LLM) -> None:
    """1 to 16 clients with a prompt of their own each, cancels in between: every answer is the solo one (M09, M05)."""
    rng = np.random.default_rng(3)
    system = text(rng, 20)
    prompts = [(system if i % 2 else []) + text(rng, 12 + i) for i in range(16)]
    expected = [cold.generate([prompt], DRAWN)[0].token_ids for prompt in prompts]
    wrong: list[int] = []
    with open_model(model, device, memory="1GB") as llm:

        def client(number: int, n_rounds: int) -> None:
            for round_ in range(n_rounds):
                if (number + round_) % 3 == 0:  # leave after the first tokens: the request is cancelled
                    stream = llm.stream(prompts[number], DRAWN)
                    if next(stream).token_ids[0] != expected[number][0]:
                        wrong.append(number)
                    stream.close()  # type: ignore[attr-defined]
                elif llm.generate([prompts[number]], DRAWN)[0].token_ids != expected[number]:
                    wrong.append(number)

        for n_clients in (1, 2, 3, 4, 8, 16):
            clients = [threading.Thread(target=client, args=(i, 3)) for i in range(n_clients)]
            for thread in clients:
                thread.start()
            for thread in clients:
                thread.join()
        assert not wrong
        engine = llm.loaded.engine
        while engine.has_work:  # on a GPU the last step of a cancelled request may still be under way
            engine.step()
        assert len(engine.cache) == 0
        engine.audit()


def test_pieces_and_states_in_ram(model: Path, device: str) -> None:
    """A prompt in pieces, queued one behind the other on a GPU, answers as in one piece; so does one whose states come
    from RAM, where a GPU's snapshots go when they leave the pool. On the CPU they are gone then."""
    prompt = np.random.default_rng(5).integers(0, END, 150).tolist()
    with open_model(model, device, prefix_cache=False, max_step_tokens=256) as llm:
        expected = llm.generate([prompt], DRAWN)[0].token_ids
    with open_model(model, device, memory="1GB") as llm:
        cache = llm.loaded.engine.cache
        assert llm.generate([prompt], DRAWN)[0].token_ids == expected
        assert len(cache.snapshots) == 2
        while cache.snapshots.evict():
            pass
        assert cache.snapshots.host.n_used == (2 if device == "cuda" else 0)
        again = llm.generate([prompt], DRAWN)[0]
        assert again.token_ids == expected and again.cached_tokens == (149 if device == "cuda" else 0)
        llm.loaded.engine.audit()


def test_poisoned_pages_never_show(model: Path, device: str, cold: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """M01: pages that are given back are filled with NaN patterns, and all structures are audited after each step; in
    a large pool, and in one that is too small, so that pages change hands between experts, states and KV."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    prompts = prompts_of_a_batch(np.random.default_rng(2))
    expected = [cold.generate([prompt], DRAWN)[0].token_ids for prompt in prompts]
    with open_model(model, device, memory="1GB") as llm:
        assert llm.loaded.pool._poisons
        for _ in range(2):
            assert [answer.token_ids for answer in llm.generate(prompts, DRAWN)] == expected
            assert llm.generate([prompts[0]], GREEDY)[0].cached_tokens == len(prompts[0]) - 1
        huge_bytes = llm.loaded.layout.huge_bytes
    report = cold.memory()
    views = report["views"]
    pool_bytes = views["buffer"]["bytes"] + max(views["expert"]["bytes"] // 2, 3 * huge_bytes)
    if device == "cuda":  # memory is mapped in whole granules
        pool_bytes = 2 * MIB * (ceil_div(pool_bytes, 2 * MIB) + 1)
    with open_model(model, device, memory=report["dense_bytes"] + report["scratch_bytes"] + pool_bytes) as llm:
        for _ in range(2):
            assert [answer.token_ids for answer in llm.generate(prompts, DRAWN)] == expected
        room = llm.loaded.room
        assert isinstance(room, ExpertRoom)
        if device == "cpu":  # a granule holds more than these requests need
            assert room.n_shrunk + llm.loaded.engine.scheduler.n_preemptions > 0
