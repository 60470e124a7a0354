"""Launcher of the matrices that each head has for itself (cuda_src/matmul/head_linear.cu)."""

from __future__ import annotations

from functools import cache

from rimuru.base.units import ceil_div
from rimuru.ops.base import Act, Array, Weight
from rimuru.ops.cuda.activations import ACT_SIGNATURE, act_arguments, blocks_wanted
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.pointwise import quantise

_TOKENS = 8
_LANE_TOKENS = 16
"""Up to this many tokens lanes share a row; beyond, a thread has one, with the same order of sums."""


def row_lanes(n_in: int) -> int:
    """Lanes that share a row. Depends on the width only, so that the order of sums does too."""
    return 8 if n_in >= 256 else 4


@cache
def head_linear_kernel(format_name: str, lanes: int = 8, tokens: int = _TOKENS, whole: bool = False) -> Kernel:
    return Kernel(
        "matmul/head_linear.cu",
        "head_linear",
        f"x: f32*, weights: u8*, out: f32*, {ACT_SIGNATURE}, n_tokens: i32, n_head: i32, n_in: i32, n_out: i32,"
        "rest: i32, row_bytes: i64, factor: f32",
        {"FORMAT": format_name, "ROW_LANES": lanes, "TOKEN_TILE": tokens, "WHOLE_ROWS": int(whole)},
    )


def head_linear(x: Array, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
    """See Ops.head_linear; the scratch `heads` is not needed here."""
    n_tokens, n_in, n_out = x.shape[0], weight.n_in, weight.n_out // n_head
    rest = x.shape[1] // n_head - n_in
    lanes, tokens, whole = row_lanes(n_in), 1 if n_tokens == 1 else _TOKENS, n_tokens > _LANE_TOKENS
    threads, n_rows = (128, 128) if whole else (256, 256 // lanes)
    wanted = blocks_wanted(out, n_tokens)
    fused = wanted and rest == 0 and n_out % 32 == 0
    act = act_arguments(out) if fused else (None, None, None)
    head_linear_kernel(weight.format.name, lanes, tokens, whole)(
        (ceil_div(n_out, n_rows), n_head, ceil_div(n_tokens, tokens)),
        (threads,),
        (x, weight.data, out.f32, *act, n_tokens, n_head, n_in, n_out, rest, weight.data.strides[0], weight.factor),
        shared_bytes=tokens * (n_in + n_in // 32 * 4) * 4,
    )
    if wanted and not fused:
        quantise(out, n_tokens)
