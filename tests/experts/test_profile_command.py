"""rimuru profile: counts what a text uses, writes it beside the model, and the next start begins with it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from rimuru import LLM
from rimuru.cli import main
from rimuru.commands import profile as profile_module
from rimuru.experts.hotset import check_writable, load_profile, profile_path, save_profile
from rimuru.experts.replay import check_recordable
from tools.make_random_gguf import write_random_model

TEXT = "The pool is one range of addresses. When many requests run, it lends pages to their states. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("profile") / "random.gguf", arch="qwen3moe", quant="q8_0", seed=5, context_length=64
    )


def test_the_profile_counts_every_choice_and_is_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert main(["profile", str(model), "-f", str(text), "--device", "cpu"]) == 0
    assert "tokens" in capsys.readouterr().err
    profile = load_profile(profile_path(model))
    with LLM(model, device="cpu", resident_experts=4, residency="hotset") as llm:
        n_tokens = len(llm.tokenize(TEXT))
        layout = llm.loaded.layout.expert
        assert layout is not None and llm.loaded.store is not None
        top_k = llm.loaded.config.layers[0].ffn.top_k  # type: ignore[union-attr]
        assert profile.n_tokens == n_tokens
        assert (profile.counts.sum(axis=1) == n_tokens * top_k).all()
        resident = llm.loaded.store.residency.resident
        n_layers = len(layout.layers)
        assert resident.sum() == 4
        for slot in range(n_layers):  # in each layer the most used ones
            n = int(resident[slot].sum())
            hottest = np.sort(profile.counts[slot])[::-1][:n]
            assert sorted(profile.counts[slot][resident[slot, : profile.counts.shape[1]]])[::-1] == hottest.tolist()


def test_a_damaged_profile_costs_nothing_but_a_warning(model: Path, tmp_path: Path) -> None:
    path = profile_path(model)
    text = path.read_text() if path.exists() else None
    path.write_text(json.dumps({"format": "something else"}))
    try:
        with LLM(model, device="cpu") as llm:
            assert llm.generate([1, 2, 3])[0].token_ids
    finally:
        path.unlink()
        if text is not None:
            path.write_text(text)


def test_profile_refuses_what_it_cannot_use(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    out = tmp_path / "nowhere" / "p.json"
    text = tmp_path / "text.txt"
    text.write_text("a few words of text")
    dense = write_random_model(tmp_path / "dense.gguf", arch="llama", quant="q8_0")
    for words in (
        [str(model), "-f", str(empty)], [str(model), "-f", str(text), "-o", str(out)], [str(dense), "-f", str(text)]
    ):  # fmt: skip
        assert main(["profile", *words, "--device", "cpu", "-q"]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_place_that_cannot_be_written_is_refused_before_the_text_is_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*_: object) -> None:
        raise AssertionError("the text was run in vain")

    monkeypatch.setattr(profile_module, "measure", runs)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    monkeypatch.setattr(profile_module, "open_llm", lambda *_: pytest.fail("the model was loaded in vain"))
    for option in ("--record", "-o"):
        for place in (tmp_path / "nowhere" / "r.npz", tmp_path):
            assert main(["profile", str(model), "-f", str(text), option, str(place), "--device", "cpu", "-q"]) == 2
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert str(place) in line and (option in line or option == "-o")
    monkeypatch.undo()
    monkeypatch.setattr(profile_module, "measure", runs)
    (tmp_path / "p.gguf").symlink_to(model)
    profile_path(tmp_path / "p.gguf").mkdir()  # beside the model, whose name is known when it is open
    assert main(["profile", str(tmp_path / "p.gguf"), "-f", str(text), "--device", "cpu", "-q"]) == 2
    assert str(profile_path(tmp_path / "p.gguf")) in capsys.readouterr().err


def test_a_place_for_a_recording_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    old, new = tmp_path / "old.npz", tmp_path / "new.npz"
    old.write_bytes(b"an earlier recording")
    check_recordable(old)
    check_recordable(new)
    assert old.read_bytes() == b"an earlier recording" and not new.exists()
    os.mkfifo(tmp_path / "pipe")
    check_recordable(tmp_path / "pipe")  # without waiting for who reads it


def test_a_profile_goes_into_a_pipe_and_does_not_take_its_place(model: Path, tmp_path: Path) -> None:
    """As `-o /dev/stdout`: a renamed file would stand where the device was."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with LLM(model, device="cpu") as llm:
            found = profile_module.measure(llm, llm.tokenize(TEXT))
            layout = llm.loaded.layout.expert
            assert layout is not None
            check_writable(pipe)
            save_profile(found, layout, pipe)
        assert json.loads(os.read(reader, 1 << 16))["n_tokens"] == found.n_tokens
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
