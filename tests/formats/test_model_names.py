"""Bare names of models: where they are looked for, what they match, what is said where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rimuru.base.errors import BadInputError
from rimuru.cli import main
from rimuru.formats.names import find_model
from tools.make_random_gguf import write_random_model


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models as people keep them, and an empty current folder."""
    folder = tmp_path / "kept"
    for name in (
        "Qwen3-30B-A3B-Q4_K_M.gguf", "gpt-oss-20b.gguf", "gpt-oss-120b-00001-of-00002.gguf",
        "gpt-oss-120b-00002-of-00002.gguf", "mmproj-vision.gguf", "notes.txt", "publisher/OLMoE/olmoe-Q8_0.gguf",
        "a/b/c/d/too-deep.gguf", "olmoe.rimuru/manifest.json", "publisher/olmoe-Q8_0.rimuru/manifest.json",
    ):  # fmt: skip
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RIMURU_MODELS", f"{tmp_path / 'missing'}:{folder}")
    return folder


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Qwen3-30B-A3B-Q4_K_M.gguf"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B-Q4_K_M.gguf"),
        ("gpt-oss-20b", "gpt-oss-20b.gguf"),
        ("GPT-OSS-120B", "gpt-oss-120b-00001-of-00002.gguf"),
        ("olmoe", "olmoe.rimuru"),
    ],
)
def test_a_name_finds_its_model(models: Path, name: str, file: str) -> None:
    assert find_model(name) == models / file


def test_a_converted_model_comes_before_its_file(models: Path) -> None:
    (models / "gpt-oss-20b.rimuru").mkdir()
    assert find_model("gpt-oss-20b") == models / "gpt-oss-20b.rimuru"


@pytest.mark.parametrize("name", ["demo", "./gpt-oss-20b", "folder/gpt-oss-20b", "/gpt-oss-20b", "gpt-oss-20b/"])
def test_what_is_no_bare_name_stays(models: Path, name: str) -> None:
    assert find_model(name) == Path(name)


def test_what_is_here_comes_first(models: Path) -> None:
    Path("gpt-oss-20b").mkdir()
    assert find_model("gpt-oss-20b") == Path("gpt-oss-20b")


def test_the_current_folder_may_be_the_models_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    assert find_model("qwen3-30b-a3b").resolve() == models / "Qwen3-30B-A3B-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpt-oss", r"may be \S+/kept/gpt-oss-120b-00001-of-00002.gguf, \S+/gpt-oss-20b.gguf; write more"),
        ("olmoe-Q8_0", "may be .*olmoe-Q8_0"),
        ("qwen3-30", "no model 'qwen3-30': looked for .* in this folder, .*missing, .*kept for .*Qwen3-30B.*RIMURU"),
        ("mmproj-vision", "no model"),
        ("too-deep", "no model"),
        ("x" * 5000, "no model"),
    ],
)
def test_what_is_said_otherwise(models: Path, name: str, told: str) -> None:
    with pytest.raises(BadInputError, match=told):
        find_model(name)


def test_the_command_line_takes_names(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_model(models / "Small-Model-F16.gguf", "qwen3moe")
    assert main(["inspect", "small-model", "--memory", "1GiB", "--card", "rtx4090"]) == 0
    capsys.readouterr()
    assert main(["run", "no-such-model", "-p", "x"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rimuru: there is no model 'no-such-model'") and told.count("\n") == 1
    monkeypatch.delenv("RIMURU_MODELS")
    monkeypatch.setenv("HOME", str(models.parent))
    models.rename(models.parent / "models")
    assert find_model("small-model") == models.parent / "models/Small-Model-F16.gguf"
