"""Runs a batch through the model: decode batches by the backend's replay, everything else directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rimuru.batch import Batch
from rimuru.forward.model import Model
from rimuru.ops.base import Array, Ops, Step


class Runner:
    """`run` gives the logits that are sampled from; `run_scored` those of every token, in groups of rows."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        sampled_ids: Array,
        is_watched: Callable[[], bool] = lambda: True,
        may_replay: bool = True,
    ) -> None:
        """sampled_ids: int32 [rows], where the sampler leaves a step's tokens. is_watched(): whether the next step
        watches its experts; captured steps do or do not. may_replay: layers need nothing of the host meanwhile."""
        self.model, self.ops, self.sampled_ids = model, ops, sampled_ids
        self.is_watched, self.may_replay = is_watched, may_replay
        self.lends: Callable[[int], bool] = lambda n_tokens: False
        """lends(n_tokens): a step of so many tokens starts; whether others compute a part of it, layer by layer."""

    def run(self, batch: Batch) -> Array:
        """float32 [R, n_vocab] for Batch.logit_rows, R at most the model's max_logit_rows; None where R is 0."""
        n_rows = len(batch.logit_rows)
        replays = not self.lends(batch.n_tokens) and self.may_replay
        if replays and batch.is_decode and n_rows == batch.n_seqs:
            return self.ops.run_decode(batch, self.all_rows if self.is_watched() else self.all_rows_unwatched)[:n_rows]
        step = self.ops.stage(batch)
        self.ops.take_tokens(step.token_ids, self.sampled_ids)
        self.model.hidden(step)
        if n_rows:
            return self.model.logits(step, step.logit_rows, n_rows)
        return None

    def all_rows(self, step: Step) -> Array:
        """A whole step that wants one token of every sequence."""
        self.ops.take_tokens(step.token_ids, self.sampled_ids)
        self.model.hidden(step)
        return self.model.logits(step, step.logit_rows, step.host.n_seqs)

    def all_rows_unwatched(self, step: Step) -> Array:
        """The same in a step whose experts are all resident: a graph of its own."""
        return self.all_rows(step)

    def run_scored(self, batch: Batch) -> Iterator[np.ndarray]:
        """float32 [r, n_vocab] host arrays that together hold the logits of Batch.logit_rows, in order."""
        self.lends(0)  # scores depend on nothing but the model
        step = self.ops.stage(batch)
        self.model.hidden(step)
        n_rows, most = len(batch.logit_rows), self.model.max_logit_rows
        for start in range(0, n_rows, most):
            stop = min(start + most, n_rows)
            yield self.ops.download(self.model.logits(step, step.logit_rows[start:stop], stop - start)).copy()
