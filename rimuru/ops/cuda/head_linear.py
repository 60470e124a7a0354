"""Launcher of the matrices that each head has for itself (cuda_src/matmul/head_linear.cu)."""

from __future__ import annotations

from functools import cache

from rimuru.base.units import ceil_div
from rimuru.ops.base import Act, Array, Weight
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.pointwise import blocks_wanted, quantise

_THREADS, _TOKENS = 128, 8


@cache
def head_linear_kernel(format_name: str) -> Kernel:
    return Kernel(
        "matmul/head_linear.cu",
        "head_linear",
        "x: f32*, weights: u8*, out: f32*, n_tokens: i32, n_head: i32, n_in: i32, n_out: i32, rest: i32,"
        "row_bytes: i64, factor: f32",
        {"FORMAT": format_name},
    )


def head_linear(x: Array, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
    """See Ops.head_linear; the scratch `heads` is not needed here."""
    n_tokens, n_out = x.shape[0], weight.n_out // n_head
    rest = x.shape[1] // n_head - weight.n_in
    head_linear_kernel(weight.format.name)(
        (ceil_div(n_out, _THREADS), n_head, ceil_div(n_tokens, _TOKENS)),
        (_THREADS,),
        (x, weight.data, out.f32, n_tokens, n_head, weight.n_in, n_out, rest, weight.data.strides[0], weight.factor),
        shared_bytes=_TOKENS * weight.n_in * 4,
    )
    if blocks_wanted(out, n_tokens):
        quantise(out, n_tokens)
