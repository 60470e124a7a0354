"""The handed GGUF files: legal oddities open, bad ones are refused, a large vocabulary opens quickly."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rimuru.base.errors import FileFormatError
from rimuru.formats.gguf import GgufFile, check_formats, open_gguf


@pytest.fixture(scope="module")
def tiny(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(shared / "cases" / "make_tiny_gguf.py"), str(folder)], check=True, stdout=-3)
    return folder


def hashes(gguf: GgufFile) -> dict[str, str]:
    check_formats(gguf.tensors)
    return {name: hashlib.sha256(gguf.raw(name)).hexdigest() for name in gguf.tensors}


@pytest.mark.parametrize("name", ["ok_align16", "ok_align64", "ok_v2"])
def test_legal_oddities_hold_the_same_tensors(tiny: Path, name: str) -> None:
    with open_gguf(tiny / "tiny.gguf") as plain, open_gguf(tiny / f"{name}.gguf") as odd:
        assert hashes(odd) == hashes(plain) and len(odd.tensors) == 27
        assert [key for key in odd.kv if key != "general.alignment"] == list(plain.kv)


def test_the_split_set_is_one_model_from_every_side(tiny: Path, tmp_path: Path) -> None:
    parts = sorted(tiny.glob("split-*.gguf"))
    assert len(parts) == 3
    for part in parts:
        (tmp_path / part.name).symlink_to(part)
    with open_gguf(tiny / "tiny.gguf") as plain:
        wanted = hashes(plain)
    for path in [*parts, tmp_path]:
        with open_gguf(path) as gguf:
            assert hashes(gguf) == wanted and gguf.kv.require("qwen3moe.block_count", int) == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad_bigendian", r"big-endian GGUF is not supported \(version 3\)"),
        ("bad_v1", "version 1 is not supported"),
        ("bad_v4", "version 4 is not supported"),
        ("bad_type", "tensor t has the unknown type id 9999"),
    ],
)
def test_bad_files_are_refused_by_name(tiny: Path, name: str, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        open_gguf(tiny / f"{name}.gguf")


def test_a_large_vocabulary_opens_quickly(shared: Path) -> None:
    path = shared / "cases" / "tokenizers" / "ggml-vocab-qwen2.gguf"
    best_s = 1e9
    for _ in range(3):
        start = time.perf_counter()
        with open_gguf(path) as gguf:
            best_s = min(best_s, time.perf_counter() - start)
            tokens = gguf.kv.require_list("tokenizer.ggml.tokens", str)
            assert len(tokens) == 151936 and tokens[0] == "!" and not gguf.tensors
    assert best_s < 0.5
