"""Wrong arguments of the Python API: one BadInputError each, and nothing of a refused call stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from script_model import ALPHABET, write_script_model

from rimuru import LLM, SamplingParams
from rimuru.base.errors import BadInputError, ContextLengthError, RimuruError

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("script") / "a model é.gguf")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu") as loaded:
        yield loaded


@pytest.mark.parametrize(
    "prompt", ["", [[]], ["A", ""], [99999], [-1], 5, None, [1.5], [True], b"abc", [["A"]], {"a": 1}, [None]]
)
def test_prompts_that_are_none(llm: LLM, prompt: Any) -> None:
    with pytest.raises(BadInputError):
        llm.generate(prompt, GREEDY)
    assert llm.memory()["requests"] == [] and not llm.loaded.engine.has_work


def test_a_refused_prompt_takes_the_others_along(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        llm.generate(["0", "A" * 600], GREEDY)
    assert not llm.loaded.engine.has_work


def test_numpy_prompts_are_ids(llm: LLM) -> None:
    ids = np.array(llm.tokenize("A"))
    assert llm.generate(ids, GREEDY)[0].text == ALPHABET[1:]
    assert [a.text for a in llm.generate([ids, "Y"], GREEDY)] == [ALPHABET[1:], "Z"]


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "a"])
def test_pieces_that_are_none(llm: LLM, chunk: Any) -> None:
    with pytest.raises(BadInputError, match="chunk"):
        llm.logits([1, 2], chunk=chunk)


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": -1}, {"max_tokens": 1.5}, {"temperature": -1}, {"temperature": float("nan")},
        {"temperature": 1e300}, {"temperature": "1"}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": -0.1},
        {"min_p": float("nan")}, {"repetition_penalty": 0}, {"repetition_penalty": 1e-300},
        {"presence_penalty": float("inf")}, {"frequency_penalty": 1e300}, {"stop": 5}, {"stop": [1]},
        {"seed": "a"}, {"logit_bias": {0: float("nan")}}, {"logit_bias": {"a": 1.0}}, {"logit_bias": [1]},
        {"logit_bias": {0: "x"}}, {"logprobs": -1}, {"n": 0},
    ],
)  # fmt: skip
def test_sampling_values(values: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        SamplingParams(**values)


@pytest.mark.filterwarnings("error")
def test_ends_of_the_sampling_ranges(llm: LLM) -> None:
    """The smallest and largest values that are accepted: no overflow, no division by zero, a whole answer."""
    for temperature in (1e-45, 1e-30, 1e6):
        for penalty in (1e-6, 1.0, 1e6):
            params = SamplingParams(
                max_tokens=3, temperature=temperature, repetition_penalty=penalty, presence_penalty=-1e6,
                frequency_penalty=1e6, logit_bias={0: float("-inf"), 1: 1e30}, seed=-1,
            )  # fmt: skip
            assert len(llm.generate("A", params)[0].token_ids) >= 1


def test_any_whole_number_is_a_seed(llm: LLM, model: Path) -> None:
    answers = []
    for seed in (-1, 0, (1 << 63) + 1, (1 << 63) + 2, 1 << 200):
        params = SamplingParams(max_tokens=8, temperature=20.0, seed=seed)
        answers.append(tuple(llm.generate("0", params)[0].token_ids))
        assert answers[-1] == tuple(llm.generate("0", params)[0].token_ids)
    assert len(set(answers)) >= 4  # 0 and 2**200 are the same seed modulo 2**64
    with LLM(model, device="cpu", seed=-7) as negative:
        assert negative.generate("A", GREEDY)[0].text == ALPHABET[1:]


@pytest.mark.parametrize(
    "keywords",
    [
        {"device": "tpu"}, {"memory": "1KiB"}, {"memory": -1}, {"memory": float("nan")}, {"memory": "inf"},
        {"threads": 0}, {"threads": 1.5}, {"context": 0}, {"context": 513}, {"kv_type": "q8"},
        {"resident_experts": -1}, {"resident_experts": 2.0}, {"resident_experts": float("nan")},
        {"resident_experts": []}, {"resident_experts": 10**9}, {"seed": "a"}, {"seed": None},
        {"expert_offload_limit": -1}, {"expert_offload_limit": "a"}, {"max_step_tokens": 0}, {"policy": "x"},
    ],
)  # fmt: skip
def test_keywords(model: Path, keywords: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        LLM(model, **{"device": "cpu", **keywords})


def test_unknown_keywords_are_named(model: Path) -> None:
    with pytest.raises(TypeError, match="bogus"):
        LLM(model, bogus=1)


def test_more_memory_than_the_machine_has(model: Path) -> None:
    with LLM(model, device="cpu", memory="4096TiB", max_sequences=2) as llm:
        assert llm.memory()["total_bytes"] <= psutil.virtual_memory().total
        assert llm.generate("A", GREEDY)[0].text == ALPHABET[1:]


def test_a_closed_model_says_so(model: Path) -> None:
    llm = LLM(model, device="cpu")
    stream = llm.stream("0", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate("A"), lambda: next(stream), llm.memory, lambda: llm.tokenize("a"),
        lambda: llm.logits([1]), lambda: llm.resize("1GiB"), lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):  # fmt: skip
        with pytest.raises(RimuruError, match="closed"):
            call()
