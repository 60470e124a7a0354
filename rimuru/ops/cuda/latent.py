"""Launcher of the decode kernels for latent keys (cuda_src/attention/latent_decode.cu)."""

from __future__ import annotations

from functools import cache
from typing import Any

from rimuru.memory.specs import KvGroupLayout
from rimuru.ops.cuda.activations import ACT_SIGNATURE
from rimuru.ops.cuda.launch import Kernel

TARGET_BLOCKS = 132
"""Blocks that a launch aims at: one on each multiprocessor of the largest cards."""

GROUP = 16
"""Most heads of a block."""

_KEYS, _THREADS = 64, 256
_SMALLEST_SHARED_BYTES = 97 * 1024
"""Dynamic shared memory that a block may have on every supported card, beside what the kernel has of its own."""


def shared_bytes(key_dim: int) -> int:
    """Dynamic shared memory: keys and queries in rows of 8 elements more, weights."""
    return 2 * ((_KEYS + 16) * (key_dim + 8) + 16 * (_KEYS + 8))


def has_latent_kernel(group: KvGroupLayout, value_dim: int) -> bool:
    """Whether keys are values too and of a shape that the tensor cores' kernel can do."""
    fits = group.key_dim % 32 == 0 and value_dim % 128 == 0 and value_dim <= min(group.key_dim, 1024)
    return (
        group.value_dim == 0
        and group.element != "f32"
        and fits
        and shared_bytes(group.key_dim) <= _SMALLEST_SHARED_BYTES
    )


@cache
def latent_kernels(key_dim: int, value_dim: int, heads: int, element: str) -> tuple[Kernel, Kernel]:
    """Attention over splits, and their folding."""
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "GROUP": heads, "ELEMENT": int(element == "bf16")}
    where = "q: f32*, positions: i32*, seq_of_token: i32*, query_start: i32*"
    decode = Kernel(
        "attention/latent_decode.cu",
        "latent_decode",
        f"{where}, kv_base: *, pages: i32*, sinks: f32*, partials: f32*, out: f32*, {ACT_SIGNATURE}, page_bytes: i64,"
        "n_blocks: i32, page_tokens: i32, n_head: i32, n_head_kv: i32, q_stride: i32, window: i32, gated: i32,"
        "by_sequence: i32, scale: f32",
        defines,
    )
    fold = Kernel(
        "attention/latent_decode.cu",
        "latent_fold",
        f"{where}, sinks: f32*, partials: f32*, out: f32*, {ACT_SIGNATURE}, n_head: i32, q_stride: i32, window: i32,"
        "gated: i32, by_sequence: i32",
        defines,
    )
    return decode, fold


def launch_latent(
    group: KvGroupLayout,
    value_dim: int,
    grid: tuple[int, int, int],
    tokens: tuple[Any, ...],
    cache_at: tuple[Any, ...],
    partials: Any,
    out: tuple[Any, ...],
    shape: tuple[Any, ...],
    by_sequence: bool,
    scale: float,
) -> None:
    """Both kernels, or the first where it is enough.

    grid: (chunks of heads, queries, splits at once); tokens: (q, positions, seq_of_token, query_start); cache_at:
    (base, pages, sinks); out with its 8-bit form; shape: (page bytes, blocks, tokens of a page, heads, KV heads,
    stride of q, window, gated).
    """
    n_head, q_stride, window, gated = shape[3], *shape[5:]
    decode, fold = latent_kernels(group.key_dim, value_dim, n_head // grid[0], group.element)
    decode(
        grid, (_THREADS,), (*tokens, *cache_at, partials, *out, *shape, by_sequence, scale),
        shared_bytes=shared_bytes(group.key_dim),
    )  # fmt: skip
    if grid[2] > 1:
        arguments = (*tokens, cache_at[2], partials, *out, n_head, q_stride, window, gated, by_sequence)
        fold((n_head, grid[1]), (value_dim // 2,), arguments)
