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
        way_of: Callable[[int, bool], str] = lambda n_tokens, is_timed: "",
        may_replay: bool = True,
    ) -> None:
        """sampled_ids: int32 [rows], where the sampler leaves a step's tokens. way_of(n_tokens, is_timed): a step of so
        many tokens starts; in which way it uses its experts (ways.StepWays.begin). Captured steps are of one way each,
        and none of "cpu". may_replay: layers need nothing of the host meanwhile."""
        self.model, self.ops, self.sampled_ids = model, ops, sampled_ids
        self.way_of, self.may_replay = way_of, may_replay
        self._replayed: dict[str, Callable[[Step], Array]] = {}

    def run(self, batch: Batch) -> Array:
        """float32 [R, n_vocab] for Batch.logit_rows, R at most the model's max_logit_rows; None where R is 0."""
        n_rows, way = len(batch.logit_rows), self.way_of(batch.n_tokens, True)
        if self.may_replay and way != "cpu" and batch.is_decode and n_rows == batch.n_seqs:
            # A backend knows steps that launch alike by what is called.
            forward = self._replayed.setdefault(way, lambda step: self.all_rows(step))
            return self.ops.run_decode(batch, forward)[:n_rows]
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

    def run_scored(self, batch: Batch) -> Iterator[np.ndarray]:
        """float32 [r, n_vocab] host arrays that together hold the logits of Batch.logit_rows, in order."""
        self.way_of(batch.n_tokens, False)  # scores depend on nothing but the model
        step = self.ops.stage(batch)
        self.model.hidden(step)
        n_rows, most = len(batch.logit_rows), self.model.max_logit_rows
        for start in range(0, n_rows, most):
            stop = min(start + most, n_rows)
            yield self.ops.download(self.model.logits(step, step.logit_rows[start:stop], stop - start)).copy()
