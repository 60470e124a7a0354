"""Copies of whole experts between host memory and pool pages; runs of neighbouring pages go as one."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise

import numpy as np

from rimuru.experts.host_arena import HostArena
from rimuru.memory.page_pool import PagePool
from rimuru.ops.base import Copier


def copy_in(copier: Copier, pool: PagePool, data: np.ndarray, pages: np.ndarray) -> None:
    """Queue copies of data uint8 [n_pages * page bytes] to expert pages int32 [n_pages]. Where one cannot be queued,
    none is under way afterwards."""
    try:
        for address, part in _parts(pool, data, pages):
            copier.copy_in(address, part)
    except BaseException:
        copier.wait()
        raise


def copy_out(copier: Copier, pool: PagePool, data: np.ndarray, pages: np.ndarray) -> None:
    """Queue copies of expert pages to data. Where one cannot be queued, none is under way afterwards."""
    try:
        for address, part in _parts(pool, data, pages):
            copier.copy_out(part, address)
    except BaseException:
        copier.wait()
        raise


def copy_home(copier: Copier, pool: PagePool, arena: HostArena, pages: np.ndarray) -> np.ndarray:
    """Queue the copy of an expert's pages to memory of the arena, and give that; it goes back where this fails."""
    data = arena.take(len(pages) * pool.layout.page_bytes("expert"))
    try:
        copy_out(copier, pool, data, pages)
    except BaseException:
        arena.give_back(data)
        raise
    return data


def _parts(pool: PagePool, data: np.ndarray, pages: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(address, window on data) of runs of pages that lie side by side."""
    page_bytes, addresses = pool.layout.page_bytes("expert"), pool.addresses("expert", pages)
    edges = [0, *(np.flatnonzero(np.diff(addresses) != page_bytes) + 1).tolist(), len(addresses)]
    return [(int(addresses[first]), data[first * page_bytes : last * page_bytes]) for first, last in pairwise(edges)]


RATE_TRIES = 3
"""How often the link is timed. The first time may be that of a link that sleeps, any may meet another's work."""


def link_rate(copier: Copier, pool: PagePool, experts: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Bytes per second of the link: these (bytes, pages int32 [n_pages]) are copied, and nothing else meanwhile; the
    best of some tries."""
    copier.wait()
    took_s = []
    for _ in range(RATE_TRIES):
        started = time.perf_counter()
        for data, pages in experts:
            copy_in(copier, pool, data, pages)
        copier.wait()
        took_s.append(time.perf_counter() - started)
    return sum(data.nbytes for data, _ in experts) / max(min(took_s), 1e-9)


class Staging:
    """Pinned buffers between the file and the device, while a model is loaded."""

    def __init__(self, copier: Copier, n_buffers: int, n_bytes: int) -> None:
        self.copier = copier
        self.buffers = [copier.alloc_host(n_bytes) for _ in range(n_buffers)]
        self._free = list(range(n_buffers))
        self._in_flight: deque[tuple[object, int]] = deque()

    def take(self, wait: bool) -> int:
        """Number of a free buffer; -1 where none is free and `wait` is not asked for."""
        while self._in_flight and ((wait and not self._free) or self.copier.done(self._in_flight[0][0])):
            marker, number = self._in_flight.popleft()
            self.copier.wait(marker)
            self._free.append(number)
        return self._free.pop() if self._free else -1

    def on_its_way(self, number: int) -> None:
        """The buffer's copy (number -1: of no buffer) has been queued; it is free when that is done."""
        if number < 0:
            return
        self._in_flight.append((self.copier.record(), number))
