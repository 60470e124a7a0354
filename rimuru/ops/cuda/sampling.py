"""Launcher of the sampler (cuda_src/sampling). Parameters travel in one pinned block; nothing waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from rimuru.base.units import align_up, ceil_div
from rimuru.ops.base import Array, SampleParams
from rimuru.ops.cuda.device import StagedBytes
from rimuru.ops.cuda.launch import Kernel

_ARGMAX_THREADS, _DRAW_THREADS = 256, 1024
_DRAW_SHARED_BYTES = 2048 * 4 * 8 + 4096 * 8
"""Histogram and candidates of the draw kernel."""

_MAX_PARTS = 64

_penalise = Kernel(
    "sampling/argmax.cu",
    "penalise",
    "logits: f32*, list_start: *, ids: *, values: *, penalties: *, n_rows: i32, n_vocab: i32",
)
_argmax = Kernel("sampling/argmax.cu", "argmax", "logits: f32*, best: u64*, arrivals: *, out_ids: i32*, n_vocab: i32")
_draw = Kernel(
    "sampling/draw.cu",
    "draw",
    "logits: f32*, best: u64*, parameters: *, top_k: *, out_ids: i32*, parts: i32, n_vocab: i32",
)
KERNELS = (_penalise, _argmax, _draw)


def has_penalties(params: SampleParams) -> bool:
    """True where any row's logits change before the filters."""
    neutral = (
        (params.repetition_penalty == 1.0).all()
        and (params.presence_penalty == 0.0).all()
        and (params.frequency_penalty == 0.0).all()
    )
    return not neutral or any(len(ids) for ids in params.bias_ids)


def pack_penalties(params: SampleParams) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """list_start int32 [3, R + 1], ids int32 [n], values float32 [n], penalties float32 [R, 3] of argmax.cu."""
    rows = range(len(params.temperature))
    none = np.zeros(0, np.int32)
    history = [params.history[r] if params.repetition_penalty[r] != 1.0 else none for r in rows]
    output = [
        params.output_ids[r] if params.frequency_penalty[r] != 0.0 or params.presence_penalty[r] != 0.0 else none
        for r in rows
    ]
    values = [*params.bias_values]
    values += [np.zeros(len(ids), np.float32) for ids in history]
    values += [params.output_counts[r] if len(output[r]) else none for r in rows]
    lists = [*params.bias_ids, *history, *output]
    ends = np.cumsum([len(ids) for ids in lists]).astype(np.int32)
    starts = np.concatenate([[0], ends])
    n = len(rows)
    list_start = np.stack([starts[i * n : (i + 1) * n + 1] for i in range(3)]).astype(np.int32)
    penalties = np.stack([params.repetition_penalty, params.frequency_penalty, params.presence_penalty], axis=1)
    flat_ids = np.concatenate([none, *lists]).astype(np.int32)
    flat_values = np.concatenate([np.zeros(0, np.float32), *values]).astype(np.float32)
    return list_start, flat_ids, flat_values, penalties.astype(np.float32)


class Sampler:
    """The verb `sample`. Its buffers grow with the number of rows; reserve them before serving."""

    def __init__(self) -> None:
        self._best: Any = None
        self._arrivals: Any = None
        self._staged = StagedBytes()

    def reserve(self, n_rows: int, n_list_entries: int = 0) -> None:
        """Buffers for n_rows rows with n_list_entries penalised or biased ids in all."""
        import cupy

        if self._best is None or self._best.size < n_rows * _MAX_PARTS:
            self._best = cupy.empty(n_rows * _MAX_PARTS, cupy.uint64)
            self._arrivals = cupy.zeros(n_rows, cupy.uint32)
        self._staged.reserve(64 * n_rows + 8 * n_list_entries + 256)

    def greedy(self, logits: Array, out_ids: Array) -> int:
        """Argmax of every row; no host data, so it may be captured. Returns the parts of a row."""
        n_rows, n_vocab = logits.shape
        parts = min(_MAX_PARTS, ceil_div(n_vocab, 8 * _ARGMAX_THREADS))
        self.reserve(n_rows)
        _argmax((parts, n_rows), (_ARGMAX_THREADS,), (logits, self._best, self._arrivals, out_ids, n_vocab))
        return parts

    def __call__(self, logits: Array, params: SampleParams, out_ids: Array) -> None:
        n_rows, n_vocab = logits.shape
        blocks = [
            np.stack([params.temperature, params.top_p, params.min_p, params.uniform], axis=1).astype(np.float32),
            params.top_k.astype(np.int32),
        ]
        penalised = has_penalties(params)
        if penalised:
            blocks += pack_penalties(params)
        draws = bool((params.temperature != 0.0).any())
        if draws or penalised:
            n_bytes = sum(align_up(block.nbytes, 16) for block in blocks)
            self._staged.reserve(n_bytes)
            parameters, top_k, *lists = self._staged.send(blocks)
            if penalised:
                start, ids, values, penalties = lists
                _penalise((n_rows,), (256,), (logits, start, ids, values, penalties, n_rows, n_vocab))
        parts = self.greedy(logits, out_ids)
        if draws:
            _draw(
                (n_rows,),
                (_DRAW_THREADS,),
                (logits, self._best, parameters, top_k, out_ids, parts, n_vocab),
                shared_bytes=_DRAW_SHARED_BYTES,
            )
