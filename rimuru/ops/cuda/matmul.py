"""Launchers of products with packed matrices, and the forms of activations that they read (cuda_src/matmul).

Few tokens: 8-bit activations and integer dot products, weights read once per 8 tokens. The order of a row's sums
depends on its width only, so results do not depend on the batch. More: halves with one scale a row, on tensor cores;
for some tens of tokens with weights decoded in registers, for many with weights decoded into shared memory. Where one
way gives way to the next was measured on an H200 (tools/LOG.md).
An activation without halves (`act(deterministic=True)`) always takes the first way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.formats.quants import QuantFormat
from rimuru.ops.base import Act, Array, Weight
from rimuru.ops.cuda.activations import ACT_BLOCK as ACT_BLOCK
from rimuru.ops.cuda.activations import ACT_SIGNATURE, act_arguments, pending_norm, settle
from rimuru.ops.cuda.activations import MAX_GEMV_TOKENS as MAX_GEMV_TOKENS
from rimuru.ops.cuda.activations import act as act
from rimuru.ops.cuda.activations import act_bytes as act_bytes
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.factors import with_factors

TOKEN_TILE = 8
"""Most tokens that the integer kernels handle for one reading of the weights."""

MAX_NORM_BLOCKS = 800
"""Most blocks of a launch that norm its input, each for itself: two rounds of them on a large card."""

WIDE_DOTS = ("q6_k",)
"""Types of which a lane takes 64 weights at a time (cuda_src/quants/q6_k.cuh), at every number of tokens."""

BULKY_STRIPS = ("f16", "bf16", "q8_0", "q3_k", "q5_k")
"""Types of which strips of 8 tokens and 8 warps, three blocks of them a multiprocessor, lack the registers to ask for
weights a step ahead, and for the first before their input is there. All others of few rows do."""

MIN_F32_TILE_TOKENS = 1024
"""From this many tokens on float32 matrices are multiplied in tiles."""

_GEMV_WARPS = 8
_MAX_MATRICES = 4
_MAX_FORMATS = 3
_NO_BLOCK = 0x7FFFFFFF
TILE_THREADS = 256

_MATRIX = ", ".join(
    f"weight{i}: u8*, out{i}: f32*, bias{i}: f32*, n_out{i}: i32, first{i}: i32, kind{i}: i32"
    for i in range(_MAX_MATRICES)
)
_FINISH = "row_scale: f32*, scale: f32, add: i32, width: i32, n_tokens: i32"

_scale_halves = Kernel("matmul/scale_halves.cu", "scale_halves", "x: f32*, halves: f16*, scales: f32*, width: i32")


_gemm_f32 = Kernel(
    "matmul/gemm_f32.cu",
    "gemm_f32",
    f"x: f32*, weight: *, out: f32*, bias: f32*, {_FINISH}, n_out: i32",
)


COMMON_KERNELS = (_scale_halves, _gemm_f32)
"""Kernels that do not depend on a tensor type."""


def scale_halves(x: Array, halves: Array, scales: Array, n_tokens: int) -> None:
    """halves[t] = x[t] / scales[t] with scales[t] the power of two that fits row t; x [T, width]."""
    width = x.shape[1]
    threads = min(256, 32 * ceil_div(width // 4, 32))
    _scale_halves((n_tokens,), (threads,), (x, halves, scales, width))


def make_halves(x: Act, n_tokens: int) -> None:
    """See to it that the halves of the first n_tokens rows are there."""
    if not x.quant.has_halves:
        scale_halves(x.f32, x.quant.halves, x.quant.half_scales, n_tokens)


def weight(raw: np.ndarray, fmt: QuantFormat, n_in: int) -> Weight:
    """Upload the raw bytes of a matrix with rows of n_in elements (float formats: n_in a multiple of 8)."""
    import cupy

    check_width(fmt, n_in)
    rows = np.ascontiguousarray(raw).view(np.uint8).reshape(-1, fmt.row_bytes(n_in))
    return Weight(cupy.asarray(rows), fmt, rows.shape[0], n_in)


def check_width(fmt: QuantFormat, n_in: int) -> None:
    """Raise where the kernels cannot take rows of this width."""
    unit = 8 if fmt.is_float else fmt.block_elements
    if n_in % unit:
        raise RimuruError(f"{fmt.name} rows of {n_in} elements: the CUDA kernels need a multiple of {unit}")


def row_lanes(n_in: int, format_name: str = "") -> int:
    """Lanes that share a row. Depends on width and type only, so that the order of sums does too."""
    return 8 if n_in <= 1024 and format_name != "f32" else 32  # float32: routers, with few rows


def format_defines(formats: Sequence[str]) -> dict[str, int | str]:
    """-D options that name the formats of a launch of several matrices."""
    return {f"FORMAT_{letter}": name for letter, name in zip("ABC", formats, strict=False)}


def token_tile(n_tokens: int) -> int:
    """Tokens for one reading of the weights: 1, 2, 4 or 8."""
    return next(tile for tile in (1, 2, 4, TOKEN_TILE) if tile >= min(n_tokens, TOKEN_TILE))


@cache
def gemv_kernel(formats: tuple[str, ...], tile: int, lanes: int, rows: int) -> Kernel:
    defines = format_defines(formats) | {
        "TOKEN_TILE": tile, "ROW_LANES": lanes, "LANE_ROWS": rows, "BLOCK_WARPS": _GEMV_WARPS,
    }  # fmt: skip
    signature = f"x_f32: f32*, x_values: i8*, x_scales: f32*, x_sums: i32*, {_MATRIX}, {_FINISH}"
    return Kernel("matmul/gemv.cu", "gemv", signature, defines)


@cache
def norm_gemv_kernel(formats: tuple[str, ...], width: int, lanes: int, rows: int) -> Kernel:
    """`gemv_kernel` for one token whose norm is still to be made."""
    defines = gemv_kernel(formats, 1, lanes, rows).defines | {"NORM_WIDTH": width}
    signature = (
        f"x: f32*, norm_weight: f32*, norm_eps: f32, normed: f32*, {ACT_SIGNATURE}, {_MATRIX}, scale: f32, add: i32"
    )
    return Kernel("matmul/norm_gemv.cu", "norm_gemv", signature, defines)


@cache
def gemm_kernel(formats: tuple[str, ...], tile_n: int, tile_m: int) -> Kernel:
    defines = format_defines(formats) | {"TILE_N": tile_n, "TILE_M": tile_m}
    return Kernel("matmul/gemm.cu", "gemm", f"x: f16*, x_scales: f32*, {_MATRIX}, {_FINISH}", defines)


@cache
def strip_kernel(formats: tuple[str, ...], tokens: int, warps_n: int, warps_k: int, staged: bool) -> Kernel:
    ahead = not staged and (tokens > 8 or warps_k > 8 or not set(formats) & set(BULKY_STRIPS))
    defines = format_defines(formats) | strip_defines(tokens, warps_n, warps_k, staged, ahead)
    return Kernel("matmul/gemm_strip.cu", "gemm_strip", f"x: f16*, x_scales: f32*, {_MATRIX}, {_FINISH}", defines)


def linear_strip(n_rows: int, n_in: int, n_tokens: int) -> tuple[int, int, int, bool]:
    """(tokens, warps over rows, warps over K, staged) of a block of `gemm_strip`, measured on an H200 (tools/LOG.md).

    Few rows fill the device only if K is split. Sharing activations through shared memory pays where each is read by
    many warps: with many rows, of which fewer will do the more tokens there are.
    """
    if n_rows >= 16384:
        return strip_tokens(n_tokens), 8, 1, True
    tokens = 8 if n_tokens <= 8 else 16 if n_tokens <= 32 else 32
    if n_rows >= (10240 if n_tokens <= 8 else 8192 if n_tokens <= 16 else 4096):  # 5,120 and 12,288 rows were measured
        return tokens, 8, 2, True
    if n_tokens <= 32:
        return tokens, 1, 16 if n_tokens <= 8 and n_in >= 4096 else 8, False
    return (16, 4, 4, True) if n_tokens <= 64 else (16, 8, 2, True)


def strip_defines(tokens: int, warps_n: int, warps_k: int, staged: bool, ahead: bool) -> dict[str, int | str]:
    """-D options of the strip kernels (cuda_src/matmul/strip.cuh)."""
    return {
        "STRIP_TOKENS": tokens,
        "WARPS_N": warps_n,
        "WARPS_K": warps_k,
        "STRIP_STAGED": int(staged),
        "STRIP_AHEAD": int(ahead),
        "CHUNK_PIECES": strip_chunk(tokens),
    }


def strip_chunk(tokens: int) -> int:
    """Pieces of K (of 32 elements) in shared memory at a time: at most 83 KiB, which every supported card has."""
    return 64 if tokens <= 16 else 32


def strip_shared_bytes(tokens: int, warps_n: int, warps_k: int, staged: bool) -> int:
    """Dynamic shared memory of a strip (cuda_src/matmul/strip.cuh): activations, or sums that await their addition."""
    chunk = 2 * tokens * (strip_chunk(tokens) // 2 * 72 + 32) if staged else 0
    return max(chunk, (warps_k - 1) * warps_n * (tokens // 8) * 512)


def ring_pitch(fmt: QuantFormat) -> int:
    """Bytes from row to row of a step of 256 elements in shared memory (PITCH of cuda_src/matmul/ring.cuh)."""
    n_bytes = 256 // fmt.block_elements * fmt.block_bytes
    spread = 0 if fmt.block_bytes % 16 == 0 else 30 if fmt.block_bytes % 2 else 29
    return 16 * ((n_bytes + spread) // 16 | 1)


def strip_tokens(n_tokens: float) -> int:
    """Tokens of a strip: 8, 16 or 32."""
    return 8 if n_tokens <= 8 else 16 if n_tokens <= 16 else 32


def tile_shared_bytes(tile_n: int, tile_m: int) -> int:
    """Dynamic shared memory of a tensor-core tile (TILE_SHARED_BYTES of cuda_src/matmul/tile.cuh)."""
    tile_k, x_stages = 8192 // tile_n, 3 if tile_n == 128 else 2
    return 2 * (tile_k + 8) * (2 * tile_n + x_stages * tile_m)


def gemm_tile(n_tokens: int, n_rows: int) -> tuple[int, int]:
    """(rows, tokens) of a tile: large ones where there are two for each of about 130 multiprocessors."""
    return (128, 128) if ceil_div(n_rows, 128) * ceil_div(n_tokens, 128) >= 260 else (128, 64)


def takes_strips(n_tokens: int, n_rows: int) -> bool:
    """Whether strips are faster than tiles of 128 x 64, which few of them leave most of the device idle."""
    return n_tokens <= 96 or ceil_div(n_rows, 128) * ceil_div(n_tokens, 64) < 64


@with_factors
def linear(
    x: Act,
    weights: Sequence[Weight],
    outs: Sequence[Array],
    biases: Sequence[Array | None] | None = None,
    add: bool = False,
    scale: float = 1.0,
    row_scale: Array | None = None,
) -> None:
    """See Ops.linear. All matrices of one way go in one launch."""
    n_tokens = outs[0].shape[0]
    bias_list: Sequence[Array | None] = biases if biases is not None else [None] * len(weights)
    jobs = list(zip(weights, outs, bias_list, strict=True))
    finish = (row_scale, scale, int(add), x.f32.shape[1], n_tokens)
    exact, others = _exact_and_others(jobs)
    on_tensor_cores = n_tokens > MAX_GEMV_TOKENS and x.quant is not None and x.quant.halves is not None
    if on_tensor_cores and others:
        make_halves(x, n_tokens)
    for group in _launch_groups(others):
        if not on_tensor_cores:
            _launch_gemv(x, group, finish)
        elif takes_strips(n_tokens, sum(w.n_out for w, _, _ in group)):
            _launch_strip(x, group, finish)
        else:
            _launch_gemm(x, group, finish)
    if on_tensor_cores and n_tokens >= MIN_F32_TILE_TOKENS and x.f32.shape[1] % 16 == 0:
        for w, out, bias in exact:
            _gemm_f32(
                (ceil_div(n_tokens, 32), ceil_div(w.n_out, 64)), (256,), (x.f32, w.data, out, bias, *finish, w.n_out)
            )
        return
    for group in _launch_groups(exact):
        _launch_gemv(x, group, finish)


Job = tuple[Weight, Any, Any]
"""A matrix, its output and its bias."""


def _exact_and_others(jobs: list[Job]) -> tuple[list[Job], list[Job]]:
    """Float32 matrices (routers) apart: they are never rounded to halves, since the choice of experts hangs on them."""
    exact = [job for job in jobs if job[0].format.name == "f32"]
    return exact, [job for job in jobs if job[0].format.name != "f32"]


def _launch_groups(jobs: list[Job]) -> list[list[Job]]:
    """Jobs in groups that one launch can hold."""
    groups: list[list[Job]] = []
    for job in jobs:
        if groups and len(groups[-1]) < _MAX_MATRICES:
            formats = {w.format.name for w, _, _ in groups[-1]} | {job[0].format.name}
            if len(formats) <= _MAX_FORMATS:
                groups[-1].append(job)
                continue
        groups.append([job])
    return groups


def _formats(group: list[Job]) -> tuple[str, ...]:
    """The types of a launch, in the order of its FORMAT_A, _B and _C."""
    return tuple(sorted({w.format.name for w, _, _ in group}))


def _matrix_arguments(group: list[Job], rows_per_block: int) -> tuple[tuple[str, ...], list[Any], int]:
    """(formats, kernel arguments, blocks) of the matrices of one launch."""
    formats = _formats(group)
    arguments: list[Any] = []
    first = 0
    for w, out, bias in group:
        arguments += [w.data, out, bias, w.n_out, first, formats.index(w.format.name)]
        first += ceil_div(w.n_out, rows_per_block)
    for _ in range(_MAX_MATRICES - len(group)):
        arguments += [None, None, None, 0, _NO_BLOCK, 0]
    return formats, arguments, first


def _gemv_shape(formats: tuple[str, ...], n_rows: int, n_in: int, n_tokens: int) -> tuple[int, int, int]:
    """(tokens of a tile, lanes a row, rows a lane) of the integer kernel."""
    tile, rows = token_tile(n_tokens), gemv_rows(n_rows, n_tokens)
    if set(formats) & set(WIDE_DOTS):
        rows = min(rows, 2)  # registers
    if formats == ("f32",) and n_tokens <= 64:  # routers have few rows: blocks of few tokens fill more of the device
        tile = min(tile, 1 if n_tokens <= 8 else 2)
    return tile, row_lanes(n_in, formats[0]), rows


def _launch_gemv(x: Act, group: list[Job], finish: tuple[Any, ...]) -> None:
    width, n_tokens = finish[-2], finish[-1]
    n_rows = sum(w.n_out for w, _, _ in group)
    tile, lanes, rows = _gemv_shape(_formats(group), n_rows, width, n_tokens)
    formats, matrices, n_blocks = _matrix_arguments(group, _GEMV_WARPS * (32 // lanes) * rows)
    quant = (None, None, None) if x.quant is None else (x.quant.values, x.quant.scales, x.quant.sums)
    if quant[0] is None and not all(w.format.is_float for w, _, _ in group):
        raise RimuruError(f"an activation of width {width} has no 8-bit form, which {formats} matrices need")
    norm, (row_scale, scale, add) = pending_norm(x), finish[:3]
    if norm is not None and n_tokens == 1 and row_scale is None and n_blocks <= MAX_NORM_BLOCKS:
        normed = norm_gemv_kernel(formats, width, lanes, rows)
        arguments = (norm.x, norm.weight, norm.eps, x.f32, *act_arguments(x), *matrices, scale, add)
        normed((n_blocks,), (_GEMV_WARPS * 32,), arguments)
        x.quant.norm = None
        return
    settle(x)
    kernel = gemv_kernel(formats, tile, lanes, rows)
    kernel((n_blocks, ceil_div(n_tokens, tile)), (_GEMV_WARPS * 32,), (x.f32, *quant, *matrices, *finish))


def gemv_rows(n_rows: int, n_tokens: int) -> int:
    """Rows that a lane works on at once: several reuse the activations; one gives few rows more warps."""
    if n_rows > 16384 and n_tokens == 1:
        return 4
    return 2 if n_rows > 1024 or n_tokens > 64 else 1


def _launch_strip(x: Act, group: list[Job], finish: tuple[Any, ...]) -> None:
    n_tokens = finish[-1]
    tokens, warps_n, warps_k, staged = linear_strip(sum(w.n_out for w, _, _ in group), finish[-2], n_tokens)
    formats, matrices, n_blocks = _matrix_arguments(group, 16 * warps_n)
    strip_kernel(formats, tokens, warps_n, warps_k, staged)(
        (n_blocks, ceil_div(n_tokens, tokens)),
        (32 * warps_n * warps_k,),
        (x.quant.halves, x.quant.half_scales, *matrices, *finish),
        shared_bytes=strip_shared_bytes(tokens, warps_n, warps_k, staged),
    )


def _launch_gemm(x: Act, group: list[Job], finish: tuple[Any, ...]) -> None:
    n_tokens = finish[-1]
    tile_n, tile_m = gemm_tile(n_tokens, sum(w.n_out for w, _, _ in group))
    formats, matrices, n_blocks = _matrix_arguments(group, tile_n)
    gemm_kernel(formats, tile_n, tile_m)(
        (ceil_div(n_tokens, tile_m), n_blocks),
        (TILE_THREADS,),
        (x.quant.halves, x.quant.half_scales, *matrices, *finish),
        shared_bytes=tile_shared_bytes(tile_n, tile_m),
    )
