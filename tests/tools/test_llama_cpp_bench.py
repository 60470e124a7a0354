"""tools/bench/llama_cpp.py: what it reads from llama.cpp's two programs, and from ones that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools.bench import llama_cpp

BENCH_ROW = {"build_commit": "0c1e57098", "n_ubatch": 512, "n_prompt": 512, "n_gen": 0, "avg_ts": 90.0}
PREFILL = json.dumps(
    [
        BENCH_ROW | {"samples_ts": [100.0, 110.0, 10.0]},
        BENCH_ROW | {"n_prompt": 4096, "samples_ts": [200.0]},
        BENCH_ROW | {"n_prompt": 4096, "n_ubatch": 2048, "samples_ts": [350.0, 300.0, 400.0]},
        BENCH_ROW | {"n_prompt": 0, "n_gen": 128, "samples_ts": [7.0]},
    ]
)
DECODE = """
{"n_kv_max": 24576, "flash_attn": 1, "pp": 128, "tg": 64, "pl": 1, "t_tg": 0.2, "speed_tg": 100.0, "speed": 90.0}
0.00.512 I {"n_kv_max": 24576, "pp": 128, "tg": 64, "pl": 1, "t_tg": 0.2, "speed_tg": 300.0, "speed": 90.0}
{"n_kv_max": 24576, "flash_attn": 1, "pp": 128, "tg": 64, "pl": 1, "t_tg": 0.2, "speed_tg": 290.0, "speed": 90.0}
{"n_kv_max": 24576, "flash_attn": 1, "pp": 128, "tg": 64, "pl": 96, "t_tg": 0.2, "speed_tg": 2000.0, "speed": 90.0}

llama_perf_context_print: {not a row}
"""


def program(path: Path, prints: str, ends_with: int = 0) -> None:
    """An executable that notes its arguments beside itself, prints, and ends."""
    body = f"import sys\nopen({str(path) + '.args'!r}, 'w').write(' '.join(sys.argv[1:]))\n"
    body += f"print({prints!r}, file=sys.{'stderr' if ends_with else 'stdout'})\nsys.exit({ends_with})\n"
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    argv = ["llama_cpp.py", str(folder / "model.gguf"), "--bin", str(folder), "--output", str(folder / "out.json")]
    monkeypatch.setattr(sys, "argv", [*argv, *options])
    return llama_cpp.main()


def test_prefill_takes_the_median_of_the_best_micro_batch() -> None:
    assert llama_cpp.prefill_rates("ggml_cuda_init: one device\n" + PREFILL) == {512: 100.0, 4096: 350.0}


def test_decode_takes_the_median_of_the_repeats() -> None:
    assert llama_cpp.decode_rates(DECODE) == {1: 290.0, 96: 2000.0}


def test_both_programs_of_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "llama-bench", PREFILL)
    program(tmp_path / "llama-batched-bench", DECODE)
    assert run_main(monkeypatch, tmp_path, "--streams", "1,96", "--repeats", "2", "--context", "250") == 0
    figures = json.loads((tmp_path / "out.json").read_text())[0]
    assert figures["prefill_tokens_per_second"] == {"512": 100.0, "4096": 350.0}
    assert figures["decode_tokens_per_second"] == {"1": 290.0, "96": 2000.0}
    printed = capsys.readouterr().out
    assert "4096: 350" in printed and "96: 2,000" in printed
    arguments = (tmp_path / "llama-batched-bench.args").read_text()
    assert "-npl 1,1,96,96" in arguments and f"-c {96 * 512}" in arguments
    assert "-ub 512,2048" in (tmp_path / "llama-bench.args").read_text()


def test_a_program_that_fails_is_reported_and_the_other_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "llama-bench", "error: unable to load model", ends_with=1)
    program(tmp_path / "llama-batched-bench", DECODE)
    assert run_main(monkeypatch, tmp_path) == 1
    figures = json.loads((tmp_path / "out.json").read_text())[0]
    assert figures["decode_tokens_per_second"]["96"] == 2000.0
    assert figures["errors"] == ["prefill: llama-bench ended with 1: error: unable to load model"]
    assert "unable to load model" in capsys.readouterr().out


def test_programs_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_main(monkeypatch, tmp_path) == 1
    assert all("No such file" in e for e in json.loads((tmp_path / "out.json").read_text())[0]["errors"])
