"""Hybrids whose states are a twentieth of the pool each, in which all experts do not fit beside them: a system prompt
that clients share, and a conversation that goes on, are not run again; and answers are those of a cold engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM, Completion, SamplingParams
from tools.make_random_gguf import write_random_model

END = 159
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=3)
POLICIES = ("paper", "cost", "fixed")


@dataclass(frozen=True)
class Tight:
    """A model, and what an engine for it holds beside and in the pool."""

    path: Path
    other_bytes: int
    huge_bytes: int
    state_bytes: int

    def open(self, n_states: int, policy: str) -> LLM:
        """An engine whose pool has the size of so many kept states."""
        n_huge = -(-n_states * self.state_bytes // self.huge_bytes)
        share = {"resident_experts": 0.4} if policy == "fixed" else {}
        return open_model(self.path, memory=self.other_bytes + n_huge * self.huge_bytes, policy=policy, **share)


def open_model(path: Path, **options: object) -> LLM:
    """A model without a tokenizer has no token that ends a turn: END is made one."""
    llm = LLM(path, device="cpu", threads=1, context=512, max_step_tokens=128, **options)  # type: ignore[arg-type]
    llm.loaded.engine.eog_ids = frozenset((END,))
    return llm


@pytest.fixture(scope="module", params=["qwen3next", "granitehybrid"])
def tight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tight:
    path = tmp_path_factory.mktemp("tight") / f"{request.param}.gguf"
    write_random_model(path, request.param, seed=6, tokenizer=False, context_length=512)
    with open_model(path, memory="1GB") as llm:
        report = llm.memory()
        other_bytes = report["dense_bytes"] + report["scratch_bytes"]
        return Tight(path, other_bytes, llm.loaded.layout.huge_bytes, llm.loaded.engine.cache.snapshots.slot_bytes)


def text(rng: np.random.Generator, n_tokens: int) -> list[int]:
    return [*rng.integers(0, END, n_tokens - 1).tolist(), END]


def same(found: Completion, expected: Completion) -> bool:
    """Equal tokens, and log-probabilities equal bit for bit."""
    return found.token_ids == expected.token_ids and found.logprobs == expected.logprobs


def residents(llm: LLM) -> int:
    return sum(llm.memory()["resident_experts"])


@pytest.mark.parametrize("n_states", [17, 20, 24])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_shared_system_prompt_is_run_once(tight: Tight, policy: str, n_states: int) -> None:
    """Six clients, one after the other, each with a turn of its own after 111 tokens that all share."""
    rng = np.random.default_rng(1)
    system = text(rng, 111)
    prompts = [system + text(rng, 40 + i) + text(rng, 9) for i in range(6)]
    with open_model(tight.path, memory="1GB", prefix_cache=False) as cold:
        expected = [cold.generate([prompt], GREEDY)[0] for prompt in prompts]
    with tight.open(n_states, policy) as llm:
        n_first = residents(llm)
        answers = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert all(same(found, wanted) for found, wanted in zip(answers, expected, strict=True))
        assert [answer.cached_tokens for answer in answers] == [0] + [111] * 5
        n_experts = llm.loaded.layout.expert.n_experts  # type: ignore[union-attr]
        assert n_experts / 4 < residents(llm) <= n_experts
        assert residents(llm) == n_first or policy != "fixed", "none gives way where their number is fixed"
        asked = llm.loaded.engine.cache.make_pages
        assert asked is not None and asked.__self__ is llm.loaded.room, "who is asked for pages is who decides"  # type: ignore[attr-defined]
        llm.loaded.engine.audit()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_that_goes_on_runs_its_new_turn(tight: Tight, policy: str) -> None:
    """And somebody else's, in between, does not make it start again where both begin alike."""
    rng = np.random.default_rng(2)
    system = text(rng, 60)
    history = system + text(rng, 30)
    with open_model(tight.path, memory="1GB", prefix_cache=False) as cold, tight.open(20, policy) as llm:
        n_known = 0
        for turn in range(5):
            answer = llm.generate([history], GREEDY)[0]
            assert same(answer, cold.generate([history], GREEDY)[0])
            assert answer.cached_tokens == n_known
            history = history + answer.token_ids
            n_known = len(history) - 1
            history += text(rng, 25)
            if turn == 3:
                other = system + text(rng, 20)
                answer = llm.generate([other], GREEDY)[0]
                assert answer.cached_tokens == 60 and same(answer, cold.generate([other], GREEDY)[0])
                n_known = llm.loaded.engine.cache.open("probe", history).n_cached_tokens
                llm.loaded.engine.cache.release("probe")
                assert n_known >= 60
        llm.loaded.engine.audit()
