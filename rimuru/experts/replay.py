"""Routing from a recording in place of the router's choice: for benchmarks, which say so in what they print.

Random weights do not route like trained ones. A recording of a trained model, or of the synthetic router that imitates
one, makes caches behave as they do in use. Only the choice of experts is replaced; their weights stay the router's.

A recording is one row of tokens; sequence number i reads from a start of its own on, and goes round at the end:

    ids [n_tokens, n_layers, top_k]   |--- sequence 0 ---|--- sequence 1 ---| ...      start(i) = i * stride_tokens

File: .npz with `ids` (integers), `n_experts` (one number), `source` (text).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.base.screen import brief
from rimuru.experts.routing import SyntheticRouter
from rimuru.plan import PlannedTokens

FORETOLD_SHARE = 0.79
"""Of a layer's experts, those that its router names from the input of the layer before: measured on trained models."""

ROUND_SHIFT_TOKENS = 131
"""A sequence that begins where an earlier one did, one round later, begins so many tokens further on."""


@dataclass(frozen=True, slots=True)
class Recording:
    """ids int32 [n_tokens, n_layers, top_k], experts of each token by MoE layer; `source` says where they come from."""

    ids: np.ndarray
    n_experts: int
    source: str
    stride_tokens: int

    def start(self, number: int) -> int:
        """Row at which sequence `number` begins."""
        n_tokens = len(self.ids)
        n_starts = max(1, n_tokens // self.stride_tokens)
        return (number * self.stride_tokens + number // n_starts * ROUND_SHIFT_TOKENS) % n_tokens


def with_forecasts(ids: np.ndarray, n_experts: int, share: float) -> np.ndarray:
    """int32 [n_tokens, 2 * n_layers, top_k]: ids [n_tokens, n_layers, top_k], then of every layer what the layer before
    foretells: the same, but for others drawn at random in place of 1 - share of them."""
    rng = np.random.default_rng(0)
    foretold = np.where(rng.random(ids.shape, np.float32) < share, ids, rng.integers(0, n_experts, ids.shape, np.int32))
    return np.concatenate([ids, foretold], axis=1)


class RoutingReplay:
    """Gives the engine's steps the recording's rows of their sequences. foretells: with forecasts of them, for engines
    that bring experts ahead: what their routers foretell from inputs with other experts says nothing."""

    def __init__(self, recording: Recording, foretells: bool = False) -> None:
        self.recording, self.foretells = recording, foretells
        self._ids = recording.ids
        if foretells:
            self._ids = with_forecasts(recording.ids, recording.n_experts, FORETOLD_SHARE)
        self._starts: dict[int, int] = {}
        self._rows = np.empty(0, np.int64)
        self._n_seen = 0

    def restarted(self) -> RoutingReplay:
        """The same, for sequences from the first on."""
        return RoutingReplay(self.recording, self.foretells)

    def ids_of(self, items: Sequence[PlannedTokens]) -> np.ndarray:
        """int32 [T, n_layers, top_k] of a step's tokens; with forecasts [T, 2 * n_layers, top_k]. The same token of a
        sequence gets the same experts again, also after a preemption."""
        n_rows, rows = len(self._ids), []
        for item in items:
            sequence = item.sequence
            start = self._starts.get(sequence.seq_id)
            if start is None:
                start = self._starts[sequence.seq_id] = self.recording.start(self._n_seen)
                self._n_seen += 1
            first = start + sequence.n_cached
            rows.append(np.arange(first, first + item.n_tokens))
        return np.take(self._ids, np.concatenate(rows) % n_rows, axis=0)


def record_router(router: SyntheticRouter, n_streams: int, n_tokens: int, source: str) -> Recording:
    """What a synthetic router chooses for n_streams streams of n_tokens tokens each, which run side by side: streams
    on one topic share it at every moment."""
    ids = np.empty((n_streams, n_tokens, router.n_layers, router.top_k), np.int32)
    for stream in range(n_streams):
        router.open(stream)
    if router.n_topics is None:  # nothing is shared: each stream at a time
        for stream in range(n_streams):
            ids[stream] = router.choices(stream, n_tokens)
    else:
        for token in range(n_tokens):
            router.begin_step()
            for stream in range(n_streams):
                ids[stream, token] = router.choices(stream, 1)[0]
    for stream in range(n_streams):
        router.close(stream)
    flat = ids.reshape(n_streams * n_tokens, router.n_layers, router.top_k)
    return Recording(flat, router.n_experts, source, n_tokens)


def check_recordable(path: Path) -> None:
    """Raises BadInputError where `save_recording` could not write: before a long text is run in vain."""
    was_there = path.exists()
    if was_there and not path.is_file() and not path.is_dir():
        return  # opened and closed, a pipe would be at its end for who reads it
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise _cannot_record(path, error) from None


def save_recording(path: Path, ids: np.ndarray, n_experts: int, source: str) -> None:
    """Write ids [n_tokens, n_layers, top_k] as a file for `load_recording`. Raises BadInputError where it cannot be."""
    small = ids.astype(np.uint8 if n_experts <= 256 else np.int16)
    try:
        with open(path, "wb") as file:
            np.savez_compressed(file, ids=small, n_experts=n_experts, source=source)
    except OSError as error:
        raise _cannot_record(path, error) from None


def _cannot_record(path: Path, error: OSError) -> BadInputError:
    return BadInputError(f"cannot write the recording {path}: {error.strerror or error}; choose another --record")


def check_readable(path: Path) -> None:
    """Raises BadInputError where there is no file that may be read: before its model is opened."""
    try:
        path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(
            f"cannot read {path}: {reason}; --routing takes model, synthetic, or a file of `rimuru profile --record`"
        ) from None


def load_recording(path: Path, n_layers: int, n_experts: int, top_k: int, stride_tokens: int) -> Recording:
    """Read a recording and check that it is one of a model of this shape. Raises BadInputError in one line."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            ids = _checked_ids(path, stored["ids"], n_layers, n_experts, top_k)
            source = brief(str(stored["source"]), 200)
            return Recording(ids, n_experts, f"recorded, {path.name}: {source}", min(stride_tokens, len(ids)))
    except BadInputError:
        raise
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception:  # of zipfile, zlib and the reader of headers, which each have their own for damaged bytes
        raise BadInputError(
            f"{path} is no recorded routing; write one with `rimuru profile MODEL -f TEXT --record FILE`"
        ) from None


def _checked_ids(path: Path, ids: Any, n_layers: int, n_experts: int, top_k: int) -> np.ndarray:
    if ids.ndim != 3 or ids.shape[1:] != (n_layers, top_k) or not len(ids) or ids.dtype.kind not in "iu":
        raise BadInputError(
            f"{path} holds routing of shape {ids.shape}; this model has {n_layers} layers of which each token uses "
            f"{top_k} experts"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= n_experts:
        raise BadInputError(f"{path} names experts outside the {n_experts} of this model")
    return np.ascontiguousarray(ids, np.int32)
