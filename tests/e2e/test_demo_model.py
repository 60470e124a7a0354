"""The packaged model, whose weights and routing are real: its perplexity is pinned for types, policies and residency,
and every command takes its name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType

from rimuru import LLM, SamplingParams
from rimuru.cli import main
from rimuru.commands.perplexity import evaluate
from rimuru.formats.demo import held_out_path, is_demo, model_path
from rimuru.formats.gguf import open_gguf
from rimuru.formats.gguf_values import TYPE_NAMES
from rimuru.formats.quants import BY_NAME
from rimuru.formats.quants_encode import quantize
from rimuru.formats.quants_ref import dequantize
from rimuru.formats.writer import KeyValue, write_gguf

N_TOKENS = 3000
"""Of the held-out text, from its beginning, and as many from its 41st document on: tales, then the other stories."""
N_TALES = 40
PERPLEXITY = 4.1184
"""Of those tokens on the CPU, in windows of 512."""
RECODED = {
    "q8_0": 11.5798,
    "q6_k": 11.5903,
    "q5_0": 11.6890,
    "q4_k": 11.7868,
    "q4_0": 11.8197,
    "iq4_nl": 11.8364,
    "mxfp4": 11.8980,
}
"""The same where the matrices are decoded and encoded again in another type."""


@pytest.fixture(scope="module")
def ids() -> list[int]:
    with LLM("demo", device="cpu", memory="64MiB", threads=1) as llm:
        documents = held_out_path().read_text(encoding="utf-8").split("<|endoftext|>")[:-1]
        tales, others = (
            llm.tokenize("".join(f"{text}<|endoftext|>" for text in part))
            for part in (documents[:N_TALES], documents[N_TALES:])
        )
    return tales[:N_TOKENS] + others[:N_TOKENS]


def perplexity(model: str | Path, ids: list[int], **options: object) -> float:
    options = {"device": "cpu", "memory": "96MiB", "threads": 2, **options}
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        return evaluate(llm, ids, 512)["perplexity"]


def test_perplexity_is_what_it_was(ids: list[int]) -> None:
    assert perplexity("demo", ids) == pytest.approx(PERPLEXITY, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"resident_experts": 0.5},
        {"resident_experts": 5},
        {"resident_experts": 1.0},
        {"policy": "paper", "memory": "24MiB"},
        {"policy": "cost", "memory": "24MiB", "residency": "recency"},
        {"policy": "cost", "memory": "24MiB", "residency": "hotset"},
        {"policy": "fixed", "memory": "24MiB", "threads": 1},
        {"prefetch": False, "prediction": False, "fill_on_read": False, "resident_experts": 0.25},
    ],
    ids=str,
)
def test_residency_never_changes_it(ids: list[int], options: dict[str, object]) -> None:
    part = ids[:1100]
    assert perplexity("demo", part, **options) == perplexity("demo", part)


def key_values(path: Path) -> list[KeyValue]:
    """The metadata of a file in the writer's form."""
    names = {kind: TYPE_NAMES[kind.value] for kind in GGUFValueType}
    found: list[KeyValue] = []
    for key, field in GGUFReader(path).fields.items():
        if key.startswith("GGUF."):
            continue
        kind, value = names[field.types[0]], field.contents()
        found.append((key, kind, value if kind != "arr" else (names[field.types[1]], value)))
    return found


def recode(path: Path, quant: str) -> None:
    """The packaged model with its matrices in another type (Q8_0 where rows are no multiple of its blocks)."""
    tensors = []
    with open_gguf("demo") as gguf:
        for name, info in gguf.tensors.items():
            fmt, raw = info.format, gguf.raw(name)
            if fmt.name != "f32":
                fits = info.shape[0] % BY_NAME[quant].block_elements == 0
                values = dequantize(raw.reshape(-1, info.row_bytes), fmt)
                fmt = BY_NAME[quant if fits else "q8_0"]
                raw = quantize(values, fmt)
            tensors.append((name, info.shape, fmt, raw.reshape(-1)))
    write_gguf(path, key_values(model_path("demo")), tensors)


@pytest.mark.parametrize("quant", RECODED)
def test_each_type_has_its_perplexity(ids: list[int], quant: str, tmp_path: Path) -> None:
    recode(tmp_path / "recoded.gguf", quant)
    assert perplexity(tmp_path / "recoded.gguf", ids[-N_TOKENS:]) == pytest.approx(RECODED[quant], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"resident_experts": 0.5}, {"policy": "cost", "memory": "48MiB"}], ids=str)
def test_perplexity_on_a_gpu(ids: list[int], options: dict[str, object]) -> None:
    found = perplexity("demo", ids, device="cuda", **{"memory": "256MiB", **options})
    assert found == pytest.approx(PERPLEXITY, rel=0.01)


def test_commands_know_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["inspect", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "qwen35moe"
    common = ["--device", "cpu", "--memory", "64MiB", "--quiet"]
    assert main(["run", "demo", "-p", "Once upon a time", "-n", "24", "--temp", "0", *common]) == 0
    text = capsys.readouterr().out
    assert len(text.split()) > 10 and text.isascii()
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "demo", "--quiet"]) == 0  # beside the user, not inside the installed package
    assert not model_path("demo").with_suffix(".rimuru").exists()
    assert perplexity(tmp_path / "demo.rimuru", list(range(3, 300))) == perplexity("demo", list(range(3, 300)))


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_demo("demo") and model_path("demo").name == "demo.gguf"
    (tmp_path / "demo").mkdir()
    assert not is_demo("demo") and model_path("demo") == Path("demo")
    assert not is_demo(tmp_path / "demo.gguf")


def test_it_answers_a_request_and_stops() -> None:
    with LLM("demo", device="cpu", memory="64MiB", context=1024) as llm:
        message = {"role": "user", "content": "Tell me a story about a boy named Jack who lost his hat."}
        answers = [llm.chat([message], SamplingParams(max_tokens=400, temperature=0.7, seed=s)) for s in range(4)]
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 3
    assert sum("Jack" in answer.text for answer in answers) >= 3


def test_routing_is_that_of_a_trained_model(ids: list[int]) -> None:
    """With a random router, as many hits as there are residents; measured here: 0.300."""
    text = ids[:400]
    with LLM("demo", device="cpu", memory="64MiB", resident_experts=0.25) as llm:
        for token in range(0, 400, 40):
            llm.logits(text[token : token + 40], chunk=1)
        rate = llm.memory()["hit_rate"]
    assert rate > 0.28  # a quarter of the experts is resident
    assert np.isfinite(rate)
