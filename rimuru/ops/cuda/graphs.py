"""Decode steps as CUDA graphs: one per bucket of batch sizes, captured once, replayed for ever.

A graph holds addresses and launch shapes, nothing else: tables, positions and lengths are read on the device, so
neither residency nor a resize of the pool invalidates it. A batch is padded to its bucket with rows that have no pages
and position -1; kernels skip them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.batch import Batch
from rimuru.ops.base import Step

logger = logging.getLogger(__name__)

Forward = Callable[[Step], Any]
_MIN_BLOCKS = 16


def bucket_of(n_seqs: int) -> int:
    """Smallest bucket that holds n_seqs: 1 to 8 one by one, then steps of an eighth to a quarter."""
    if n_seqs <= 8:
        return n_seqs
    step = max(4, 1 << (n_seqs.bit_length() - 3))
    return -(-n_seqs // step) * step


def block_bucket(n_blocks: int) -> int:
    """Columns of the page table in a captured batch: a power of two, so that contexts grow without new graphs."""
    return max(_MIN_BLOCKS, 1 << (max(1, n_blocks) - 1).bit_length())


def pad_decode(batch: Batch, n_seqs: int, n_blocks: int) -> Batch:
    """The decode batch with n_seqs sequences and n_blocks page columns; added rows have position -1 and no pages."""
    more = n_seqs - batch.n_seqs
    if not batch.is_decode or more < 0 or batch.kv_pages.shape[2] > n_blocks:
        raise ValueError(f"a batch of {batch.n_tokens} tokens, {batch.n_seqs} sequences does not fit in {n_seqs}")

    def longer(array: np.ndarray, value: int) -> np.ndarray:
        if not more:
            return array
        out = np.full((n_seqs, *array.shape[1:]), value, array.dtype)
        out[: batch.n_seqs] = array
        return out

    kv_pages = np.full((batch.kv_pages.shape[0], n_seqs, n_blocks), -1, np.int32)
    kv_pages[:, : batch.n_seqs, : batch.kv_pages.shape[2]] = batch.kv_pages
    logit_rows = np.full(n_seqs, -1, np.int32)
    logit_rows[: len(batch.logit_rows)] = batch.logit_rows
    ends = np.arange(n_seqs + 1, dtype=np.int32)
    expert_ids = batch.expert_ids
    if expert_ids is not None:  # added rows use no experts but those of the first
        expert_ids = expert_ids[np.where(ends[:-1] < batch.n_seqs, ends[:-1], 0)]
    return Batch(
        token_ids=longer(batch.token_ids, 0),
        positions=longer(batch.positions, -1),
        seq_of_token=ends[:-1],
        query_start=ends,
        context_len=longer(batch.context_len, 0),
        kv_pages=kv_pages,
        ssm_pages=longer(batch.ssm_pages, -1),
        conv_pages=longer(batch.conv_pages, -1),
        fresh_state=longer(batch.fresh_state, 1),
        logit_rows=logit_rows,
        expert_ids=expert_ids,
    )


@dataclass(slots=True)
class _Captured:
    graph: Any
    result: Any
    step: Step


class DecodeGraphs:
    """Runs decode batches through `forward`, the first time of a bucket as it is, then as a captured graph.

    `stage` brings a batch to fixed device addresses. `forward(step)` launches everything and returns its outputs,
    which are the same arrays on each replay; rows beyond the batch hold nothing of use.
    """

    def __init__(self, stage: Callable[[Batch], Step], stream: Any) -> None:
        self._stage, self._stream = stage, stream
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._warmed: set[tuple[Any, ...]] = set()

    @property
    def n_graphs(self) -> int:
        return len(self._captured)

    def run(self, batch: Batch, forward: Forward) -> Any:
        """Outputs of forward on the padded batch, queued on the stream."""
        padded = pad_decode(batch, bucket_of(batch.n_seqs), block_bucket(batch.kv_pages.shape[2]))
        step = self._stage(padded)
        replays = padded.expert_ids is not None
        key = (padded.n_seqs, padded.kv_pages.shape[2], int(step.token_ids.data.ptr), replays, forward)
        found = self._captured.get(key)
        if found is None and key not in self._warmed:
            self._warmed.add(key)  # loads kernels and makes buffers, which a capture must not do
            return forward(step)
        if found is None:
            found = self._captured[key] = self._capture(step, forward)
        found.graph.launch(self._stream)
        return found.result

    def _capture(self, step: Step, forward: Forward) -> _Captured:
        import cupy

        # A collected object may unpin or free device memory, which is forbidden while this thread captures.
        was_enabled = gc.isenabled()
        gc.disable()
        # Not `with`: where that ends, CuPy makes the null stream current, not the one that was in use before. What is
        # launched next, the choice of a token, would not wait for the graph.
        self._stream.use()
        # thread-local: copies of other threads' streams go on meanwhile
        self._stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            result = forward(step)
        finally:
            graph = self._stream.end_capture()
            if was_enabled:
                gc.enable()
        graph.upload(self._stream)
        logger.debug("captured a decode step of %d sequences", step.host.n_seqs)
        return _Captured(graph, result, step)

    def clear(self) -> None:
        """Forget all graphs; after a change of what they point at."""
        self._captured.clear()
        self._warmed.clear()
