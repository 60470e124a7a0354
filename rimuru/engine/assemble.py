"""StepPlan -> Batch: the arrays of a step, filled from the sequences and their page tables."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rimuru.batch import Batch
from rimuru.memory.specs import PoolLayout
from rimuru.plan import PlannedTokens


class PageRows(Protocol):
    """Fills the rows of a batch with the pages of its sequences (memory/cache.py)."""

    def max_blocks(self, seq_ids: list[int]) -> int: ...

    def fill_batch(
        self, seq_ids: list[int], kv_pages: np.ndarray, ssm_pages: np.ndarray, conv_pages: np.ndarray, fresh: np.ndarray
    ) -> None: ...


def assemble(items: list[PlannedTokens], pages: PageRows, layout: PoolLayout, all_logits: bool = False) -> Batch:
    """The batch of the planned tokens. Logits are wanted of the last token of every item that samples
    (`all_logits`: of every token)."""
    counts = np.array([item.n_tokens for item in items], np.int32)
    starts = np.array([item.sequence.n_cached for item in items], np.int32)
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    n_tokens, n_seqs = int(query_start[-1]), len(items)
    token_ids = np.empty(n_tokens, np.int32)
    for item, first, last in zip(items, query_start[:-1], query_start[1:], strict=True):
        sequence, begin = item.sequence, item.sequence.n_cached
        known = sequence.tokens[begin : begin + item.n_tokens]
        token_ids[first : first + len(known)] = known
        token_ids[first + len(known) : last] = -1 - sequence.pending_row  # the device puts the sampled id there
    seq_of_token = np.repeat(np.arange(n_seqs, dtype=np.int32), counts)
    positions = (np.arange(n_tokens, dtype=np.int32) - query_start[seq_of_token]) + starts[seq_of_token]
    seq_ids = [item.sequence.seq_id for item in items]
    n_groups = 0 if layout.kv is None else len(layout.kv.groups)
    kv_pages = np.full((n_groups, n_seqs, max(1, pages.max_blocks(seq_ids))), -1, np.int32)
    ssm_pages = np.full((n_seqs, 0 if layout.ssm is None else len(layout.ssm.layers)), -1, np.int32)
    conv_pages = np.full((n_seqs, 0 if layout.conv is None else len(layout.conv.layers)), -1, np.int32)
    fresh = np.zeros(n_seqs, np.bool_)
    pages.fill_batch(seq_ids, kv_pages, ssm_pages, conv_pages, fresh)
    fresh &= starts == 0  # a step in flight may have begun states that the cache has not been told of
    if all_logits:
        logit_rows = np.arange(n_tokens, dtype=np.int32)
    else:
        samples = np.array([item.samples for item in items], np.bool_)
        logit_rows = (query_start[1:] - 1)[samples].astype(np.int32)
    return Batch(
        token_ids=token_ids,
        positions=positions.astype(np.int32),
        seq_of_token=seq_of_token,
        query_start=query_start,
        context_len=(starts + counts).astype(np.int32),
        kv_pages=kv_pages,
        ssm_pages=ssm_pages,
        conv_pages=conv_pages,
        fresh_state=fresh,
        logit_rows=logit_rows,
    )
