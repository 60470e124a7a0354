"""The store of a device for models that pool and host memory together do not hold: the rest stays on disk.

A captured step reads experts where the table says, and cannot wait for a disk. Here each layer's router ids go to the
host, which brings what is missing as the CPU's store does (experts/store.py), in waves: pool pages of victims, then
loading buffers in turn. Bytes come from a copy in host memory (experts/ram_tier.py) or from the file, through staging
buffers. Nothing reads host memory in place, so it need not be pinned: this is also the path for systems that pin too
little. Steps are not captured, and every layer waits for its ids: slow, but bounded by the disk anyway.

    threads:  file -> slot or staging            the calling thread:  slot or staging -> pages, table, wave
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.base.units import human_bytes
from rimuru.experts.copies import copy_in, copy_out
from rimuru.experts.host_arena import HostArena
from rimuru.experts.ram_tier import Place, RamTier
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.source import ExpertSource
from rimuru.experts.store import HostExpertStore
from rimuru.forward.context import Wave
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Array, Copier, ExpertTable, Ops

log = logging.getLogger(__name__)

N_STAGING = 16
"""Experts on their way from the file that no copy in host memory is kept of."""


@dataclass(slots=True)
class _Transfer:
    """A read that goes on to pages: from `memory`, a slot of the RAM tier or staging buffer number `staging`."""

    place: Place
    pages: np.ndarray
    memory: np.ndarray
    staging: int
    is_new: bool
    """The read fills `memory`; else it held the expert before."""


class TieredExpertStore(HostExpertStore):
    """See HostExpertStore; ram_bytes: host memory for copies of experts."""

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        view: ExpertView,
        source: ExpertSource,
        ops: Ops,
        copier: Copier,
        biases: list[dict[str, Array]],
        n_buffers: int,
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        ram_bytes: int,
        fill_on_read: bool = True,
        n_threads: int = 2,
        residency: ResidencyPolicy = "auto",
        factors: list[dict[str, Array]] | None = None,
    ) -> None:
        super().__init__(
            layout, pool, view, source, copier, biases, n_buffers, quotas, may_grow, fill_on_read, n_threads, residency,
            factors,
        )  # fmt: skip
        self.ops, self.rates.way = ops, "staged"
        source.read_for_steps(n_threads)
        staging_bytes = layout.max_pages * layout.page_bytes
        n_staging = max(2, min(N_STAGING, ram_bytes // (2 * staging_bytes)))
        self._staging = [copier.alloc_host(staging_bytes) for _ in range(n_staging)]
        self._free_staging = list(range(n_staging))
        arena = HostArena(copier.alloc_host, max(0, ram_bytes - n_staging * staging_bytes))
        self.ram = RamTier(layout, arena, self.residency)
        self.n_from_ram = self.n_from_disk = self.disk_bytes = 0
        self.is_filled = False
        """False while steps are only gone through to learn their kernels, and while the pool is filled."""
        self._transfers: dict[Future[float], _Transfer] = {}
        self._copy_errors: dict[Future[float], Exception] = {}
        """Of reads that came to host memory but not to their pages."""
        self._buffer_ids = {id(pages) for pages in self._buffers}
        self._mirrors = [ops.upload(view.layer(slot)) for slot in range(len(layout.layers))]
        self._tables = [
            ExpertTable(layer, layout.page_bytes, mirror, biases[slot], factors[slot] if factors else {})
            for slot, (layer, mirror) in enumerate(zip(layout.layers, self._mirrors, strict=True))
        ]

    # ---- what layers ask
    def waves(self, layer_slot: int, ids: Array, positions: Array) -> Iterator[Wave]:
        if not self.is_filled:
            return iter([Wave(self._tables[layer_slot], None)])
        return super().waves(layer_slot, self.ops.download(ids), positions)

    def _waves(self, layer_slot: int, ids: Array) -> Generator[Wave, None, None]:
        inner = super()._waves(layer_slot, ids)
        try:
            for wave in inner:
                self.ops.assign(self._mirrors[layer_slot], self.view.layer(layer_slot))
                yield wave
        finally:
            inner.close()

    def _mask(self, table: ExpertTable, experts: np.ndarray) -> Array:
        return self.ops.upload(super()._mask(table, experts))

    def _end_waves(self) -> None:
        super()._end_waves()
        loading = {future for _, future in self._loading.values()}
        for future in [future for future in self._transfers if future not in loading]:
            self._abandon(future)
        self._copy_errors = {future: error for future, error in self._copy_errors.items() if future in loading}

    # ---- from the file or host memory to pages
    def _read(self, slot: int, expert: int, pages: np.ndarray) -> Future[float]:
        place, n_bytes = (slot, expert), self._expert_bytes(slot)
        memory, number = self.ram.get(place), -1
        is_new = memory is None
        if memory is None and id(pages) in self._buffer_ids:  # it will be absent again after this layer
            memory = self.ram.claim(place, [transfer.place for transfer in self._transfers.values()])
        if memory is None:
            number = self._take_staging()
            memory = self._staging[number][:n_bytes]
        if is_new:
            self.n_from_disk += 1
            self.disk_bytes += self.layout.layers[slot].useful_bytes
            future = self._executor.submit(self._read_file, slot, expert, memory)
        else:
            self.n_from_ram += 1
            future = Future()
            future.set_result(0.0)
        n_pages = self.layout.layers[slot].n_pages
        self._transfers[future] = _Transfer(place, pages[:n_pages], memory, number, is_new)
        return future

    def _expert_bytes(self, slot: int) -> int:
        return self.layout.layers[slot].n_pages * self.layout.page_bytes

    def _read_file(self, slot: int, expert: int, memory: np.ndarray) -> float:
        """Seconds that the read took."""
        started = time.perf_counter()
        self.source.read_expert(slot, expert, memory.reshape(-1, self.layout.page_bytes))
        return time.perf_counter() - started

    def _take_staging(self) -> int:
        """Number of a free staging buffer; where none is, the oldest read that has one is taken to its pages."""
        while not self._free_staging:
            oldest = next(future for future, transfer in self._transfers.items() if transfer.staging >= 0)
            self._deliver([oldest])
        return self._free_staging.pop()

    def _deliver(self, futures: list[Future[float]]) -> None:
        """Wait for reads and copy what they brought to their pages; those that failed, or whose copy did, are given
        up."""
        started, delivered = time.perf_counter(), []
        try:
            for future in futures:
                transfer = self._transfers.get(future)
                if transfer is None:
                    continue
                if future.exception() is not None:
                    self._abandon(future)
                    continue
                delivered.append(future)
                try:
                    copy_in(self.copier, self.pool, transfer.memory, transfer.pages)
                except Exception as error:
                    self._copy_errors[future] = error
        finally:  # whoever gets these pages or buffers next must not find a copy still writing
            self.copier.wait()
        for future in delivered:
            self._release(self._transfers.pop(future))
        self._clock.waited_s += time.perf_counter() - started

    def _abandon(self, future: Future[float]) -> None:
        """Nobody wants what a read brings, or it failed."""
        error, transfer = future.exception(), self._transfers.pop(future)
        if error is not None and transfer.is_new and transfer.staging < 0:
            self.ram.drop(transfer.place)
        self._release(transfer)

    def _release(self, transfer: _Transfer) -> None:
        if transfer.staging >= 0:
            self._free_staging.append(transfer.staging)

    def _errors(self, pending: list[Future[float]]) -> list[BaseException | None]:
        self._deliver(pending)
        return super()._errors(pending)

    def _error(self, future: Future[float]) -> BaseException | None:
        if future in self._transfers:
            self._deliver([future])
        return self._copy_errors.pop(future, None) or future.exception()

    # ---- residents that leave
    def take_out(self, slot: int, expert: int) -> np.ndarray:
        """See ResidentSet.take_out. Its bytes stay in host memory where they are worth it."""
        pages, place = super().take_out(slot, expert), (slot, expert)
        if self.ram.get(place) is None:
            memory = self.ram.claim(place, [transfer.place for transfer in self._transfers.values()])
            if memory is not None:
                try:
                    copy_out(self.copier, self.pool, memory, pages)
                except Exception as error:  # the file still has it
                    log.warning("expert %d of layer slot %d is not kept in RAM: %s", expert, slot, error)
                    self.ram.drop(place)
                self.copier.wait()  # its pages, and the slot, may be written to as soon as this returns
        return pages

    # ---- filling at start
    def preload(self, wanted: list[tuple[int, int]], progress: Callable[[int], None]) -> int:
        """See HostExpertStore.preload; then host memory is filled with the hottest of the others."""
        n_resident = super().preload(wanted, progress)
        reads: list[tuple[int, Future[float]]] = []
        for slot, expert in wanted:
            if self.residency.resident[slot, expert]:
                continue
            memory = self.ram.claim_free((slot, expert))
            if memory is not None:
                reads.append((slot, self._executor.submit(self._read_file, slot, expert, memory)))
        for slot, future in reads:
            future.result()
            progress(self.layout.layers[slot].useful_bytes)
        self.is_filled = True
        n_left = self.layout.n_experts - n_resident - len(self.ram)
        log.warning(
            "%d experts are in the pool, %d in %s of RAM, and %d on disk: steps wait for them; more --ram or --memory "
            "makes them faster", n_resident, len(self.ram), human_bytes(self.ram.arena.held_bytes), n_left,
        )  # fmt: skip
        return n_resident

    # ---- state
    def tiers(self) -> dict[str, int]:
        """Numbers for reports."""
        n_resident = self.residency.n_resident
        return {
            "pool_experts": n_resident,
            "ram_experts": len(self.ram),
            "ram_bytes": self.ram.arena.held_bytes,
            "read_from_ram": self.n_from_ram,
            "read_from_disk": self.n_from_disk,
            "disk_bytes": self.disk_bytes,
        }

    def close(self) -> None:
        super().close()
        self.copier.close()

    def audit(self) -> None:
        super().audit()
        self.ram.audit()
        n_lent = sum(transfer.staging >= 0 for transfer in self._transfers.values())
        if n_lent + len(self._free_staging) != len(self._staging):
            raise AuditError(f"{len(self._free_staging)} staging buffers are free and {n_lent} are in use")
