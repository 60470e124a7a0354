"""Reference of the recurrent verbs: token after token, states read from and written to their pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.ops.base import Array, StateLayer, Step
from rimuru.ops.host import bytes_at
from rimuru.ops.reference.pointwise import sigmoid, softplus


def _sequences(step: Step) -> Iterator[tuple[int, range]]:
    """(sequence, its token rows)."""
    for seq in range(len(step.context_len)):
        yield seq, range(int(step.query_start[seq]), int(step.query_start[seq + 1]))


def _ssm_state(step: Step, state: StateLayer, seq: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(stored float32 state in its page, float64 copy of it; zeros where the sequence starts here)."""
    if state.ssm is None:
        raise ValueError("the layer has no recurrent state")
    page = int(step.ssm_pages[seq, state.ssm_column])
    n_bytes = int(np.prod(shape)) * 4
    stored = bytes_at(state.pool_base + page * state.ssm.page_bytes, n_bytes).view(np.float32).reshape(shape)
    return stored, np.zeros(shape) if step.fresh_state[seq] else stored.astype(np.float64)


def conv_update(
    u: Array, weight: Array, bias: Array | None, silu: bool, step: Step, state: StateLayer, out: Array
) -> None:
    if state.conv is None:
        raise ValueError("the layer has no convolution state")
    channels, n_taps = weight.shape
    for seq, rows in _sequences(step):
        first = int(step.conv_pages[seq, state.conv_column])
        stored = [
            bytes_at(state.pool_base + (first + row) * state.conv.page_bytes, channels * 4).view(np.float32)
            for row in range(n_taps - 1)
        ]
        past = np.zeros((n_taps - 1, channels)) if step.fresh_state[seq] else np.stack(stored).astype(np.float64)
        inputs = np.concatenate([past, u[rows.start : rows.stop]])
        for at, token in enumerate(rows):
            total = np.einsum("kc,ck->c", inputs[at : at + n_taps], weight.astype(np.float64))
            total = total if bias is None else total + bias
            out[token] = total * sigmoid(total) if silu else total
        for row, target in enumerate(stored):
            target[...] = inputs[len(rows) + row]


def delta_net(
    qkv: Array,
    beta: Array,
    alpha: Array,
    a: Array,
    dt_bias: Array,
    spec: DeltaNetSpec,
    eps: float,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    n_key, n_value, dim = spec.n_key_heads, spec.n_value_heads, spec.head_dim
    heads = np.arange(n_value)
    key_head = heads // (n_value // n_key) if spec.head_order == "grouped" else heads % n_key
    for seq, rows in _sequences(step):
        stored, matrix = _ssm_state(step, state, seq, (n_value, dim, dim))
        for token in rows:
            row = qkv[token].astype(np.float64).reshape(-1, dim)
            query, key, value = row[:n_key], row[n_key : 2 * n_key], row[2 * n_key :]
            query = query / np.sqrt(np.square(query).sum(axis=1, keepdims=True) + eps) / np.sqrt(dim)
            key = key / np.sqrt(np.square(key).sum(axis=1, keepdims=True) + eps)
            query, key = query[key_head], key[key_head]
            matrix = matrix * np.exp(a * softplus(alpha[token].astype(np.float64) + dt_bias))[:, None, None]
            correction = value - np.einsum("hvk,hk->hv", matrix, key)
            correction = correction * sigmoid(beta[token].astype(np.float64))[:, None]
            matrix = matrix + correction[:, :, None] * key[:, None, :]
            out[token] = np.einsum("hvk,hk->hv", matrix, query).reshape(-1)
        stored[...] = matrix


def mamba2(
    xbc: Array,
    dt: Array,
    a: Array,
    d: Array,
    dt_bias: Array,
    spec: Mamba2Spec,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    n_heads, n_groups, width = spec.n_heads, spec.n_groups, spec.state_size
    group = np.arange(n_heads) // (n_heads // n_groups)
    for seq, rows in _sequences(step):
        stored, matrix = _ssm_state(step, state, seq, (n_heads, spec.inner_size // n_heads, width))
        for token in rows:
            row = xbc[token].astype(np.float64)
            x = row[: spec.inner_size].reshape(n_heads, -1)
            b, c = row[spec.inner_size :].reshape(2, n_groups, width)
            gain = softplus(dt[token].astype(np.float64) + dt_bias)
            matrix = matrix * np.exp(gain * a)[:, None, None]
            matrix = matrix + (gain[:, None] * x)[:, :, None] * b[group][:, None, :]
            out[token] = (np.einsum("hpn,hn->hp", matrix, c[group]) + d[:, None] * x).reshape(-1)
        stored[...] = matrix


def mamba1(
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    a: Array,
    d: Array,
    spec: Mamba1Spec,
    step: Step,
    state: StateLayer,
    out: Array,
) -> None:
    for seq, rows in _sequences(step):
        stored, matrix = _ssm_state(step, state, seq, (spec.inner_size, spec.state_size))
        for token in rows:
            gain = softplus(dt[token].astype(np.float64))
            inputs = x[token].astype(np.float64)
            matrix = matrix * np.exp(gain[:, None] * a) + (gain * inputs)[:, None] * b[token]
            out[token] = matrix @ c[token].astype(np.float64) + d * inputs
        stored[...] = matrix
