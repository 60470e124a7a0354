"""Batch: the arrays of one step, in host memory. The only input of a forward pass besides the weights.

A step runs any mix of prompt pieces and single tokens. Sequence s owns the token rows
query_start[s] .. query_start[s+1]; its tokens have consecutive positions and end at context_len[s] - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Batch:
    """Shapes: T tokens, S sequences, G KV groups, B the most blocks of any sequence in the step."""

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    seq_of_token: np.ndarray  # int32 [T]
    query_start: np.ndarray  # int32 [S + 1]
    context_len: np.ndarray  # int32 [S]: tokens in the cache once this step's are written
    kv_pages: np.ndarray  # int32 [G, S, B]: KV page ids, -1 = none (not needed, or given back)
    ssm_pages: np.ndarray  # int32 [S, n recurrent layers]: SSM page ids
    conv_pages: np.ndarray  # int32 [S, n convolution layers]: first of the consecutive conv page ids
    fresh_state: np.ndarray  # bool [S]: the sequence starts here, so states are read as zero
    logit_rows: np.ndarray  # int32 [R]: token rows whose logits are wanted
    expert_ids: np.ndarray | None = None
    """int32 [T, n MoE layers, k]: recorded routing instead of the router's choice; or [T, 2 * n MoE layers, k], then of
    every layer what the one before foretells."""

    @property
    def n_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def n_seqs(self) -> int:
        return int(self.context_len.shape[0])

    @property
    def is_decode(self) -> bool:
        """True where every sequence brings exactly one token."""
        return self.n_tokens == self.n_seqs
