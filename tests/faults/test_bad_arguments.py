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
        {"logit_bias": {0: "x"}}, {"logprobs": -1}, {"n": 0}, {"n": 129}, {"n": 10**9}, {"n": True}, {"n": 10**5000},
        {"temperature": 10**400}, {"temperature": -(10**5000)}, {"top_p": 10**400}, {"max_tokens": -(10**5000)},
        {"temperature": True}, {"logit_bias": {0: True}}, {"logit_bias": {1.5: 1.0}}, {"seed": 1.5},
    ],
)  # fmt: skip
def test_sampling_values(values: dict[str, Any]) -> None:
    with pytest.raises(BadInputError) as refused:
        SamplingParams(**values)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


HUGE = (10**9, 2**31 - 1, 2**31, 2**63, 10**23, 10**400)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values",
    [
        *({"top_k": n} for n in HUGE), *({"max_tokens": n} for n in HUGE), *({"logprobs": n} for n in HUGE),
        *({"seed": n} for n in HUGE), *({"logit_bias": {66: -float(x)}} for x in (1e308, 3.5e38, 1e6)),
        {"logit_bias": {66: -(10**400)}}, {"logit_bias": {66: float("-inf")}}, {"n": 128},
    ],
)  # fmt: skip
def test_huge_values_neither_fail_nor_reach_batch_mates(llm: LLM, values: dict[str, Any]) -> None:
    """Whatever SamplingParams lets through, the step takes; a mate in the same step gets what it gets alone."""
    params = SamplingParams(**{"max_tokens": 30, "temperature": 0.0, **values})
    mate = llm.stream("A", GREEDY)
    text = next(mate).text
    answer = llm.generate("0" if "max_tokens" not in values else "A", params)[0]
    assert len(answer.token_ids) >= 1 and len(answer.alternatives) == params.n - 1
    assert text + "".join(piece.text for piece in mate) == ALPHABET[1:]


def test_token_ids_of_biases_lie_in_the_vocabulary(llm: LLM) -> None:
    for token_id in (-1, 10**6, 2**31, 10**23):
        with pytest.raises(BadInputError, match="vocabulary"):
            llm.generate("A", SamplingParams(logit_bias={token_id: 1.0}, n=2))
    assert not llm.loaded.engine.has_work


@pytest.mark.parametrize("ids", [["a"], None, "abc", [1.5], [True], b"ab", 5, [-1], [10**9], [10**400], {1: 2}])
def test_detokenize(llm: LLM, ids: Any) -> None:
    with pytest.raises(BadInputError):
        llm.detokenize(ids)


@pytest.mark.parametrize("text", [None, 5, b"x", [1], ["x"]])
def test_tokenize(llm: LLM, text: Any) -> None:
    with pytest.raises(BadInputError):
        llm.tokenize(text)


@pytest.mark.parametrize("name", [None, 5, b"path", "", [], "a\0b", "n" * 5000])
def test_models_that_are_none(name: Any) -> None:
    with pytest.raises(BadInputError) as refused:
        LLM(name)
    assert len(str(refused.value)) < 6000


def test_other_arguments(llm: LLM, model: Path) -> None:
    for call in (
        lambda: LLM(model, progress=5), lambda: LLM(model, device=None), lambda: LLM(model, seed=1.5),
        lambda: LLM(model, memory=-(10**400)), lambda: LLM(model, threads=-(10**400)),
        lambda: LLM(model, context=10**400),
        lambda: llm.generate("A", {"n": 1}), lambda: llm.generate("A", 5), lambda: llm.resize(None),
        lambda: llm.chat(None), lambda: llm.chat("hello"), lambda: llm.chat([5]), lambda: llm.chat([]),
        lambda: llm.logits(None), lambda: llm.logits("") , lambda: llm.logits([10**400]),
        lambda: next(llm.stream(None)), lambda: next(llm.stream("A", 5)),
    ):  # fmt: skip
        with pytest.raises(BadInputError):
            call()
    assert llm.generate("A", GREEDY)[0].text == ALPHABET[1:]


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
