"""The waiting sequences, in fair order between clients.

Start-time fair queueing: every sequence costs its client tokens (prompt, and the answer that is to be expected). It
gets a start tag, the larger of the virtual time and the end of what its client has asked for before; the smallest tag
goes first. The virtual time follows the tags that are served, and moves on by the cost of what has ended, shared by the
clients that want something: nobody is overtaken by newcomers for ever. So a client that asks for much waits behind its
own requests, and one that asks for little goes ahead of a flood. Higher priorities go before lower ones, whoever sent
them.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rimuru.request import Sequence

MOST_CLIENTS = 1024
"""Clients that are remembered while they have nothing waiting."""


@dataclass(slots=True)
class _Client:
    end: float = 0.0
    """Virtual end of what it has asked for."""
    last_tag: float = 0.0


@dataclass(slots=True)
class _Place:
    key: tuple[int, float, int]
    """(-priority, start tag, number of arrival)"""
    cost: float


class WaitingQueue:
    """Sequences that wait to run, the next one first. Who gave way comes back to the place it had."""

    def __init__(self) -> None:
        self._order: list[tuple[tuple[int, float, int], Sequence]] = []
        self._places: dict[int, _Place] = {}
        self._clients: dict[str, _Client] = {}
        self._n_waiting: Counter[str] = Counter()
        self._now = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._order)

    def __getitem__(self, index: int) -> Sequence:
        return self._order[index][1]

    def __contains__(self, sequence: object) -> bool:
        return any(sequence is waiting for waiting in self)

    def n_waiting_of(self, client: str) -> int:
        """Waiting sequences of one client."""
        return self._n_waiting[client]

    def n_clients_with(self, client: str) -> int:
        """Clients that have something waiting, the given one counted in any case."""
        return len(self._n_waiting) + (client not in self._n_waiting)

    def add(self, sequence: Sequence, cost: float) -> None:
        """Queue a new sequence that is expected to cost so many tokens."""
        client = self._clients.setdefault(sequence.client, _Client())
        tag = max(self._now, client.end, client.last_tag)
        client.last_tag, client.end = tag, tag + cost
        place = _Place((-sequence.priority, tag, next(self._numbers)), cost)
        self._places[sequence.seq_id] = place
        self._insert(sequence, place)
        if len(self._clients) > MOST_CLIENTS:
            self._clients = {n: c for n, c in self._clients.items() if c.end > self._now or n in self._n_waiting}

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that gave way waits again, at the place that it had."""
        self._insert(sequence, self._places[sequence.seq_id])

    def _insert(self, sequence: Sequence, place: _Place) -> None:
        bisect.insort(self._order, (place.key, sequence), key=lambda entry: entry[0])
        self._n_waiting[sequence.client] += 1

    def pop(self) -> Sequence:
        """Take the first one out: it runs."""
        (_, tag, _), sequence = self._order.pop(0)
        self._now = max(self._now, tag)
        self._leave(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it stands, if it is here."""
        for i, (_, waiting) in enumerate(self._order):
            if waiting is sequence:
                del self._order[i]
                self._leave(sequence)
                return

    def _leave(self, sequence: Sequence) -> None:
        self._n_waiting[sequence.client] -= 1
        if not self._n_waiting[sequence.client]:
            del self._n_waiting[sequence.client]

    def settle(self, sequence: Sequence, cost: float) -> None:
        """A sequence has ended, here or running: its client pays what it did cost, not what was expected."""
        self._now += cost / self.n_clients_with(sequence.client)
        place, client = self._places.pop(sequence.seq_id, None), self._clients.get(sequence.client)
        if place is not None and client is not None:
            client.end += cost - place.cost
