"""The handed token-id vectors and the numbers of the fault list, exactly."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.text import byte_bpe
from rimuru.text.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "qwen2"])
def test_all_vectors(shared: Path, name: str) -> None:
    path = shared / f"cases/tokenizers/ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    rows = Path(f"{path}.out").read_text().split("\n")
    assert len(texts) == len(rows) == 47
    tokenizer = Tokenizer.from_gguf(path)
    for text, row in zip(texts, rows, strict=True):
        ids = tokenizer.encode(text)
        assert ids == [int(token_id) for token_id in row.split()], text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("->", [405]),
        ("(x):\n", [2075, 982]),
        ("1234567890", [16, 17, 18, 19, 20, 21, 22, 23, 24, 15]),
        ("def f(x):\n    return x->y", [750, 282, 2075, 982, 262, 470, 856, 405, 88]),
        ("don't DON'T", [15007, 944, 44273, 17323]),
        ("<|im_end|>", [27, 91, 318, 6213, 91, 29]),
        ("<|im_start|>", [27, 91, 318, 4906, 91, 29]),
        ("鬱", [99439, 109]),
        ("🫠", [9284, 104, 254]),
        ("𠮷", [150152]),
    ],
)
def test_qwen2_ids(qwen2: Tokenizer, text: str, ids: list[int]) -> None:
    assert qwen2.encode(text) == ids
    assert qwen2.decode(ids) == text


def test_qwen2_special_ids(qwen2: Tokenizer) -> None:
    assert qwen2.encode("<|im_start|>user\nhi<|im_end|>", special=True) == [151644, 872, 198, 6023, 151645]
    assert qwen2.n_vocab == 151936
    assert qwen2.eos_id == 151643
    assert {151643, 151645} <= qwen2.eog_ids
    assert not qwen2.add_bos
    assert qwen2.is_control(151645) and not qwen2.is_control(405)


def test_llama_spm_ids(llama_spm: Tokenizer) -> None:
    ids = [1, 910, 338, 29871, 243, 162, 169, 156, 29889, 8223]
    assert llama_spm.encode("This is 🦙.cpp", add_bos=True) == ids
    assert llama_spm.encode_prompt("This is 🦙.cpp") == ids
    assert llama_spm.decode(ids) == "This is 🦙.cpp"
    assert llama_spm.decode([*ids, 2]) == "This is 🦙.cpp"
    assert llama_spm.decode(llama_spm.encode("  two")) == "  two"
    assert (llama_spm.bos_id, llama_spm.eos_id, llama_spm.add_bos, llama_spm.add_eos) == (1, 2, True, False)


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_qwen2(qwen2: Tokenizer, text: str) -> None:
    assert qwen2.decode(qwen2.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_llama_spm(llama_spm: Tokenizer, text: str) -> None:
    # The space mark of the format is the one character that SentencePiece cannot tell from a space.
    text = text.replace("\u2581", "")
    assert llama_spm.decode(llama_spm.encode(text)) == text


def test_long_texts_are_quick(qwen2: Tokenizer, llama_spm: Tokenizer) -> None:
    text = ("The quick brown fox <b>jumps</b> over 12 lazy dogs.\n    return x -> 天气 'tis\n" * 1500)[:100_000]
    for tokenizer in (qwen2, llama_spm):
        start = time.perf_counter()
        ids = tokenizer.encode(text, special=True)
        assert time.perf_counter() - start < 3.0  # far above the 0.05 s that it takes, far below anything quadratic
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_all_vectors_the_way_of_long_texts(shared: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(byte_bpe, "MOST_LOCKED_CHARACTERS", 0)
    test_all_vectors(shared, name)
