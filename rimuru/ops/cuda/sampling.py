"""Launcher of the sampler (cuda_src/sampling). Parameters travel in one pinned block; nothing waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from rimuru.base.units import align_up, ceil_div
from rimuru.ops.base import Array, SampleParams
from rimuru.ops.cuda.device import StagedBytes
from rimuru.ops.cuda.launch import Kernel

_ARGMAX_THREADS, _SURVEY_THREADS, _DRAW_THREADS = 256, 256, 1024
_CANDIDATES, _NEAR_BINS = 16384, 128
_DRAW_SHARED_BYTES = 2048 * 8 + _CANDIDATES * 4
"""Histogram and candidates of the draw kernel."""

_MAX_PARTS = 64

_penalise = Kernel(
    "sampling/argmax.cu",
    "penalise",
    "logits: f32*, list_start: *, ids: *, values: *, penalties: *, n_rows: i32, n_vocab: i32",
)
_argmax = Kernel("sampling/argmax.cu", "argmax", "logits: f32*, best: u64*, arrivals: *, out_ids: i32*, n_vocab: i32")
_survey = Kernel(
    "sampling/survey.cu",
    "survey",
    "logits: f32*, best: u64*, parameters: *, top_k: *, sums: u64*, bins: u64*, counts: i32*, surveyed: u64*,"
    "arrivals: *, out_ids: i32*, n_vocab: i32",
)
_collect = Kernel(
    "sampling/survey.cu",
    "collect",
    "logits: f32*, best: u64*, parameters: *, top_k: *, counts: i32*, surveyed: u64*, values: f32*, ids: i32*,"
    "n_vocab: i32",
)
_draw = Kernel(
    "sampling/draw.cu",
    "draw",
    "logits: f32*, best: u64*, parameters: *, top_k: *, surveyed: u64*, values: f32*, value_ids: i32*, out_ids: i32*,"
    "parts: i32, n_vocab: i32",
)
KERNELS = (_penalise, _argmax, _survey, _collect, _draw)


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
        self._n_rows = 0
        self._best: Any = None
        self._sums: Any = None
        self._bins: Any = None
        self._counts: Any = None
        self._surveyed: Any = None
        self._arrivals: Any = None
        self._values: Any = None
        self._ids: Any = None
        self._staged = StagedBytes()

    @property
    def n_bytes(self) -> int:
        """Device bytes of the buffers."""
        row_bytes = _MAX_PARTS * (16 + 4 * _NEAR_BINS) + 8 * (_NEAR_BINS + 1) + 16 + 4 + 8 * _CANDIDATES
        return self._n_rows * row_bytes + self._staged.n_bytes

    def reserve(self, n_rows: int, n_list_entries: int = 0) -> None:
        """Buffers for n_rows rows with n_list_entries penalised or biased ids in all."""
        import cupy

        if self._n_rows < n_rows:
            self._n_rows = n_rows
            self._best = cupy.empty(n_rows * _MAX_PARTS, cupy.uint64)
            self._sums = cupy.empty(n_rows * _MAX_PARTS, cupy.uint64)
            self._bins = cupy.zeros(n_rows * (_NEAR_BINS + 1), cupy.uint64)
            self._counts = cupy.empty(n_rows * _MAX_PARTS * _NEAR_BINS, cupy.int32)
            self._surveyed = cupy.empty(n_rows * 2, cupy.uint64)
            self._arrivals = cupy.zeros(n_rows, cupy.uint32)
            self._values = cupy.empty(n_rows * _CANDIDATES, cupy.float32)
            self._ids = cupy.empty(n_rows * _CANDIDATES, cupy.int32)
        self._staged.reserve(64 * n_rows + 8 * n_list_entries + 256)

    def __call__(self, logits: Array, params: SampleParams, out_ids: Array) -> None:
        n_rows, n_vocab = logits.shape
        self.reserve(n_rows)
        penalised = has_penalties(params)
        hot = params.temperature != 0.0
        parameters = top_k = 0
        if penalised or hot.any():
            numbers = np.empty((n_rows, 4), np.float32)
            for i, column in enumerate((params.temperature, params.top_p, params.min_p, params.uniform)):
                numbers[:, i] = column
            blocks = [numbers, params.top_k.astype(np.int32, copy=False)]
            blocks += pack_penalties(params) if penalised else ()
            self._staged.reserve(sum(align_up(block.nbytes, 16) for block in blocks))
            parameters, top_k, *lists = self._staged.send(blocks)
            if penalised:
                start, ids, values, penalties = lists
                _penalise((n_rows,), (256,), (logits, start, ids, values, penalties, n_rows, n_vocab))
        parts = min(_MAX_PARTS, ceil_div(n_vocab, 8 * _ARGMAX_THREADS))
        grid, best, arrivals = (parts, n_rows), self._best, self._arrivals
        _argmax(grid, (_ARGMAX_THREADS,), (logits, best, arrivals, out_ids, n_vocab))
        if not hot.any():
            return
        read = (logits, best, parameters, top_k)
        survey = (self._sums, self._bins, self._counts, self._surveyed, arrivals, out_ids, n_vocab)
        _survey(grid, (_SURVEY_THREADS,), (*read, *survey))
        if (hot & ((params.top_k > 0) | (params.top_p < 1.0) | (params.min_p > 0.0))).any():
            candidates = (self._values, self._ids)
            _collect(grid, (_SURVEY_THREADS,), (*read, self._counts, self._surveyed, *candidates, n_vocab))
            arguments = (*read, self._surveyed, *candidates, out_ids, parts, n_vocab)
            _draw((n_rows,), (_DRAW_THREADS,), arguments, shared_bytes=_DRAW_SHARED_BYTES)
