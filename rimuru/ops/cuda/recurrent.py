"""Launchers of the recurrent layers (cuda_src/recurrent). States are read and written in their pages."""

from __future__ import annotations

from functools import cache
from typing import Any

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec
from rimuru.base.units import ceil_div
from rimuru.ops.base import Array, StateLayer, Step
from rimuru.ops.cuda.delta_chunks import MIN_TOKENS, DeltaChunks
from rimuru.ops.cuda.launch import Kernel

_STATE_SIGNATURE = "pool: *, pages: i32*, fresh: bool*, query_start: i32*, page_bytes: i64, columns: i32, column: i32"
_THREADS = 128
_ROWS_A_BLOCK = 32
"""State rows of a block of delta_net and mamba2: 16 groups of lanes with two rows each."""

_PREPARED, _RAW, _WITH_LOGS = 0, 1, 2
"""What delta_net finds: what it reads, inputs to prepare, or the gates' logarithms in place of the gates."""

_NO_LIMIT = 1 << 30
_PREPARE_THREADS = 256
_CONV_THREADS = 128
_CONV_TOKENS = 8


@cache
def conv_kernels(taps: int) -> dict[str, Kernel]:
    """conv_step, conv_tokens and conv_state for a kernel of `taps` taps."""
    signature = (
        "u: f32*, weight: f32*, bias: f32*, out: f32*, pool: *, pages: i32*, fresh: bool*, query_start: i32*,"
        "seq_of_token: i32*, page_bytes: i64, columns: i32, column: i32, channels: i32, silu_after: i32"
    )
    path, defines = "recurrent/conv_update.cu", {"TAPS": taps}
    return {
        "conv_step": Kernel(path, "conv_step", signature, defines),
        "conv_tokens": Kernel(path, "conv_tokens", signature + ", n_tokens: i32", defines),
        "conv_state": Kernel(path, "conv_state", signature, defines),
    }


@cache
def delta_net_kernels(head_dim: int, head_order: str) -> tuple[Kernel, Kernel]:
    """delta_prepare and delta_net."""
    path, defines = "recurrent/deltanet.cu", {"DIM": head_dim, "TILED": int(head_order == "tiled")}
    prepare = (
        "qkv: f32*, beta: f32*, alpha: f32*, a: f32*, dt_bias: f32*, n_key_heads: i32, n_value_heads: i32, eps: f32,"
        "as_logs: i32"
    )
    step = (
        "qkv: f32*, beta: f32*, decay: f32*, a: f32*, dt_bias: f32*, out: f32*,"
        f"{_STATE_SIGNATURE}, n_key_heads: i32, n_value_heads: i32, form: i32, eps: f32, limit: i32"
    )
    return Kernel(path, "delta_prepare", prepare, defines), Kernel(path, "delta_net", step, defines)


@cache
def mamba2_kernel(state_size: int, head_dim: int) -> Kernel:
    return Kernel(
        "recurrent/mamba2.cu",
        "mamba2",
        "xbc: f32*, dt: f32*, a: f32*, d: f32*, dt_bias: f32*, out: f32*,"
        f"{_STATE_SIGNATURE}, n_heads: i32, n_groups: i32",
        {"STATE": state_size, "HEAD_DIM": head_dim},
    )


@cache
def mamba1_kernel(state_size: int) -> Kernel:
    return Kernel(
        "recurrent/mamba1.cu",
        "mamba1",
        f"x: f32*, dt: f32*, b: f32*, c: f32*, a: f32*, d: f32*, out: f32*, {_STATE_SIGNATURE}, inner: i32",
        {"STATE": state_size},
    )


def _ssm_arguments(step: Step, state: StateLayer) -> tuple[Any, ...]:
    assert state.ssm is not None
    pages = step.ssm_pages
    return (
        state.pool_base, pages, step.fresh_state, step.query_start, state.ssm.page_bytes, pages.shape[1],
        state.ssm_column,
    )  # fmt: skip


def conv_update(
    u: Array, weight: Array, bias: Array | None, silu: bool, step: Step, state: StateLayer, out: Array
) -> None:
    assert state.conv is not None
    n_tokens, channels = u.shape
    pages = step.conv_pages
    kernels = conv_kernels(weight.shape[1])
    args = (
        u, weight, bias, out, state.pool_base, pages, step.fresh_state, step.query_start, step.seq_of_token,
        state.conv.page_bytes, pages.shape[1], state.conv_column, channels, silu,
    )  # fmt: skip
    n_seqs, blocks = step.host.n_seqs, ceil_div(channels, _CONV_THREADS)
    if n_tokens == n_seqs:
        kernels["conv_step"]((blocks, n_seqs), (_CONV_THREADS,), args)
        return
    kernels["conv_tokens"]((blocks, ceil_div(n_tokens, _CONV_TOKENS)), (_CONV_THREADS,), (*args, n_tokens))
    kernels["conv_state"]((blocks, n_seqs), (_CONV_THREADS,), args)


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
    chunks: DeltaChunks | None = None,
) -> None:
    """Prompts: q, k, beta and alpha are overwritten by what the recurrence reads. `chunks` takes the long sequences."""
    prepare, recurrence = delta_net_kernels(spec.head_dim, spec.head_order)
    heads = (spec.n_key_heads, spec.n_value_heads)
    raw = qkv.shape[0] == step.host.n_seqs
    long = [] if raw or chunks is None else chunks.sequences(step, spec)
    if not raw:
        prepare((qkv.shape[0],), (_PREPARE_THREADS,), (qkv, beta, alpha, a, dt_bias, *heads, eps, bool(long)))
    arguments = _ssm_arguments(step, state)
    if len(long) < step.host.n_seqs:
        form, limit = _RAW if raw else _WITH_LOGS if long else _PREPARED, MIN_TOKENS if long else _NO_LIMIT
        recurrence(
            (spec.n_value_heads * ceil_div(spec.head_dim, _ROWS_A_BLOCK), step.host.n_seqs),
            (_THREADS,),
            (qkv, beta, alpha, a, dt_bias, out, *arguments, *heads, form, eps, limit),
        )
    if chunks is not None and long:
        pool, pages, fresh, _, *where = arguments
        chunks.run(long, (qkv, beta, alpha), spec, step, (pool, pages, fresh, *where), out)


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
    head_dim = spec.inner_size // spec.n_heads
    parts = ceil_div(head_dim, _ROWS_A_BLOCK)
    mamba2_kernel(spec.state_size, head_dim)(
        (spec.n_heads * parts, step.host.n_seqs),
        (_THREADS,),
        (xbc, dt, a, d, dt_bias, out, *_ssm_arguments(step, state), spec.n_heads, spec.n_groups),
    )


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
    mamba1_kernel(spec.state_size)(
        (ceil_div(spec.inner_size, _THREADS // 4), step.host.n_seqs),
        (_THREADS,),
        (x, dt, b, c, a, d, out, *_ssm_arguments(step, state), spec.inner_size),
    )
