"""Batches that stand for all steps a model may be asked for: what a backend gets ready before the first request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rimuru.batch import Batch
from rimuru.memory.specs import PoolLayout

PIECE_GROWTH = 1.25
"""From one length of a prompt's piece to the next: kernels change at few places."""


def rehearsal_batches(max_tokens: int, decode_sizes: list[int], layout: PoolLayout) -> Iterator[Batch]:
    """One decode step per size, and pieces of one prompt of 2 to max_tokens tokens. Only the shapes mean something."""
    for n_seqs in decode_sizes:
        yield batch_of([1] * n_seqs, layout)
    n_tokens = 2
    while n_tokens < max_tokens:
        yield batch_of([n_tokens], layout)
        n_tokens = max(n_tokens + 1, int(n_tokens * PIECE_GROWTH))
    yield batch_of([max_tokens], layout)


def batch_of(n_tokens: list[int], layout: PoolLayout) -> Batch:
    """A batch of sequences that start here and have no pages."""
    counts = np.array(n_tokens, np.int32)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    n_seqs, total = len(counts), int(ends[-1])
    seq_of_token = np.repeat(np.arange(n_seqs, dtype=np.int32), counts)
    n_groups = 0 if layout.kv is None else len(layout.kv.groups)
    return Batch(
        token_ids=np.zeros(total, np.int32),
        positions=np.arange(total, dtype=np.int32) - ends[seq_of_token],
        seq_of_token=seq_of_token,
        query_start=ends,
        context_len=counts,
        kv_pages=np.full((n_groups, n_seqs, 1), -1, np.int32),
        ssm_pages=np.full((n_seqs, 0 if layout.ssm is None else len(layout.ssm.layers)), -1, np.int32),
        conv_pages=np.full((n_seqs, 0 if layout.conv is None else len(layout.conv.layers)), -1, np.int32),
        fresh_state=np.ones(n_seqs, np.bool_),
        logit_rows=ends[1:] - 1,
    )
