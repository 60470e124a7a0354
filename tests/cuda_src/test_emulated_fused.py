"""Kernels that norm their own input, on the host: equal to norm and product in launches of their own, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases.common import Case, compare
from cases.fused import CASES

from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.routing import choose_by_two_launches

pytestmark = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine")


class FusedOps(emulate.EmulatedOps):
    """With norms that may wait."""

    def __init__(self) -> None:
        from rimuru.ops.cuda import pointwise

        super().__init__()
        self.rms_norm = pointwise.rms_norm


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> emulate.Emulator:
    return emulate.Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def ops(emulator: emulate.Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedOps]:
    def call(kernel: Kernel, grid: Any, block: Any, args: Any, shared_bytes: int = 0, stream: Any = None) -> None:
        emulator.launch(kernel, grid, block, args)

    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    monkeypatch.setattr(Kernel, "__call__", call)
    emulator.launched.clear()
    yield FusedOps()


@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "edge"], ids=lambda case: case.name)
def test_equal_to_launches_of_their_own(
    case: Case, ops: FusedOps, emulator: emulate.Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case.inputs()
    got = case.run(ops, inputs)  # type: ignore[arg-type]
    compare(got, case.expected(inputs), case.tolerance, case.tolerances)
    waits = len(inputs["x"]) <= 4 and "too wide" not in case.name
    assert ("rms_norm" in emulator.launched) != waits
    assert all(not words.any() for words in ops.choose_experts.posted.values())
    monkeypatch.setattr(ops, "choose_experts", choose_by_two_launches)
    emulator.launched.clear()
    apart = case.run(ops, inputs | {"waits": False})  # type: ignore[arg-type]
    assert "rms_norm" in emulator.launched and not {"router", "norm_gemv"} & set(emulator.launched)
    assert got.keys() == apart.keys()
    for name in got:
        assert np.array_equal(got[name], apart[name], equal_nan=True), name


def test_others_find_the_norm_that_waited(ops: FusedOps) -> None:
    """The 8-bit form that a fused kernel leaves is that of the norm's own kernel; others make it."""
    from rimuru.ops.cuda import activations, matmul, pointwise

    rng = np.random.default_rng(3)
    x, weight = emulate.upload(rng.standard_normal((1, 1440), np.float32)), emulate.upload(rng.random(1440, np.float32))
    apart, waiting, fused = (matmul.act(1, 1440) for _ in range(3))
    pointwise.rms_norm(x, weight, 1e-6, apart)
    pointwise.rms_norm(x, weight, 1e-6, waiting, may_wait=True)
    assert activations.pending_norm(waiting) is not None and np.isnan(waiting.f32).all()
    out = emulate.aligned((1,), np.float32)
    pointwise.row_gate(waiting, weight, out)
    assert activations.pending_norm(waiting) is None
    pointwise.rms_norm(x, weight, 1e-6, fused, may_wait=True)
    from rimuru.formats.quants import BY_NAME

    rows = matmul.weight(rng.integers(0, 9, (3, 1440 // 32 * 34)).astype(np.uint8), BY_NAME["q8_0"], 1440)
    matmul.linear(fused, (rows,), (emulate.aligned((1, 3), np.float32),))
    assert activations.pending_norm(fused) is None
    for name in ("values", "scales", "sums"):
        want = getattr(apart.quant, name)
        assert np.array_equal(getattr(waiting.quant, name), want) and np.array_equal(getattr(fused.quant, name), want)
    assert np.array_equal(fused.f32, apart.f32) and np.array_equal(waiting.f32, apart.f32)
