"""Places where compiled code cannot be kept: the program works all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rimuru.base import env

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np, rimuru
from rimuru.memory import allocator_jit
from rimuru.experts import residency_jit
from rimuru.memory.adjuster import paper_decision
print(rimuru.__file__); print(*paper_decision(4, 0, 3.0))
"""


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_package_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Files stand where folders would have to be, which stops root as well."""
    shutil.copytree(ROOT / "rimuru", tmp_path / "rimuru", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [tmp_path / "rimuru", *(p for p in (tmp_path / "rimuru").rglob("*") if p.is_dir())]:
        (folder / "__pycache__").write_text("in the way")
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    (home / ".cache").write_text("in the way")
    temporary.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(tmp_path / "rimuru/__init__.py"), "2 0"]
    assert list(temporary.glob("rimuru-cache-*/*/*.nbi"))


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is loaded without question, so a folder that others may write to is no place for it."""
    monkeypatch.setattr(env, "is_writable", lambda folder: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    open_to_all = tmp_path / f"rimuru-cache-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    env.ensure_code_cache()
    chosen = Path(os.environ["NUMBA_CACHE_DIR"])
    assert chosen.parent == tmp_path and chosen != open_to_all and chosen.stat().st_mode & 0o077 == 0


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", _no_home)
    assert env.user_cache_folders() == ()
