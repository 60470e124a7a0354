"""The GPU check's reading of what its parts print, and what it does where something is missing."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pytest_run_is_counted(gpu_check: ModuleType) -> None:
    row = gpu_check.pytest_row(0, "....\n57 passed, 2 skipped, 1204 deselected in 12.3s", 12.3)
    assert row == {"ok": True, "seconds": 12.3, "passed": 57, "skipped": 2, "deselected": 1204}
    text = "FAILED tests/ops/test_cuda_moe.py::test_case[x] - assert\n1 failed, 3 passed in 1s"
    row = gpu_check.pytest_row(1, text, 1.0)
    assert not row["ok"] and row["failed"] == 1 and row["failures"] == ["tests/ops/test_cuda_moe.py::test_case[x]"]
    assert gpu_check.pytest_row(124, "", 590.0)["note"] == "ran out of time"


def sanitizer_options() -> argparse.Namespace:
    return argparse.Namespace(limit=5.0, files="sampling", sanitizer_k="")


def test_a_machine_without_the_sanitizer_skips_it(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    row = gpu_check.check_sanitizer(sanitizer_options(), "memcheck")
    assert row["ok"] and row["skipped_because"] == "compute-sanitizer is not installed"


def test_the_sanitizers_summary_and_refusal(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [(1, "========= Error: Device not supported. Please refer to the documentation", 0.1)]
    commands: list[list[str]] = []

    def run(command: list[str], limit_s: float) -> Any:
        commands.append(command)
        return answers.pop(0)

    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: "/usr/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_check, "run", run)
    row = gpu_check.check_sanitizer(sanitizer_options(), "racecheck")
    assert row["ok"] and "Device not supported" in row["skipped_because"]

    answers += [(0, "", 1.0), (9, "5 passed in 2s\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)", 2.0)]
    row = gpu_check.check_sanitizer(sanitizer_options(), "racecheck")
    assert not row["ok"] and list(row["files"]) == ["test_cuda_sampling.py"]
    assert row["files"]["test_cuda_sampling.py"]["errors_found"] == 3 and "racecheck" in commands[-1]


def test_parts_without_their_input_say_so(gpu_check: ModuleType) -> None:
    options = argparse.Namespace(models=None, expected=None, model=[])
    assert "--models" in gpu_check.check_logits(options)["skipped_because"]
    assert "--model" in gpu_check.check_bench(options)["skipped_because"]
