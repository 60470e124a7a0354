"""A step that has been launched and whose tokens the host has not seen yet.

On a device the next step is planned and queued while this one runs: its decode tokens are taken over on the device, and
their ids reach the host one step late. Marks of a sequence (request.Sequence):

    launch:  n_cached += n, n_in_flight += n, and n_pending += 1 where a token is sampled
    land:    the cache learns the tokens that were written, n_in_flight -= n; the sampled id is appended, n_pending -= 1

A sequence may end, be cancelled or preempted between the two: what its step still writes goes to pages that nobody
reads before they are written again (one stream), and its token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rimuru.plan import PlannedTokens
from rimuru.request import Sequence


@dataclass(slots=True)
class Flight:
    """`fetch` waits for the step and gives the ids of `sampling`'s tokens, int32 [R]."""

    items: list[PlannedTokens]
    sampling: list[Sequence]
    fetch: Callable[[], np.ndarray]
    epochs: list[int]
    """Preemptions of each item's sequence when it was launched: a higher count means its pages are gone."""

    @classmethod
    def launch(cls, items: list[PlannedTokens], sampling: list[Sequence], fetch: Callable[[], np.ndarray]) -> Flight:
        """Move the marks of the sequences that run."""
        for item in items:
            item.sequence.n_cached += item.n_tokens
            item.sequence.n_in_flight += item.n_tokens
        for row, sequence in enumerate(sampling):
            sequence.n_pending += 1
            sequence.pending_row = row
        return cls(items, sampling, fetch, [item.sequence.n_preemptions for item in items])

    @property
    def must_land(self) -> bool:
        """True where the next step cannot be planned without this one's tokens: they count for the next choice, or
        states have to be saved before anything changes them."""
        return any(s.needs_host for s in self.sampling) or any(
            item.sequence.n_cached in item.sequence.snapshot_at for item in self.items
        )

    def still_runs(self) -> list[PlannedTokens]:
        """The items whose sequences have kept their pages since the launch."""
        return [
            item
            for item, epoch in zip(self.items, self.epochs, strict=True)
            if item.sequence.state == "running" and item.sequence.n_preemptions == epoch
        ]
