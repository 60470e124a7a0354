"""DeltaNet by chunks: its algebra in float64, and its kernels on the host, against the rule token by token."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
import nvrtc
from cases.common import compare
from cases.recurrent import Tokens, delta_case
from test_emulated_families import EmulatedFamilies, ops  # noqa: F401

from rimuru.arch.spec import DeltaNetSpec
from rimuru.ops.cuda import delta_chunks, recurrent
from rimuru.ops.cuda.delta_chunks import MIN_TOKENS, DeltaChunks
from rimuru.ops.cuda.launch import Kernel

needs_compiler = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler")


def step_by_step(q: Any, k: Any, v: Any, beta: Any, gates: Any, state: Any) -> tuple[Any, Any]:
    """(outputs, state after them); state [d_k, d_v]."""
    outputs = []
    for i in range(len(q)):
        state = np.exp(gates[i]) * state
        state = state + np.outer(k[i], beta[i] * (v[i] - state.T @ k[i]))
        outputs.append(state.T @ q[i])
    return np.array(outputs), state


def by_one_chunk(q: Any, k: Any, v: Any, beta: Any, gates: Any, state: Any) -> tuple[Any, Any]:
    """The formulas at the head of delta_chunks.cu."""
    c = np.cumsum(gates)
    decay = np.tril(np.exp(np.minimum(c[:, None] - c[None, :], 0)))
    inverse = np.linalg.inv(np.eye(len(q)) + np.tril(beta[:, None] * decay * (k @ k.T), -1))
    pairs = decay * (q @ k.T)
    w, u = inverse @ (k * (beta * np.exp(c))[:, None]), inverse @ (v * beta[:, None])
    rest = k * np.exp(c[-1] - c)[:, None]
    outputs = (np.exp(c)[:, None] * q - pairs @ w) @ state + pairs @ u
    return outputs, (np.exp(c[-1]) * np.eye(k.shape[1]) - rest.T @ w) @ state + rest.T @ u


@pytest.mark.parametrize("scale", [0.0, 0.05, 3.0, 60.0])
def test_the_algebra(scale: float) -> None:
    rng = np.random.default_rng(1)
    n, dim = 64, 32
    q, k, v = rng.standard_normal((3, n, dim))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    beta, gates = rng.random(n), -scale * rng.random(n)
    state = rng.standard_normal((dim, dim))
    for got, want in zip(
        by_one_chunk(q, k, v, beta, gates, state), step_by_step(q, k, v, beta, gates, state), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max())


@pytest.fixture
def chunks(ops: EmulatedFamilies, monkeypatch: pytest.MonkeyPatch) -> DeltaChunks:  # noqa: F811
    """Windows of two chunks, so that a state goes from one to the next by its page."""
    monkeypatch.setattr(sys.modules["cupy"], "empty", ops.empty)
    monkeypatch.setattr(delta_chunks, "WINDOW_CHUNKS", 2)
    return DeltaChunks(deterministic=False)


PIECES = Tokens([7, 131, 200, 1], [20, 131, 260, 1])
"""Short and long ones, from zero and from a state, with a rest of 3 tokens and one of 8."""


SMALL, TILED, LARGE = (
    DeltaNetSpec(1, 2, 64, 4, "grouped"), DeltaNetSpec(2, 4, 64, 4, "tiled"), DeltaNetSpec(1, 1, 128, 4, "tiled")
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("spec", "gate"),
    [(SMALL, "near one"), (SMALL, "near zero"), (SMALL, "both"), (TILED, "mixed"), (LARGE, "both")],
    ids=lambda value: value if isinstance(value, str) else f"{value.head_dim} {value.head_order}",
)
def test_kernels(
    spec: DeltaNetSpec,
    gate: str,
    ops: EmulatedFamilies,  # noqa: F811
    chunks: DeltaChunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = delta_case(f"by chunks, gates {gate}", PIECES, spec)
    inputs: dict[str, Any] = dict(case.inputs())
    rng = np.random.default_rng(5)
    if gate == "near one":
        inputs["a"] = inputs["a"] * np.float32(1e-4)
    elif gate == "near zero":
        inputs["a"] = inputs["a"] * np.float32(100)
    elif gate == "both":  # sums of gates reach thousands while their differences still count
        inputs["alpha"] = np.where(rng.random(inputs["alpha"].shape) < 0.3, 40, -6).astype(np.float32)
        inputs["a"] = np.full_like(inputs["a"], -6)
    launched = []
    launch = Kernel.__call__

    def note(kernel: Kernel, *args: Any, **named: Any) -> None:
        launched.append(kernel.name)
        launch(kernel, *args, **named)

    monkeypatch.setattr(Kernel, "__call__", note)
    monkeypatch.setattr(ops, "delta_net", partial(recurrent.delta_net, chunks=chunks))
    got = case.run(ops, inputs)  # type: ignore[arg-type]
    assert launched == [  # windows of two chunks
        "delta_prepare",
        "delta_net",
        *["delta_chunk_pairs", "delta_chunk_maps", "delta_chunk_states"] * 4,
    ]
    compare(got, case.expected(inputs), 1.2e-5)


@needs_compiler
def test_equal_keys(ops: EmulatedFamilies, chunks: DeltaChunks, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The triangle to invert is full of ones: its inverse has to cancel."""
    case = delta_case("equal keys", Tokens([MIN_TOKENS], [300]), DeltaNetSpec(1, 1, 64, 4, "tiled"))
    inputs: dict[str, Any] = dict(case.inputs())
    inputs["qkv"][:, 64:128] = inputs["qkv"][:1, 64:128]
    inputs["beta"][:], inputs["alpha"][:] = 30, -30
    monkeypatch.setattr(ops, "delta_net", partial(recurrent.delta_net, chunks=chunks))
    compare(case.run(ops, inputs), case.expected(inputs), 1e-5)  # type: ignore[arg-type]


@pytest.mark.skipif(not nvrtc.available(), reason="nvidia-cuda-nvrtc and nvidia-cuda-runtime are not installed")
def test_kernels_read_coherently_what_kernels_write() -> None:
    text = nvrtc.compile_source("recurrent/delta_chunks.cu", {"DIM": 64, "TILED": 0}, 90, kind="PTX").decode()
    assert text.count("griddepcontrol.wait") == 3 and not re.findall(r"ld\.global[.\w]*\.nc", text)


def test_what_goes_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = delta_case("pieces", PIECES, DeltaNetSpec(1, 2, 64, 4, "grouped"))
    step: Any = type("Step", (), {"host": case.inputs()["batch"]})
    spec, other = DeltaNetSpec(1, 2, 64, 4, "grouped"), DeltaNetSpec(1, 2, 48, 4, "grouped")
    assert DeltaChunks(False).sequences(step, spec) == [1, 2]
    assert DeltaChunks(False).sequences(step, other) == [] == DeltaChunks(True).sequences(step, spec)
    monkeypatch.setattr(delta_chunks, "WINDOW_CHUNKS", 0)
    assert DeltaChunks(False).sequences(step, spec) == []
