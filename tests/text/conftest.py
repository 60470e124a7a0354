"""Vocabularies for the text tests: the handed ones, and small ones that are built here."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_vocab import byte_level, spm

from rimuru.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def small_bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with a few merges and the tokens of ChatML; BOS is <|endoftext|>, and is not added."""
    return byte_level(tmp_path_factory.mktemp("bpe"), add_bos_token=False)


@pytest.fixture(scope="session")
def small_spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece with a handful of pieces and all byte tokens."""
    return spm(tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="session")
def qwen2(shared: Path) -> Tokenizer:
    """The vocabulary of Qwen2."""
    return Tokenizer.from_gguf(shared / "cases/tokenizers/ggml-vocab-qwen2.gguf")


@pytest.fixture(scope="session")
def llama_spm(shared: Path) -> Tokenizer:
    """The vocabulary of Llama-2."""
    return Tokenizer.from_gguf(shared / "cases/tokenizers/ggml-vocab-llama-spm.gguf")
