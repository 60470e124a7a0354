"""A short soak (tools/soak.py): everything that clients do wrong, with little memory, for some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "options"), [("qwen3moe", "--memory 12MiB --swap 8MiB --policy paper"), ("granitehybrid", "--swap 8MiB")]
)
def test_soak(arch: str, options: str, tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "tools/soak.py", "--minutes", "0.1", "--clients", "16", "--arch", arch]
    result = subprocess.run(
        [*command, "--serve", options, "--out", str(out)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(out.read_text())
    assert figures["faults"] == [] and figures["server"]["requests_total done"] > 40
