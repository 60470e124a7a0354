"""Launcher of the token embedding (cuda_src/pointwise/embed.cu)."""

from __future__ import annotations

from functools import cache

from rimuru.base.units import ceil_div
from rimuru.ops.base import Array, Weight
from rimuru.ops.cuda.launch import Kernel

_THREADS = 64


@cache
def embed_kernel(format_name: str) -> Kernel:
    return Kernel(
        "pointwise/embed.cu",
        "embed",
        "table: u8*, ids: i32*, out: f32*, n_vocab: i32, width: i32, row_bytes: i64, scale: f32",
        {"FORMAT": format_name},
    )


def embed(table: Weight, token_ids: Array, scale: float, out: Array) -> None:
    n_tokens, width = out.shape
    embed_kernel(table.format.name)(
        (n_tokens, ceil_div(width // 32, _THREADS)),
        (_THREADS,),
        (table.data, token_ids, out, table.n_out, width, table.data.strides[0], scale),
    )
