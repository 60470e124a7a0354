"""Norms, activations and other row-wise verbs on the CPU. Row sums run in the fixed order of lanes.py."""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from rimuru.arch.spec import Activation
from rimuru.ops.base import Act, Array
from rimuru.ops.cpu.lanes import dot, exp, floats, take_number
from rimuru.ops.cpu.simd_calls import i64_at
from rimuru.ops.cpu.work import FIELDS, Worker, matrix, run

_PARALLEL_ELEMENTS = 1 << 18
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "swiglu_oai": 3, "identity": 4}
_ONE = np.float32(1.0)
_GELU_SLOPE = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBE = np.float32(0.044715)
_OAI_SLOPE = np.float32(1.702)
_OAI_LIMIT = np.float32(7.0)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def row_of(x, t):  # type: ignore[no-untyped-def]
    """Row t of a float32 array [T, w] whose rows are contiguous, as a contiguous array. The caller keeps x alive."""
    return carray(floats(x.ctypes.data + t * x.strides[0]), (x.shape[1],))


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def copy_row(target, source):  # type: ignore[no-untyped-def]
    """target[i] = source[i] for all of source. A slice assignment would compile Numba's shape errors, for seconds."""
    for i in range(source.size):
        target[i] = source[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def sigmoid(z):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-z)) of a float32, without overflow."""
    small = exp(-abs(z))
    return (_ONE if z >= np.float32(0.0) else small) / (_ONE + small)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def activated(z, kind):  # type: ignore[no-untyped-def]
    """The activation of a gate value; see `Ops.glu`. kind: index in _ACTIVATIONS."""
    if kind == 0:
        return z * sigmoid(z)
    if kind == 1:
        return z * sigmoid(_GELU_SLOPE * (z + _GELU_CUBE * z * z * z))
    if kind == 2:
        return max(z, np.float32(0.0)) * max(z, np.float32(0.0))
    if kind == 4:
        return z
    bounded = min(z, _OAI_LIMIT)
    return bounded * sigmoid(_OAI_SLOPE * bounded)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def inverse_rms(address, width, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean(x^2) + eps) over `width` floats at an address."""
    return _ONE / np.sqrt(dot(address, address, width) / np.float32(width) + eps)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _rms_norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for t in range(x.shape[0]):
        source, target = row_of(x, t), row_of(out, t)
        factor = inverse_rms(source.ctypes.data, width, eps)
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _add_norm(x, delta, weight, eps, scale):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for t in range(x.shape[0]):
        source, target = row_of(delta, t), row_of(x, t)
        factor = inverse_rms(source.ctypes.data, width, eps) * scale
        for i in range(width):
            target[i] += source[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _scale_part(source, factor, weight, gate_first, target):  # type: ignore[no-untyped-def]
    """target = source * factor * weight, times the opened gate that lies in target unless that was applied before."""
    if gate_first:
        for i in range(target.size):
            target[i] = source[i] * factor * weight[i]
    else:
        for i in range(target.size):
            target[i] *= source[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _gated_norm(x, gate, weight, eps, n_groups, gate_first, out):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    part = width // n_groups
    for t in range(x.shape[0]):
        source, opener, target = row_of(x, t), row_of(gate, t), row_of(out, t)
        for i in range(width):
            opened = opener[i] * sigmoid(opener[i])
            target[i] = source[i] * opened if gate_first else opened
        normed = target if gate_first else source
        for group in range(n_groups):
            start = group * part
            factor = inverse_rms(normed.ctypes.data + start * 4, part, eps)
            scale = weight if weight.size == part else weight[start : start + part]
            _scale_part(normed[start : start + part], factor, scale, gate_first, target[start : start + part])


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _glu_row(opener, source, kind, gated, target):  # type: ignore[no-untyped-def]
    # One loop per activation: a choice inside the loop would keep it from becoming vector code.
    if kind == 0:
        for i in range(target.size):
            target[i] = activated(opener[i], 0)
    elif kind == 1:
        for i in range(target.size):
            target[i] = activated(opener[i], 1)
    elif kind == 2:
        for i in range(target.size):
            target[i] = activated(opener[i], 2)
    elif kind == 3:
        for i in range(target.size):
            target[i] = activated(opener[i], 3)
    else:
        for i in range(target.size):
            target[i] = opener[i]
    if gated and kind == 3:
        for i in range(target.size):
            target[i] *= max(min(source[i], _OAI_LIMIT), -_OAI_LIMIT) + _ONE
    elif gated:
        for i in range(target.size):
            target[i] *= source[i]


@Worker
def _glu_worker(context, index):  # type: ignore[no-untyped-def]
    """Take rows until none is left."""
    c = i64_at(context, FIELDS)
    gate, up, out, width = matrix(c, 0), matrix(c, 1), matrix(c, 2), c[10]
    t = take_number(context)
    while t < up.shape[0]:
        _glu_row(gate[t, :width], up[t, :width], c[11], c[12] != 0, out[t, :width])
        t = take_number(context)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _multiply(a, b, out):  # type: ignore[no-untyped-def]
    for t in range(a.shape[0]):
        left, right, target = row_of(a, t), row_of(b, t), row_of(out, t)
        for i in range(left.size):
            target[i] = left[i] * right[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _row_gate(x, weight, out):  # type: ignore[no-untyped-def]
    for t in range(out.shape[0]):
        out[t] = sigmoid(dot(row_of(x, t).ctypes.data, weight.ctypes.data, weight.size))


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _cap(logits, scale, softcap):  # type: ignore[no-untyped-def]
    for t in range(logits.shape[0]):
        row = row_of(logits, t)
        for i in range(row.size):
            row[i] = softcap * math.tanh(row[i] * scale / softcap)


def rms_norm(x: Array, weight: Array, eps: float, out: Act, may_wait: bool = False) -> None:
    """See `Ops.rms_norm`; fills `out.f32` only."""
    _rms_norm(x, weight, np.float32(eps), out.f32)


def add_norm(x: Array, delta: Array, weight: Array, eps: float, scale: float) -> None:
    """See `Ops.add_norm`."""
    _add_norm(x, delta, weight, np.float32(eps), np.float32(scale))


def gated_norm(x: Array, gate: Array, weight: Array, eps: float, n_groups: int, gate_first: bool, out: Act) -> None:
    """See `Ops.gated_norm`; fills `out.f32` only."""
    _gated_norm(x, gate, weight.reshape(-1), np.float32(eps), n_groups, gate_first, out.f32)


def glu(gate: Array | None, up: Array, activation: Activation, out: Act) -> None:
    """See `Ops.glu`; fills `out.f32` only."""
    opener = up if gate is None else gate
    numbers = (up.shape[1], _ACTIVATIONS[activation], gate is not None)
    run(_glu_worker, (opener, up, out.f32), numbers, up.shape[0] > 1 and up.size > _PARALLEL_ELEMENTS)


def multiply(a: Array, b: Array, out: Act) -> None:
    """See `Ops.multiply`; fills `out.f32` only."""
    _multiply(a, b, out.f32)


def row_gate(x: Act, weight: Array, out: Array) -> None:
    """See `Ops.row_gate`."""
    _row_gate(x.f32, weight, out)


def gather_rows(x: Array, rows: Array, out: Array) -> None:
    """See `Ops.gather_rows`."""
    np.take(x, rows, axis=0, out=out, mode="clip")


def finish_logits(logits: Array, scale: float, softcap: float | None) -> None:
    """See `Ops.finish_logits`."""
    if softcap is not None:
        _cap(logits, np.float32(scale), np.float32(softcap))
    elif scale != 1.0:
        logits *= np.float32(scale)
