"""Every tool runs as a plain command from a checkout, whatever folder it is called in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tools", ROOT / "tools" / "bench", ROOT / "tools" / "demo_model")
COMMANDS = [
    path for folder in FOLDERS for path in sorted(folder.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")
]
OURS = ("rimuru", "tools")


def names_of(node: ast.stmt) -> list[str]:
    """First parts of the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_tool_finds_the_package_beside_it(path: Path) -> None:
    """It says where before it imports: in an environment without the package, or with another checkout's."""
    told = False
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        told = told or "sys.path" in ast.unparse(node)
        assert told or not set(names_of(node)) & set(OURS), f"line {node.lineno} imports before sys.path is set"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_help_is_shown(path: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(path), "--help"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    missing = [line for line in result.stderr.splitlines() if line.startswith("ModuleNotFoundError")]
    if missing and not any(f"'{name}'" in missing[0] or f"'{name}." in missing[0] for name in OURS):
        pytest.skip(missing[0])  # torch and the like
    assert result.returncode == 0, result.stderr[-2000:]
    assert "usage:" in result.stdout
