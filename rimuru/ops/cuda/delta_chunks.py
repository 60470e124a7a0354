"""Launcher of cuda_src/recurrent/delta_chunks.cu: DeltaNet over long pieces, 64 tokens at a time on tensor cores."""

from __future__ import annotations

from functools import cache
from typing import Any

from rimuru.arch.spec import DeltaNetSpec
from rimuru.base.units import ceil_div
from rimuru.ops.base import Array, Step
from rimuru.ops.cuda.launch import Kernel

CHUNK_TOKENS = 64
MIN_TOKENS = 128
"""Pieces of fewer tokens go token by token: there, all sequences of a step run beside each other in one launch."""

WINDOW_CHUNKS = 8
"""Chunks prepared together: more fill a large card, and take scratch. 0 (tests, to compare): none."""

_THREADS = 256
_SLICE = 32
"""Value columns of a block of delta_chunk_states."""


@cache
def chunk_kernels(head_dim: int, head_order: str) -> tuple[Kernel, Kernel, Kernel]:
    """delta_chunk_pairs, delta_chunk_maps and delta_chunk_states."""
    path, defines = "recurrent/delta_chunks.cu", {"DIM": head_dim, "TILED": int(head_order == "tiled")}
    inputs, window = "qkv: f32*, beta: f32*, gates: f32*", "start: i32, n_tokens: i32"
    heads = "n_key_heads: i32, n_value_heads: i32"
    pairs = f"{inputs}, inverse: *, pairs: *, {window}, {heads}"
    maps = f"{inputs}, inverse: *, pairs: *, rows: *, sums: *, {window}, {heads}"
    states = (
        "rows: *, sums: *, out: f32*, pool: *, pages: i32*, fresh: bool*, page_bytes: i64, columns: i32, column: i32,"
        f"seq: i32, {window}, continues: i32, n_value_heads: i32"
    )
    return (
        Kernel(path, "delta_chunk_pairs", pairs, defines),
        Kernel(path, "delta_chunk_maps", maps, defines),
        Kernel(path, "delta_chunk_states", states, defines),
    )


def has_chunk_kernels(spec: DeltaNetSpec) -> bool:
    return spec.head_dim in (64, 128)


def _parts(spec: DeltaNetSpec, n_chunks: int) -> list[int]:
    """float32 values of inverse, pairs, rows and sums for a window."""
    square, tall = CHUNK_TOKENS * CHUNK_TOKENS, (CHUNK_TOKENS + spec.head_dim) * spec.head_dim
    return [spec.n_value_heads * n_chunks * n for n in (square, square, tall, tall)]


def _shared_bytes(head_dim: int) -> int:
    """Of both kernels that work on one chunk: two operands of a row a token, a square, four values a token."""
    return 4 * CHUNK_TOKENS * (2 * (head_dim + 8) + CHUNK_TOKENS + 4 + 4)


class DeltaChunks:
    """Which sequences of a step go by chunks, and their launches; owns the scratch of one window, which layers share.

    deterministic: none, since a result would depend on how a prompt was cut.
    """

    def __init__(self, deterministic: bool) -> None:
        self.window_chunks = 0 if deterministic else WINDOW_CHUNKS
        self._scratch: Any = None

    def reserve(self, spec: DeltaNetSpec, max_tokens: int) -> int:
        """Make the scratch for layers of this shape and pieces of up to max_tokens tokens; its new bytes."""
        import cupy

        n_chunks = min(self.window_chunks, ceil_div(max_tokens, CHUNK_TOKENS))
        if max_tokens < MIN_TOKENS or not n_chunks or not has_chunk_kernels(spec):
            return 0
        n_floats, before = sum(_parts(spec, n_chunks)), 0 if self._scratch is None else self._scratch.size
        if n_floats > before:
            self._scratch = cupy.empty(n_floats, cupy.float32)
        return 4 * max(0, n_floats - before)

    def sequences(self, step: Step, spec: DeltaNetSpec) -> list[int]:
        """Those of the step that are long enough."""
        if not self.window_chunks or not has_chunk_kernels(spec):
            return []
        start = step.host.query_start.tolist()
        return [seq for seq in range(step.host.n_seqs) if start[seq + 1] - start[seq] >= MIN_TOKENS]

    def run(
        self,
        seqs: list[int],
        inputs: tuple[Array, Array, Array],
        spec: DeltaNetSpec,
        step: Step,
        state: tuple[Any, ...],
        out: Array,
    ) -> None:
        """inputs: qkv, beta and the gates' logarithms, prepared.
        state: pool, pages, fresh, page_bytes, columns, column."""
        pairs, maps, states = chunk_kernels(spec.head_dim, spec.head_order)
        heads, shared = (spec.n_key_heads, spec.n_value_heads), _shared_bytes(spec.head_dim)
        starts = step.host.query_start.tolist()
        self.reserve(spec, max(starts[seq + 1] - starts[seq] for seq in seqs))
        window = self.window_chunks * CHUNK_TOKENS
        for seq in seqs:
            for start in range(starts[seq], starts[seq + 1], window):
                n_tokens = min(window, starts[seq + 1] - start)
                n_chunks = ceil_div(n_tokens, CHUNK_TOKENS)
                inverse, squares, rows, sums = self._pointers(_parts(spec, n_chunks))
                grid, at = (n_chunks, spec.n_value_heads), (start, n_tokens)
                pairs(grid, (_THREADS,), (*inputs, inverse, squares, *at, *heads), shared)
                maps((*grid, 2), (_THREADS,), (*inputs, inverse, squares, rows, sums, *at, *heads), shared)
                states(
                    (spec.head_dim // _SLICE, spec.n_value_heads),
                    (2 * (CHUNK_TOKENS + spec.head_dim),),
                    (rows, sums, out, *state, seq, *at, int(start > starts[seq]), spec.n_value_heads),
                    2 * spec.head_dim * _SLICE * 8,
                )

    def _pointers(self, parts: list[int]) -> list[int]:
        addresses, at = [], int(self._scratch.data.ptr)
        for n_floats in parts:
            addresses.append(at)
            at += 4 * n_floats
        return addresses
