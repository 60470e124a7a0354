"""The expert store of a device: resident experts in pool pages, the others in host memory that kernels read in place.

Nothing here looks at routing: kernels find every expert through a table on the device, so a step needs no decision of
the CPU and a decode step stays one graph. Entries change between steps only:

    shrink:  pool pages -> host slot (copy), table entry -> host slot, pages back to the pool
    expand:  host slot -> pool pages (copy), table entry -> pages, slot back to the arena
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.experts.host_arena import HostArena
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.residents import ResidentSet
from rimuru.experts.source import ExpertSource
from rimuru.experts.store import StoreCounters
from rimuru.forward.context import Wave
from rimuru.memory.adjuster import StepRates
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Array, Copier, ExpertTable, Ops

N_STAGING = 16
"""Experts that are on their way from the file to the device at once."""


class DeviceExpertStore(ResidentSet):
    """Experts of a model whose pool is device memory; quotas and may_grow as ResidentSet says.

    ram_bytes: host memory that the experts outside the pool may take.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        view: ExpertView,
        source: ExpertSource,
        ops: Ops,
        copier: Copier,
        biases: list[dict[str, Array]],
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        ram_bytes: int,
        n_threads: int,
        residency: ResidencyPolicy = "auto",
        factors: list[dict[str, Array]] | None = None,
    ) -> None:
        super().__init__(layout, pool, view, quotas, may_grow, False, residency)
        self.source, self.ops, self.copier, self.n_threads = source, ops, copier, n_threads
        self.counters = StoreCounters()
        self.rates = StepRates()
        self.arena = HostArena(copier.alloc_host, ram_bytes)
        self._host: dict[tuple[int, int], np.ndarray] = {}
        self._coming: dict[tuple[int, int], tuple[np.ndarray, object]] = {}
        self._mirror = ops.upload(view.table.values)
        self._tables = []
        for slot, layer in enumerate(layout.layers):
            start = int(view.entries_before[slot])
            entries = self._mirror[start : start + layer.n_experts * layer.n_pages]
            addresses = entries.reshape(layer.n_experts, layer.n_pages)
            vectors = biases[slot], factors[slot] if factors else {}
            self._tables.append(ExpertTable(layer, layout.page_bytes, addresses, *vectors))

    def waves(self, layer_slot: int, ids: Array) -> Iterator[Wave]:
        """One wave: every expert can be read, wherever it lies."""
        yield Wave(self._tables[layer_slot], None)

    # ---- filling
    def preload(self, wanted: list[tuple[int, int]], progress: Callable[[int], None]) -> int:
        """Read every expert: in this order into the pool until pages or quotas end, the rest into host memory.

        Returns how many became resident. Reading, and copying to the device, go on side by side.
        """
        left = None if self.quotas is None else list(self.quotas)
        places = [(slot, expert, self._pages_for(slot, left)) for slot, expert in wanted]
        for slot, expert, pages in places:
            if pages is None:
                self._host[slot, expert] = self.arena.take(self._expert_bytes(slot))
        staging = _Staging(self.copier, min(N_STAGING, len(places)), self.layout.max_pages * self.layout.page_bytes)
        pending: deque[tuple[int, int, np.ndarray | None, int, Future[None]]] = deque()

        def finish_oldest() -> None:
            slot, expert, pages, number, future = pending.popleft()
            future.result()
            if pages is None:
                self._place_in_host(slot, expert)
            else:
                self._copy_in(staging.buffers[number][: self._expert_bytes(slot)], pages)
                staging.on_its_way(number)
                self.settle(slot, expert, pages)
            progress(self.layout.layers[slot].useful_bytes)

        with ThreadPoolExecutor(self.n_threads, thread_name_prefix="rimuru-read") as executor:
            for slot, expert, pages in places:
                number = -1
                # Buffers are taken here, in order: readers that waited for one could all be behind the one waited for.
                while pages is not None and (number := staging.take(wait=not pending)) < 0:
                    finish_oldest()
                target = self._host[slot, expert] if pages is None else staging.buffers[number]
                out = target[: self._expert_bytes(slot)].reshape(-1, self.layout.page_bytes)
                future = executor.submit(self.source.read_expert, slot, expert, out)
                pending.append((slot, expert, pages, number, future))
                if len(pending) > 4 * N_STAGING:
                    finish_oldest()
            while pending:
                finish_oldest()
        self.copier.wait()
        return self.residency.n_resident

    def _expert_bytes(self, slot: int) -> int:
        return self.layout.layers[slot].n_pages * self.layout.page_bytes

    def _pages_for(self, slot: int, left: list[int] | None) -> np.ndarray | None:
        """Pool pages for one more resident of a layer, where quota (`left`) or free pages allow one."""
        if left is not None and left[slot] <= 0:
            return None
        if left is None and not self.may_grow(self.layout.layers[slot].n_pages):
            return None
        pages = self.begin(slot)
        if pages is not None and left is not None:
            left[slot] -= 1
        return pages

    def _copy_in(self, data: np.ndarray, pages: np.ndarray) -> None:
        """Queue the copy of an expert's pages; runs of neighbouring pages go as one."""
        page_bytes, addresses = self.layout.page_bytes, self.pool.addresses("expert", pages)
        for first, last in _runs(addresses, page_bytes):
            self.copier.copy_in(int(addresses[first]), data[first * page_bytes : last * page_bytes])

    def _place_in_host(self, slot: int, expert: int) -> np.ndarray | None:
        """From now on the expert is read from its host slot; gives the pool pages it had."""
        base = self._host[slot, expert].ctypes.data
        offsets = np.arange(self.layout.layers[slot].n_pages, dtype=np.int64) * self.layout.page_bytes
        self.residency.resident[slot, expert] = False
        return self.view.place_elsewhere(slot, expert, base + offsets)

    # ---- moving
    def shrink(self, n_experts: int) -> list[tuple[int, int]]:
        """See ResidentSet.shrink: their bytes go to host memory first."""
        victims = self.residency.coldest(n_experts)
        page_bytes = self.layout.page_bytes
        for slot, expert in victims:
            pages = self.view.pages(slot, expert)
            assert pages is not None, "only a resident can be taken out"
            data = self._host[slot, expert] = self.arena.take(self._expert_bytes(slot))
            for first, last in _runs(addresses := self.pool.addresses("expert", pages), page_bytes):
                self.copier.copy_out(data[first * page_bytes : last * page_bytes], int(addresses[first]))
        self.copier.wait()
        for slot, expert in victims:
            self.pool.free("expert", self.take_out(slot, expert))
        return victims

    def take_out(self, slot: int, expert: int) -> np.ndarray:
        """Read the expert from its host slot from now on; returns its pages, still allocated."""
        pages = self._place_in_host(slot, expert)
        assert pages is not None, "only a resident can be taken out"
        return pages

    def loading(self) -> set[tuple[int, int]]:
        return set(self._coming)

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """Queue the copy from the host slot; the table changes when it has happened (begin_step)."""
        self._copy_in(self._host[slot, expert], pages)
        self._coming[slot, expert] = pages, self.copier.record()
        self.counters.n_read += 1
        self.counters.read_bytes += self.layout.layers[slot].useful_bytes

    def finish_reads(self) -> None:
        """See ResidentSet.finish_reads."""
        if self._coming:
            self.copier.wait()
        for place in list(self._coming):
            self._arrive(*place)

    def _arrive(self, slot: int, expert: int) -> None:
        pages, _ = self._coming.pop((slot, expert))
        self.settle(slot, expert, pages)
        self.arena.give_back(self._host.pop((slot, expert)))

    # ---- state
    def begin_step(self) -> None:
        """A new step starts: experts that have arrived become resident, and the table goes to the device."""
        self.residency.begin_step(1)
        for place in [place for place, (_, marker) in self._coming.items() if self.copier.done(marker)]:
            self._arrive(*place)
        if self.view.publish(None):
            self.ops.assign(self._mirror, self.view.table.values)

    def close(self) -> None:
        """Host memory goes back; nothing may read experts any more."""
        self.copier.close()

    def audit(self) -> None:
        """Raise unless every expert is in exactly one place."""
        self.residency.audit()
        self.view.audit()
        for slot, layer in enumerate(self.layout.layers):
            resident = self.residency.resident[slot, : layer.n_experts]
            if (self.view.is_resident(slot) != resident).any() or (self.view.layer(slot) == 0).any():
                raise AuditError(f"layer slot {slot}: table and residency disagree")
        if len(self._host) + self.residency.n_resident != self.layout.n_experts:
            raise AuditError(
                f"{len(self._host)} experts in host memory and {self.residency.n_resident} resident make "
                f"{self.layout.n_experts}"
            )


class _Staging:
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
        """The buffer's copy has been queued; it is free when that is done."""
        self._in_flight.append((self.copier.record(), number))


def _runs(addresses: np.ndarray, page_bytes: int) -> list[tuple[int, int]]:
    """(first, last + 1) of runs of pages that lie side by side."""
    breaks = np.flatnonzero(np.diff(addresses) != page_bytes) + 1
    edges = [0, *breaks.tolist(), len(addresses)]
    return list(pairwise(edges))
