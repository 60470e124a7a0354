#!/usr/bin/env python3
"""Checks that the tree keeps its shape: layers of imports, fences around device libraries, sizes, a short step.

    python tools/check_layout.py

Prints every violation and exits with 1 if there is one. tests/test_layout.py runs the same checks.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A package may import itself and packages with a smaller number. Type-checking imports are free.
LAYERS = {
    "base": 0,
    "request": 0,
    "plan": 0,
    "batch": 0,
    "config": 0,
    "formats": 1,
    "text": 1,
    "arch": 2,
    "memory": 3,
    "ops": 3,
    "parallel": 3,
    "experts": 4,
    "inspect": 4,
    "forward": 5,
    "engine": 6,
    "simulate": 7,
    "llm": 7,
    "server": 7,
    "commands": 8,
    "cli": 9,
}
# Reasons: memory and ops meet only in nouns (specs, base); experts hand waves to layers through forward's protocol.
ALLOWED_UPWARD = {
    ("experts", "forward.context"),
    ("memory", "ops.base"),
    ("batch", "memory.specs"),
}
FENCES = {
    "cupy": ("rimuru/ops/cuda/",),
    "torch": ("rimuru/ops/cuda/", "rimuru/parallel/"),
    "cuda": ("rimuru/ops/cuda/",),
    "numba": ("rimuru/ops/cpu/", "rimuru/memory/", "rimuru/experts/"),
    "llvmlite": ("rimuru/ops/cpu/",),
    "fastapi": ("rimuru/server/",),
    "uvicorn": ("rimuru/server/", "rimuru/commands/"),
}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_STEP_LINES = 25
# Files and functions over the guide, each with its reason.
EXCEPTIONS = {
    "rimuru/ops/base.py": "the one contract of all verbs, mostly docstrings",
}
STEP_FORBIDDEN = ("cpu", "cuda", "qwen", "llama", "q4", "q8", "moe", "mamba")


def python_files(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).rglob("*.py"))


def runtime_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module, line) of every import that is not under `if TYPE_CHECKING`."""

    def visit(node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(tree)


def check_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    relative = path.relative_to(ROOT).as_posix()
    package = path.relative_to(ROOT / "rimuru").parts[0].removesuffix(".py")
    for module, line in runtime_imports(tree):
        head = module.split(".")[0]
        if head in FENCES and not relative.startswith(FENCES[head]):
            yield f"{relative}:{line}: imports {module} outside of {', '.join(FENCES[head])}"
        if not module.startswith("rimuru."):
            continue
        target = module.split(".")[1]
        if target == package or package not in LAYERS or target not in LAYERS:
            continue
        rest = module.removeprefix("rimuru.")
        same_layer_siblings = LAYERS[target] == LAYERS[package] and {target, package} <= {"memory", "ops"}
        if (LAYERS[target] > LAYERS[package] or same_layer_siblings) and not any(
            package == allowed and (rest == part or rest.startswith(part + ".")) for allowed, part in ALLOWED_UPWARD
        ):
            if same_layer_siblings and rest in ("memory.specs",):
                continue
            yield f"{relative}:{line}: {package} (layer {LAYERS[package]}) imports {module} (layer {LAYERS[target]})"


def check_sizes(path: Path, tree: ast.Module, text: str) -> Iterator[str]:
    relative = path.relative_to(ROOT).as_posix()
    if relative in EXCEPTIONS:
        return
    n_lines = text.count("\n")
    if n_lines > MAX_FILE_LINES:
        yield f"{relative}: {n_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{relative}:{node.name}" not in EXCEPTIONS:
                yield f"{relative}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def check_environment(path: Path, text: str) -> Iterator[str]:
    relative = path.relative_to(ROOT).as_posix()
    if "os.environ" in text and relative != "rimuru/base/env.py":
        yield f"{relative}: reads os.environ; only rimuru/base/env.py may"


def check_jit(path: Path, tree: ast.Module) -> Iterator[str]:
    """Every Numba function says whether it is cached, frees the GIL, and may reorder sums."""
    relative = path.relative_to(ROOT).as_posix()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name.split(".")[-1] != "njit":
                continue
            given = {k.arg for k in decorator.keywords} if isinstance(decorator, ast.Call) else set()
            missing = {"cache", "nogil", "fastmath"} - given
            if missing and None not in given:
                yield f"{relative}:{node.lineno}: njit of {node.name} does not state {', '.join(sorted(missing))}"


def check_step() -> Iterator[str]:
    """Engine.step fits on a screen and names no backend, architecture or quantisation type."""
    path = ROOT / "rimuru/engine/engine.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "step":
            body = ast.unparse(node).lower()
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines > MAX_STEP_LINES:
                yield f"Engine.step has {n_lines} lines, at most {MAX_STEP_LINES}"
            yield from (f"Engine.step names {word!r}" for word in STEP_FORBIDDEN if word in body)
            return
    yield "Engine.step is missing"


def check_raw_module() -> Iterator[str]:
    for path in python_files("rimuru"):
        text = path.read_text()
        if ("RawModule(" in text or "RawKernel(" in text) and path.name != "loader.py":
            yield f"{path.relative_to(ROOT)}: builds kernels; only ops/cuda/loader.py may"


def violations() -> list[str]:
    """Every violation in the tree, one line each."""
    found: list[str] = []
    for path in python_files("rimuru"):
        text = path.read_text()
        tree = ast.parse(text)
        found += check_imports(path, tree)
        found += check_sizes(path, tree, text)
        found += check_environment(path, text)
        found += check_jit(path, tree)
    found += check_step()
    found += check_raw_module()
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    problems = violations()
    print("\n".join(problems) or "the layout is as it should be")
    sys.exit(1 if problems else 0)
