"""The GPU check's reading of what its parts print, what it keeps of parts that end too early, and its selections."""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import gpu_check as checks
from tools import gpu_runs
from tools.gpu_runs import Results, pytest_row, run, sanitizer_row, shares, side_by_side

WORKERS = """
3 workers [5 items]
[gw0] [ 20%] PASSED tests/ops/test_cuda_moe.py::test_case[route ties, all]
[gw1] [ 40%] FAILED tests/ops/test_cuda_moe.py::test_case[a b]
[gw0] [ 60%] SKIPPED tests/ops/test_cuda_mla.py::test_x
"""
ALONE = """
collecting ... collected 9 items / 7 deselected / 2 selected
tests/e2e/test_cuda_engine.py::test_y[qwen3 moe] PASSED                  [ 50%]
tests/e2e/test_cuda_engine.py::test_z PASSED                             [100%]
"""


@pytest.fixture
def gpu_check() -> ModuleType:
    return checks


def test_pytest_runs_are_counted() -> None:
    said = "FAILED tests/ops/test_cuda_moe.py::test_case[a b] - AssertionError: 1 != 2\n"
    row = pytest_row([(1, WORKERS + said, 12.3), (0, ALONE, 4.0)])
    assert {key: row[key] for key in ("ok", "passed", "failed", "skipped", "not_run", "seconds")} == {
        "ok": False, "passed": 3, "failed": 1, "skipped": 1, "not_run": 2, "seconds": 12.3,
    }  # fmt: skip
    assert row["failures"] == [said.removeprefix("FAILED ").strip()]
    assert pytest_row([(0, ALONE, 1.0)])["ok"]


def test_a_run_without_end_keeps_what_it_found() -> None:
    row = pytest_row([(124, WORKERS, 590.0)])
    assert not row["ok"] and row["notes"] == ["ran out of time"]
    assert (row["passed"], row["failed"], row["not_run"]) == (1, 1, 2)
    assert row["failures"] == ["tests/ops/test_cuda_moe.py::test_case[a b]"]
    assert "status 3" in pytest_row([(3, "internal error", 1.0)])["notes"][0]


def test_every_failure_is_told_with_what_was_raised() -> None:
    """Also where a message begins with an empty line, and all of them."""
    names = [f"tests/a.py::test_y[{i} b]" for i in range(90)]
    text = "".join(f"{name} FAILED  [ 50%]\n" for name in names)
    for i in range(90):
        text += f"____ test_y[{i} b] ____\n>   check()\n"
        text += f"E   AssertionError: \nE   \nE   Not equal {i}\n\ntests/a.py:7: Error\n"
    text += "____ ERROR at setup of TestK.test_z ____\nE   ValueError: no\n\ntests/b.py:9: ValueError\n"
    row = pytest_row([(1, text + "tests/b.py::TestK::test_z ERROR\n" + "FAILED tests/a.py::test_y[3 b] - x\n", 1.0)])
    assert row["failures"][:90] == [f"{name} - AssertionError: - Not equal {i}" for i, name in enumerate(names)]
    assert row["failures"][90:] == ["tests/b.py::TestK::test_z - ValueError: no"]


def test_an_error_after_a_pass_counts() -> None:
    text = "tests/a.py::test_y PASSED  [ 50%]\ntests/a.py::test_y ERROR  [ 50%]\n"
    assert pytest_row([(1, text, 1.0)])["failed"] == 1


def test_a_command_that_runs_on_is_ended_and_its_output_kept() -> None:
    script = "import subprocess, sys, time\nprint('begun', flush=True)\nsubprocess.run(['sleep', '60'])"
    status, output, seconds = run([sys.executable, "-c", script], 1.5)
    assert status == 124 and output.strip() == "begun" and seconds < 20


def test_outputs_are_told_while_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs, "SAVE_EVERY_S", 0.0)
    told: list[list[str]] = []
    script = "import time\nprint('one', flush=True)\ntime.sleep(2.5)\nprint('two')"
    results = side_by_side([[sys.executable, "-c", script]] * 2, 60.0, told.append)
    assert [(status, output.split()) for status, output, _ in results] == [(0, ["one", "two"])] * 2
    assert any("one" in texts[0] and "two" not in texts[0] for texts in told)


def test_what_runs_can_be_ended_from_outside() -> None:
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(run(["sleep", "60"], 50.0)))
    thread.start()
    while not gpu_runs._running:
        thread.join(0.05)
    gpu_runs.end_all()
    thread.join(20)
    assert ended and ended[0][0] != 0 and not gpu_runs._running


def test_shares_are_even_and_complete() -> None:
    parts = shares(list(range(23)), 4, together=3)
    assert sorted(item for part in parts for item in part) == list(range(23))
    assert max(map(len, parts)) - min(map(len, parts)) <= 3
    assert parts[0][:3] == [0, 1, 2] and shares(["a"], 8) == [["a"]] and shares([], 8) == []


