"""Per-request sampling parameters -> the arrays of one sampling call, and log-probabilities where asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.ops.base import Array, Ops, SampleParams
from rimuru.request import Sequence, TokenLogprob

_EMPTY_IDS = np.empty(0, np.int32)
_EMPTY_VALUES = np.empty(0, np.float32)

NO_TOKEN = -1
"""Stands for the first token of a request whose logits are no numbers."""


def sample_params(sequences: list[Sequence]) -> SampleParams:
    """One row per sequence. Each draw comes from the sequence's own generator: one number per token, so that the
    batch a request runs in cannot change its answer."""
    params = [s.params for s in sequences]

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(p, name) for p in params], dtype)

    seen = [
        (
            np.fromiter(s.seen.keys(), np.int32, len(s.seen)),
            np.fromiter((i for i, n in s.seen.items() if n), np.int32),
            np.fromiter((n for n in s.seen.values() if n), np.int32),
        )
        if s.params.has_penalties
        else (_EMPTY_IDS, _EMPTY_IDS, _EMPTY_IDS)
        for s in sequences
    ]
    biases = [dict(p.logit_bias or {}) for p in params]
    return SampleParams(
        temperature=column("temperature", np.float32),
        top_k=np.minimum(column("top_k", np.int64), np.iinfo(np.int32).max).astype(np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        uniform=np.array([s.rng.random(dtype=np.float32) for s in sequences], np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        history=[row[0] for row in seen],
        output_ids=[row[1] for row in seen],
        output_counts=[row[2] for row in seen],
        bias_ids=[np.fromiter(b.keys(), np.int32, len(b)) if b else _EMPTY_IDS for b in biases],
        bias_values=[np.fromiter(b.values(), np.float32, len(b)) if b else _EMPTY_VALUES for b in biases],
    )


class Sampler:
    """Chooses one token per row of logits; keeps the output buffer."""

    def __init__(self, ops: Ops, max_rows: int) -> None:
        self.ops = ops
        self.ids = ops.empty((max_rows,), np.int32)
        """The last step's ids, at a fixed address: the next step takes its tokens from there."""

    def sample(self, logits: Array, sequences: list[Sequence]) -> np.ndarray:
        """int32 [R] token ids for logits [R, n_vocab], waited for."""
        return self.start(logits, sequences)()

    def start(self, logits: Array, sequences: list[Sequence]) -> Callable[[], np.ndarray]:
        """Queue the choice of one token per row; the result waits for the ids int32 [R].

        Log-probabilities are appended to the sequences that want them, and waited for here. They are taken first,
        because constraints and penalties may change the logits in place. A request's first token is NO_TOKEN where its
        logits are no finite numbers: one of them shows it, since the head mixes all of the hidden state into each.
        """
        if not sequences:
            return lambda: _EMPTY_IDS
        firsts = [row for row, s in enumerate(sequences) if s.n_output + s.n_pending == 0]
        probes = [(row, self.ops.fetch(logits[row : row + 1, :1])) for row in firsts]
        wanting = [(row, s) for row, s in enumerate(sequences) if s.params.want_logprobs or s.params.logprobs]
        rows = {row: self.ops.download(logits[row : row + 1])[0].copy() for row, _ in wanting}
        self._constrain(logits, sequences)
        self.ops.sample(logits, sample_params(sequences), self.ids[: len(sequences)])
        fetch = self.ops.fetch(self.ids[: len(sequences)])

        def probed() -> np.ndarray:
            ids = fetch()
            for row, probe in probes:
                if not np.isfinite(probe()).all():
                    ids[row] = NO_TOKEN
            return ids

        if wanting:
            ids = probed()
            for row, sequence in wanting:
                sequence.logprobs.append(token_logprob(rows[row], int(ids[row]), sequence.params.logprobs))
            return lambda: ids
        return probed

    def _constrain(self, logits: Array, sequences: list[Sequence]) -> None:
        """-inf for the tokens that a sequence's constraint forbids."""
        for row, sequence in enumerate(sequences):
            allowed = None if sequence.constraint is None else sequence.constraint.allowed()
            if allowed is not None:
                kept = np.where(allowed, self.ops.download(logits[row : row + 1]), np.float32(-np.inf))
                logits[row : row + 1] = self.ops.upload(kept)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities of float32 logits [..., n_vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_logprob(logits: np.ndarray, token_id: int, n_top: int) -> TokenLogprob:
    """Log-probability of one token and of the n_top best, best first (lowest id on ties)."""
    values = log_softmax(logits)
    n_top = min(n_top, values.shape[0])
    best = np.lexsort((np.arange(values.shape[0]), -values))[:n_top] if n_top else np.empty(0, np.int64)
    return TokenLogprob(token_id, float(values[token_id]), [(int(i), float(values[i])) for i in best])
