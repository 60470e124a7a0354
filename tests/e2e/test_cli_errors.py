"""Bad input on the command line: exit code 2 and one helpful line, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rimuru.cli import main


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *needles: str, code: int = 2) -> None:
    assert main([*arguments, "--log-level", "error"]) == code
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1, captured.err
    assert lines[0].startswith("rimuru: ") and "Traceback" not in captured.err
    for needle in needles:
        assert needle in lines[0], lines[0]


@pytest.mark.parametrize("command", ["run", "inspect", "convert", "bench"])
def test_missing_file(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    extra = ["-p", "x"] if command == "run" else []
    refused(capsys, [command, str(tmp_path / "none.gguf"), *extra], "none.gguf")


def test_wrong_and_cut_off_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_models: Path) -> None:
    text = tmp_path / "notes.gguf"
    text.write_text("this is no model")
    refused(capsys, ["run", str(text), "-p", "x"], "notes.gguf")
    whole = (tiny_models / "tiny.gguf").read_bytes()
    for n_bytes in (3, 40, 2000, len(whole) // 2, len(whole) - 4096):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:n_bytes])
        refused(capsys, ["run", str(cut), "-p", "x"], "cut.gguf")
    refused(capsys, ["run", str(tmp_path), "-p", "x"])


@pytest.mark.parametrize(
    ("name", "needle"),
    [("bad_bigendian.gguf", "big-endian"), ("bad_v1.gguf", "1"), ("bad_v4.gguf", "4"), ("bad_type.gguf", "9999")],
)
def test_malformed_headers(name: str, needle: str, capsys: pytest.CaptureFixture[str], tiny_models: Path) -> None:
    refused(capsys, ["run", str(tiny_models / name), "-p", "x"], needle)


def test_unusable_options(capsys: pytest.CaptureFixture[str], tiny_models: Path, tmp_path: Path) -> None:
    model = str(tiny_models / "tiny.gguf")
    refused(capsys, ["run", model, "-p", "x", "--ctx", "100000"], "512")
    refused(capsys, ["run", model, "-p", "hello " * 400], "512")
    refused(capsys, ["run", model, "-p", "x", "--memory", "lots"], "lots")
    refused(capsys, ["run", model, "-p", "x", "--memory", "100KiB"], "--memory")
    refused(capsys, ["run", model, "-p", "x", "--memory", "9MiB", "--resident-experts", "1.0"], "--memory")
    refused(capsys, ["run", model, "-p", "x", "--resident-experts", "17"], "16")
    refused(capsys, ["run", model, "-p", "x", "--temp", "-1"], "temperature")
    refused(capsys, ["run", model, "-p", "x", "--top-p", "1.5"], "top_p")
    refused(capsys, ["run", model, "-p", "x", "-f", "y"], "-p")
    refused(capsys, ["run", model, "-f", str(tmp_path / "none.txt")], "none.txt")
    refused(capsys, ["run", model, "-p", ""], "empty")
    refused(capsys, ["run", model, "--token-ids", "1,x"], "--token-ids")
    refused(capsys, ["run", model, "--token-ids", "999999"], "999999")
    refused(capsys, ["perplexity", model, "-f", str(tmp_path / "none.txt")], "none.txt")


def test_options_without_an_effect_on_a_cpu_are_named(capsys: pytest.CaptureFixture[str], tiny_models: Path) -> None:
    run = ["run", str(tiny_models / "tiny.gguf"), "-p", "x", "-n", "1", "--device", "cpu", "-q"]
    for options in ([], ["--cpu-experts", "--prediction", "--no-prefetch", "--no-in-place"], ["--no-in-place"]):
        assert main([*run, *options]) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line and "no effect" in line]
        assert len(told) == bool(options)
        assert all(option in told[0] for option in options)


@pytest.mark.parametrize(("size", "word"), [("-1", "at least 0"), ("-8GiB", "at least 0"), ("--8", "cannot read")])
def test_sizes_below_zero_are_called_so(capsys: pytest.CaptureFixture[str], size: str, word: str) -> None:
    refused(capsys, ["inspect", "demo", f"--memory={size}"], word)


@pytest.mark.parametrize("fixed", [["--resident-experts", "0.5"], ["--policy", "fixed"]])
def test_options_without_an_effect_on_a_fixed_number_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fixed: list[str]
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n50,10\n")
    elastic = ["--expert-offload-limit", "9", *([] if "--policy" in fixed else ["--policy", "paper"])]
    for words in (["inspect", "qwen3-30b-a3b"], ["simulate", "qwen3-30b-a3b", "--trace", str(trace)]):
        for options in ([], elastic):
            assert main([*words, "--memory", "14GB", *fixed, *options]) == 0
            told = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
            assert len(told) == bool(options)
            assert all(option in told[0] for option in options if option.startswith("--"))


def test_unwritable_output(capsys: pytest.CaptureFixture[str], tiny_models: Path, tmp_path: Path) -> None:
    model = str(tiny_models / "tiny.gguf")
    taken = tmp_path / "taken"
    taken.write_text("a file")
    refused(capsys, ["convert", model, "-o", str(taken)], "taken")
    refused(capsys, ["convert", model, "-o", str(taken / "below")], "taken")
    refused(capsys, ["convert", model, "-o", "/proc/none/x.rimuru"], "/proc/none")
    assert main(["convert", model, "-o", str(tmp_path / "done.rimuru"), "-q"]) == 0
    capsys.readouterr()
    refused(capsys, ["convert", str(tmp_path / "done.rimuru")], "converted already")


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["run"], "MODEL"),
        (["fly"], "fly"),
        (["run", "m.gguf", "--device", "tpu"], "--device"),
        (["run", "m.gguf", "--bogus"], "--bogus"),
        (["bench", "m.gguf", "--prefill", "0"], "--prefill"),
        (["bench", "m.gguf", "--new", "0"], "--new"),
        (["bench", "m.gguf", "--repeats", "-1"], "--repeats"),
        (["run", "", "-p", "x"], "empty"),
    ],
)
def test_option_errors_of_the_parser(arguments: list[str], needle: str) -> None:
    result = subprocess.run([sys.executable, "-m", "rimuru", *arguments], capture_output=True, text=True)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith("rimuru: ") and needle in lines[0]


def test_no_arguments_show_the_help() -> None:
    result = subprocess.run([sys.executable, "-m", "rimuru"], capture_output=True, text=True)
    assert result.returncode == 2 and "usage" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [["inspect", "--memory", "8MiB"], ["run", "-p", "x", "-n", "2", "-q"]])
def test_output_that_cannot_be_written_is_one_line(tiny_models: Path, command: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    arguments = [sys.executable, "-m", "rimuru", command[0], str(tiny_models / "tiny.gguf"), *command[1:]]
    with full.open("w") as nowhere:
        result = subprocess.run([*arguments, "--device", "cpu"], stdout=nowhere, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1 and "No space left" in result.stderr


def test_damaged_experts_are_bad_input(capsys: pytest.CaptureFixture[str], tiny_models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny.rimuru"
    assert main(["convert", str(tiny_models / "tiny.gguf"), "-o", str(folder), "-q"]) == 0
    blob = max((p for p in folder.iterdir() if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(blob.read_bytes())
    for at in range(0, len(data), 512):
        data[at] ^= 0x55
    blob.write_bytes(data)
    capsys.readouterr()
    refused(capsys, ["run", str(folder), "-p", "x", "-n", "2", "-q", "--device", "cpu"], "damaged")
