"""Launchers of norms, products, gates and row copies (cuda_src/pointwise)."""

from __future__ import annotations

from rimuru.base.units import ceil_div
from rimuru.ops.base import Act, Array
from rimuru.ops.cuda.activations import (
    ACT_SIGNATURE,
    RMS_NORM_KERNEL,
    act_arguments,
    blocks_wanted,
    row_threads,
    settle,
)
from rimuru.ops.cuda.activations import rms_norm as rms_norm
from rimuru.ops.cuda.launch import Kernel

ACTIVATION_IDS = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "swiglu_oai": 3, "identity": 4}
"""Numbers of the activations in kernels (cuda_src/common/math.cuh)."""

_GLU_COLUMNS = 256
_NARROW_WARPS = 8
_NARROW_WIDTH = 512
"""Parts of a gated norm up to this width have a warp each (cuda_src/pointwise/norm.cu)."""


_add_norm = Kernel(
    "pointwise/norm.cu", "add_norm", "x: f32*, delta: f32*, weight: f32*, width: i32, eps: f32, scale: f32"
)
_GATED_SIGNATURE = (
    f"x: f32*, gate: f32*, weight: f32*, out: f32*, {ACT_SIGNATURE},"
    "width: i32, n_groups: i32, shared_weight: i32, gate_first: i32, eps: f32, n_parts: i32"
)
_gated_norm = Kernel("pointwise/norm.cu", "gated_norm", _GATED_SIGNATURE)
_gated_norm_narrow = Kernel("pointwise/norm.cu", "gated_norm_narrow", _GATED_SIGNATURE)
_gated_norm_128 = Kernel("pointwise/norm.cu", "gated_norm_128", _GATED_SIGNATURE)
_glu = Kernel(
    "pointwise/glu.cu",
    "glu_rows",
    f"gate: f32*, up: f32*, out: f32*, {ACT_SIGNATURE}, width: i32, columns: i32, activation: i32",
)
_row_gate = Kernel("pointwise/glu.cu", "row_gate", "x: f32*, weight: f32*, out: f32*, width: i32")
_gather_rows = Kernel("pointwise/glu.cu", "gather_rows", "x: f32*, rows: i32*, out: f32*, width: i32")
_finish_logits = Kernel("pointwise/glu.cu", "finish_logits", "logits: f32*, n: i64, scale: f32, cap: f32")
_take_tokens = Kernel("pointwise/glu.cu", "take_tokens", "ids: i32*, previous: i32*, n: i32, n_previous: i32")
_multiply = Kernel(
    "pointwise/glu.cu", "multiply_rows", f"a: f32*, b: f32*, out: f32*, {ACT_SIGNATURE}, width: i32, columns: i32"
)

KERNELS = (
    RMS_NORM_KERNEL, _add_norm, _gated_norm, _gated_norm_narrow, _gated_norm_128, _glu, _row_gate, _gather_rows,
    _finish_logits, _multiply, _take_tokens,
)  # fmt: skip


def add_norm(x: Array, delta: Array, weight: Array, eps: float, scale: float) -> None:
    n_tokens, width = x.shape
    _add_norm((n_tokens,), (row_threads(width),), (x, delta, weight, width, eps, scale))


def gated_norm(x: Array, gate: Array, weight: Array, eps: float, n_groups: int, gate_first: bool, out: Act) -> None:
    n_tokens, width = x.shape
    part = width // n_groups
    fused, wanted = part % 32 == 0, blocks_wanted(out, n_tokens)
    act = act_arguments(out) if fused and wanted else (None, None, None)
    shared_weight = weight.size == part
    n_parts = n_tokens * n_groups
    args = (x, gate, weight, out.f32, *act, width, n_groups, shared_weight, gate_first, eps, n_parts)
    if part <= _NARROW_WIDTH:
        kernel = _gated_norm_128 if part <= 128 else _gated_norm_narrow
        kernel((ceil_div(n_parts, _NARROW_WARPS),), (32 * _NARROW_WARPS,), args)
    else:
        _gated_norm((n_parts,), (row_threads(part),), args)
    if wanted and not fused:
        quantise(out, n_tokens)


def glu(gate: Array | None, up: Array, activation: str, out: Act) -> None:
    n_tokens, width = up.shape
    # An identity only brings values into an activation, which experts may read.
    wanted = blocks_wanted(out, n_tokens) or activation == "identity"
    act = act_arguments(out) if wanted else (None, None, None)
    _glu(
        (n_tokens, ceil_div(width, _GLU_COLUMNS)),
        (256,),
        (gate, up, out.f32, *act, width, _GLU_COLUMNS, ACTIVATION_IDS[activation]),
    )


def multiply(a: Array, b: Array, out: Act) -> None:
    n_tokens, width = a.shape
    act = act_arguments(out) if blocks_wanted(out, n_tokens) else (None, None, None)
    _multiply((n_tokens, ceil_div(width, _GLU_COLUMNS)), (256,), (a, b, out.f32, *act, width, _GLU_COLUMNS))


def quantise(act: Act, n_tokens: int) -> None:
    """Fill the 8-bit form of an activation whose float32 values are there."""
    if act_arguments(act)[0] is not None:
        glu(None, act.f32[:n_tokens], "identity", act)


def row_gate(x: Act, weight: Array, out: Array) -> None:
    n_tokens, width = x.f32.shape
    settle(x)
    _row_gate((n_tokens,), (row_threads(width),), (x.f32, weight, out, width))


def gather_rows(x: Array, rows: Array, out: Array) -> None:
    width = x.shape[1]
    _gather_rows((rows.shape[0],), (row_threads(width),), (x, rows, out, width))


def finish_logits(logits: Array, scale: float, softcap: float | None) -> None:
    n = logits.size
    _finish_logits((ceil_div(n, 256),), (256,), (logits, n, scale, softcap or 0.0))


def take_tokens(ids: Array, previous: Array) -> None:
    """Replace the ids -1 - r by previous[r]: tokens of the step before that only the device knows."""
    _take_tokens((ceil_div(ids.shape[0], 128),), (128,), (ids, previous, ids.shape[0], previous.shape[0]))
