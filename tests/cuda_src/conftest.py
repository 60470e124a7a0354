"""Launches of CUDA kernels on the host's emulator (emulate.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate

from rimuru.ops.cuda.launch import Kernel


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> emulate.Emulator:
    return emulate.Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def on_the_host(emulator: emulate.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[emulate.Emulator]:
    """What launchers launch runs on the emulator."""

    def call(kernel: Kernel, grid: Any, block: Any, args: Any, shared_bytes: int = 0, stream: Any = None) -> None:
        emulator.launch(kernel, grid, block, args)

    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    monkeypatch.setattr(Kernel, "__call__", call)
    yield emulator