def test_results_are_merged_from_calls_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "check.json"
    one, other = (Results(path, {"card": "x", "date": day, "commit": day}) for day in ("monday", "tuesday"))
    threads = [
        threading.Thread(target=lambda r=r, name=name: [r.save(name, {"ok": True, "n": i}) for i in range(20)])  # type: ignore[misc]
        for r, name in ((one, "tests"), (other, "memcheck"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts = json.loads(path.read_text())["parts"]
    assert parts["tests"] == {"ok": True, "n": 19, "date": "monday", "commit": "monday"}
    assert parts["memcheck"]["commit"] == "tuesday" and parts["memcheck"]["n"] == 19


def sanitizer_options() -> argparse.Namespace:
    return argparse.Namespace(limit=5.0, files="sampling", jobs=1)


def keep(row: dict[str, Any]) -> None:
    """Where a part's results so far go in these tests."""


def test_a_machine_without_the_sanitizer_skips_it(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    row = gpu_check.check_sanitizer(sanitizer_options(), keep, "memcheck")
    assert row["ok"] and row["skipped_because"] == "compute-sanitizer is not installed"


def test_the_sanitizers_refusal(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "========= Error: Device not supported. Please refer to the documentation"
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: "/usr/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_check, "run", lambda command, limit_s: (1, refusal, 0.1))
    row = gpu_check.check_sanitizer(sanitizer_options(), keep, "racecheck")
    assert row["ok"] and "Device not supported" in row["skipped_because"]


def test_the_sanitizers_findings(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def ended(command: list[list[str]], limit_s: float, on_output: Any) -> Any:
        commands.extend(command)
        return [(9, ALONE + "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 2.0)]

    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: "/usr/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_check, "run", lambda command, limit_s: (0, "", 0.1))
    monkeypatch.setattr(gpu_check, "kernel_tests", lambda selection, wanted: ["tests/ops/test_cuda_moe.py::test_x"])
    monkeypatch.setattr(gpu_check, "side_by_side", ended)
    row = gpu_check.check_sanitizer(sanitizer_options(), keep, "racecheck")
    assert not row["ok"] and row["errors_found"] == 3 and row["passed"] == 2 and row["selected"] == 1
    assert "racecheck" in commands[0] and commands[0][-1].endswith("::test_x")


def test_findings_of_a_sanitizer_that_did_not_end() -> None:
    race = "========= Warning: Race reported between Read access at f+0x10\n=========     and Write access at f+0x20\n"
    assert sanitizer_row([(124, race, 590.0)])["messages"] == [
        "Warning: Race reported between Read access at f+0x10 and Write access at f+0x20"
    ]
    text = WORKERS + "========= Invalid __global__ read of size 4 bytes\n=========     at gemv+0x10\n"
    row = sanitizer_row([(124, text, 590.0), (0, "1 passed\n========= ERROR SUMMARY: 0 errors", 9.0)])
    assert row["errors_found"] == 1 and not row["ok"] and row["messages"] == ["Invalid __global__ read of size 4 bytes"]
    assert not sanitizer_row([(0, "collected 0 items", 1.0)])["ok"]  # no word of the sanitizer's own: it did not run
    assert sanitizer_row([(0, ALONE + "========= ERROR SUMMARY: 0 errors", 9.0)])["ok"]


def test_every_family_of_kernels_is_selected(gpu_check: ModuleType) -> None:
    """A renamed test would leave the sanitizer without it: every alternative of a selection still finds something."""
    found = {tool: gpu_check.kernel_tests(getattr(gpu_check, tool), "") for tool in ("MEMCHECK", "RACECHECK")}
    for tool, ids in found.items():
        for name, pattern in getattr(gpu_check, tool).items():
            mine = [test.split("::")[1] for test in ids if test.startswith(f"tests/ops/test_cuda_{name}.py")]
            for alternative in top_level_alternatives(pattern):
                assert any(re.search(alternative, test) for test in mine), (tool, name, alternative)
    assert 300 < len(found["MEMCHECK"]) < 600 and 80 < len(found["RACECHECK"]) < 150


def test_the_files_of_the_tests_part(gpu_check: ModuleType) -> None:
    files = gpu_check.gpu_test_files()
    assert {"tests/e2e/test_cuda_engine.py", "tests/e2e/test_hybrid_prefix.py"} <= {*files}
    assert "tests/ops/test_cpu_moe.py" not in files and len(files) < 30


def top_level_alternatives(pattern: str) -> list[str]:
    depth, parts = 0, [""]
    for i, letter in enumerate(pattern):
        escaped = i > 0 and pattern[i - 1] == "\\"
        depth += 0 if escaped else {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_parts_without_their_input_say_so(gpu_check: ModuleType) -> None:
    options = argparse.Namespace(models=None, expected=None, model=[])
    assert "--models" in gpu_check.check_logits(options, keep)["skipped_because"]
    assert "--model" in gpu_check.check_bench(options, keep)["skipped_because"]
