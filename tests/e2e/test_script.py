"""SCRIPT (cases/make_tiny_gguf.py): a model whose answers are known in full, through API and command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rimuru import LLM, SamplingParams
from rimuru.cli import main

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SCRIPT_LOGPROB, OTHER_LOGPROB = -4.490571628547742e-06, -17.886


@pytest.fixture(scope="module")
def script(tiny_models: Path):  # type: ignore[no-untyped-def]
    with LLM(tiny_models / "script.gguf", device="cpu") as llm:
        yield llm


def test_chat_answers_the_alphabet(script: LLM) -> None:
    answer = script.chat([{"role": "user", "content": "anything"}], GREEDY)
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == (ALPHABET, "stop", 27)


@pytest.mark.parametrize(("n", "reason"), [(5, "length"), (26, "length"), (27, "stop"), (28, "stop")])
def test_length_and_stop_are_told_apart(script: LLM, n: int, reason: str) -> None:
    answer = script.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=n, temperature=0.0))
    assert (answer.text, answer.finish_reason) == (ALPHABET[:n], reason)


@pytest.mark.parametrize(("stop", "text"), [(("DEFGHIJ",), "ABC"), (("CD", "BCX"), "AB"), ("Z", ALPHABET[:-1])])
def test_stop_strings_across_tokens(script: LLM, stop: object, text: str) -> None:
    params = SamplingParams(max_tokens=64, temperature=0.0, stop=stop)  # type: ignore[arg-type]
    answer = script.chat([{"role": "user", "content": "x"}], params)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    pieces = list(script.stream_chat([{"role": "user", "content": "x"}], params))
    assert "".join(p.text for p in pieces) == text
    assert [p.finish_reason for p in pieces][:-1] == [None] * (len(pieces) - 1) and pieces[-1].finish_reason == "stop"


def test_digits_never_end_until_the_budget(script: LLM) -> None:
    answer = script.generate("0", SamplingParams(max_tokens=25, temperature=0.0))[0]
    assert (answer.text, answer.finish_reason) == ("1234567890123456789012345", "length")


def test_a_character_over_two_tokens_is_never_split(script: LLM) -> None:
    text = "鬱" + "abcdefghijklmnopqrstuvwxyz"
    pieces = list(script.stream("!", GREEDY))
    assert "".join(p.text for p in pieces) == text == script.generate("!", GREEDY)[0].text
    assert not any("\ufffd" in p.text for p in pieces)
    half = script.generate("!", SamplingParams(max_tokens=1, temperature=0.0))[0]
    assert half.text in ("", "\ufffd") and half.finish_reason == "length" and len(half.token_ids) == 1


def test_logprobs_have_their_closed_form(script: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    answer = script.chat([{"role": "user", "content": "x"}], params)
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.token_id == token_id == entry.top[0][0] and len(entry.top) == 3
        assert entry.logprob == pytest.approx(SCRIPT_LOGPROB, abs=2e-6)
        assert entry.top[1][1] == pytest.approx(OTHER_LOGPROB, abs=2e-3)


def test_prompts_decode_together_as_alone(script: LLM) -> None:
    prompts = ["0", "!", "A", "q", "5 is", "x" * 40]
    together = script.generate(prompts, GREEDY)
    assert [a.text for a in together] == [script.generate(p, GREEDY)[0].text for p in prompts]


def test_seeds_repeat_and_n_answers_differ(script: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=8.0, seed=7, n=3)
    first, again = script.generate("0", params)[0], script.generate(["A", "0"], params)[1]
    texts = [a.token_ids for a in [first, *first.alternatives]]
    assert texts == [a.token_ids for a in [again, *again.alternatives]]
    assert texts[0] != texts[1]


def test_context_end_is_a_length_stop(script: LLM) -> None:
    assert script.context_length == 512
    ids = script.tokenize("0" * 509)
    answer = script.generate([ids], SamplingParams(max_tokens=64, temperature=0.0))[0]
    assert (len(answer.token_ids), answer.finish_reason) == (512 - 509, "length")


def test_leaving_a_stream_early_gives_the_pages_back(script: LLM) -> None:
    before = script.memory()["views"]["kv"]["pages"]
    for number, _ in enumerate(script.stream("0", SamplingParams(max_tokens=400, temperature=0.0))):
        if number == 3:
            break
    assert script.memory()["requests"] == []
    script.generate("7", GREEDY)
    script.loaded.engine.audit()
    assert script.memory()["views"]["kv"]["pages"] <= before + 8


@pytest.mark.parametrize("name", ["tiny.gguf", "ok_v2.gguf", "ok_align16.gguf", "ok_align64.gguf"])
def test_version_and_alignment_change_nothing(tiny_models: Path, name: str) -> None:
    with LLM(tiny_models / name, device="cpu") as llm, LLM(tiny_models / "tiny.gguf", device="cpu") as tiny:
        assert (llm.logits([1, 2, 3]) == tiny.logits([1, 2, 3])).all()


@pytest.mark.parametrize(
    "part", ["split-00001-of-00003.gguf", "split-00002-of-00003.gguf", "split-00003-of-00003.gguf"]
)
def test_any_part_opens_the_split_set(tiny_models: Path, part: str) -> None:
    with LLM(tiny_models / part, device="cpu") as llm, LLM(tiny_models / "tiny.gguf", device="cpu") as tiny:
        assert (llm.logits([5, 6]) == tiny.logits([5, 6])).all()


def test_tied_head_equals_its_copy_and_costs_less(tiny_models: Path) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.0, logprobs=1, ignore_eos=True)
    with (
        LLM(tiny_models / "tied.gguf", device="cpu") as tied,
        LLM(tiny_models / "untied_copy.gguf", device="cpu") as copy,
    ):
        a, b = tied.generate("hello", params)[0], copy.generate("hello", params)[0]
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
        assert tied.memory()["dense_bytes"] < copy.memory()["dense_bytes"]


def test_command_line_prints_the_known_texts(tiny_models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_models / "script.gguf")
    common = ["--temp", "0", "--device", "cpu"]
    assert main(["run", model, "-p", "hi", "--chat", *common]) == 0
    assert capsys.readouterr().out == ALPHABET + "\n"
    assert main(["run", model, "-p", "!", *common, "-q"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("鬱abcdefghijklmnopqrstuvwxyz\n", "")
    assert main(["run", model, "-p", "0", "-n", "10", *common]) == 0
    assert capsys.readouterr().out == "1234567890\n"


def test_a_new_process_prints_them_too(tiny_models: Path) -> None:
    command = [sys.executable, "-m", "rimuru", "run", tiny_models / "script.gguf", "-p", "x", "--chat", "--temp", "0"]
    result = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, check=True)
    assert result.stdout == ALPHABET + "\n"
    assert "tokens per second" in result.stderr
