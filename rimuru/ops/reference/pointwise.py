"""Reference of the pointwise verbs. Sums are in float64; results are rounded to the type of the output array."""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import Activation
from rimuru.formats.quants_ref import dequantize
from rimuru.ops.base import Act, Array, Weight


def sigmoid(z: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def silu(z: np.ndarray) -> np.ndarray:
    """z * sigmoid(z)."""
    return z * sigmoid(z)


def softplus(z: np.ndarray) -> np.ndarray:
    """log(1 + exp(z)) without overflow."""
    return np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))


def activate(gate: np.ndarray | None, up: np.ndarray, activation: Activation) -> np.ndarray:
    """act(gate) * up, or act(up) where gate is None; float64."""
    z = (up if gate is None else gate).astype(np.float64)
    if activation == "swiglu_oai":
        z = np.minimum(z, 7.0)
        plain = z * sigmoid(1.702 * z)
        return plain if gate is None else plain * (np.clip(up.astype(np.float64), -7.0, 7.0) + 1.0)
    if activation == "silu":
        plain = silu(z)
    elif activation == "gelu_tanh":
        plain = 0.5 * z * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)))
    elif activation == "identity":
        plain = z
    else:
        plain = np.square(np.maximum(z, 0.0))
    return plain if gate is None else plain * up


def normalise(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """RMS norm over the last axis; float64."""
    x = x.astype(np.float64)
    scaled = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)
    return scaled if weight is None else scaled * weight


def embed(table: Weight, token_ids: Array, scale: float, out: Array) -> None:
    out[...] = dequantize(table.data[token_ids], table.format).astype(np.float64) * scale


def rms_norm(x: Array, weight: Array, eps: float, out: Act, may_wait: bool = False) -> None:
    out.f32[: len(x)] = normalise(x, weight, eps)


def add_norm(x: Array, delta: Array, weight: Array, eps: float, scale: float) -> None:
    x += (scale * normalise(delta, weight, eps)).astype(x.dtype)


def gated_norm(x: Array, gate: Array, weight: Array, eps: float, n_groups: int, gate_first: bool, out: Act) -> None:
    n_tokens, width = x.shape
    part = width // n_groups
    opened = silu(gate.astype(np.float64))
    values = x * opened if gate_first else x
    normed = normalise(values.reshape(n_tokens, n_groups, part), weight.reshape(-1, part), eps).reshape(x.shape)
    out.f32[:n_tokens] = normed if gate_first else normed * opened


def glu(gate: Array | None, up: Array, activation: Activation, out: Act) -> None:
    out.f32[: len(up)] = activate(gate, up, activation)


def multiply(a: Array, b: Array, out: Act) -> None:
    out.f32[: len(a)] = a.astype(np.float64) * b


def row_gate(x: Act, weight: Array, out: Array) -> None:
    out[...] = sigmoid(x.f32[: len(out)].astype(np.float64) @ weight.astype(np.float64))


def gather_rows(x: Array, rows: Array, out: Array) -> None:
    out[...] = x[rows]


def finish_logits(logits: Array, scale: float, softcap: float | None) -> None:
    values = logits.astype(np.float64) * scale
    logits[...] = values if softcap is None else softcap * np.tanh(values / softcap)
