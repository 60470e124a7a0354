"""The tree keeps its shape (tools/check_layout.py), and importing the package needs no device library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_layout_rules_hold() -> None:
    spec = importlib.util.spec_from_file_location("check_layout", ROOT / "tools" / "check_layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.violations() == []


def test_import_is_light() -> None:
    """`import rimuru` and the names used most need neither CuPy nor torch nor the server's libraries."""
    code = (
        "import sys\n"
        "for name in ('cupy', 'torch', 'fastapi', 'uvicorn'): sys.modules[name] = None\n"
        "import rimuru, rimuru.cli\n"
        "rimuru.SamplingParams(); rimuru.cli.build_parser()\n"
        "assert 'numba' not in sys.modules, 'importing the package loads numba'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
