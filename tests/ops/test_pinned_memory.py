"""Pinned host memory: what is registered, released, and what happens where the driver refuses; the driver is a fake."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from rimuru.base.units import MIB
from rimuru.ops.cuda.device import PinnedMemory


class CUDARuntimeError(Exception):
    """The driver's refusal."""


class FakeRuntime:
    """cupy.cuda.runtime."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.registered = refuses, dict[int, int]()

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        if self.refuses:
            raise CUDARuntimeError("refused")
        self.registered[address] = size

    def hostUnregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=fake)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    return fake


@pytest.mark.parametrize("n_bytes", [1, 4096, 5000, 3 * MIB, 65 * MIB + 1])
def test_whole_pages_are_registered_and_released(n_bytes: int, runtime: FakeRuntime) -> None:
    memory = PinnedMemory(n_bytes)
    assert memory.pinned and memory.array.nbytes == n_bytes
    assert memory.address % 4096 == 0
    ((address, size),) = runtime.registered.items()
    assert address == memory.address and size % 4096 == 0 and n_bytes <= size < n_bytes + 4096
    assert not memory.array.any()
    memory.array[:] = 7
    assert int(memory.array[-1]) == 7
    memory.close()
    assert not runtime.registered
    memory.close()


def test_where_the_driver_refuses_memory_is_pageable(runtime: FakeRuntime) -> None:
    runtime.refuses = True
    memory = PinnedMemory(3 * MIB)
    assert not memory.pinned
    memory.array[...] = np.arange(3 * MIB, dtype=np.uint8)
    assert int(memory.array[257]) == 1
    memory.close()
