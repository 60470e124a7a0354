"""The CPU's expert store: resident experts in pool pages, the others read from the file when a layer asks for them.

A step's router names the experts; those that are missing are read into a victim's pages (fill on read: one transfer,
and the expert is resident afterwards) or, where no page may be taken, into loading buffers for this layer only. While
one group of experts computes, the next is being read. Placement never changes a result.

    waves(slot, ids):   [resident]        [filled + buffers A]    [buffers B]    [buffers A] ...
    reads:              filled, A ------> B ------------------->  A ---------->
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.experts.residency import Residency
from rimuru.experts.source import ExpertSource
from rimuru.forward.context import Wave
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Array, Copier, ExpertTable
from rimuru.ops.host import bytes_at


@dataclass(slots=True)
class StoreCounters:
    """Since the start: experts asked for (once per step, layer and expert), found resident, bytes read."""

    n_asked: int = 0
    n_hits: int = 0
    n_read: int = 0
    read_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        return self.n_hits / self.n_asked if self.n_asked else 1.0


class HostExpertStore:
    """Experts of a model whose pool is host memory.

    n_buffers: experts that loading buffers can hold at once (an even number of at least 2; taken from the pool now).
    quotas: most residents per layer slot, or None where free pages decide.
    may_grow(n_pages): whether the pool has so many expert pages to spare for one more resident.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        view: ExpertView,
        source: ExpertSource,
        copier: Copier,
        biases: list[dict[str, Array]],
        n_buffers: int,
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        fill_on_read: bool = True,
        n_threads: int = 2,
    ) -> None:
        self.layout, self.pool, self.view, self.source, self.copier = layout, pool, view, source, copier
        self.quotas, self.may_grow, self.fill_on_read = quotas, may_grow, fill_on_read
        self.residency = Residency(layout)
        self.counters = StoreCounters()
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix="rimuru-read")
        self._tables = [
            ExpertTable(layer, layout.page_bytes, view.layer(slot), biases[slot])
            for slot, layer in enumerate(layout.layers)
        ]
        self._buffers = self._take_buffers(n_buffers)

    def _take_buffers(self, n_buffers: int) -> list[np.ndarray]:
        """Page ids of each loading buffer, side by side where possible."""
        buffers = []
        for _ in range(n_buffers):
            pages = self.pool.reserve_buffer(self.layout.max_pages)
            if pages is None:
                raise NotEnoughMemoryError(
                    f"the memory budget leaves no room for {n_buffers} loading buffers of "
                    f"{self.layout.max_pages * self.layout.page_bytes} bytes; give more --memory"
                )
            buffers.append(pages)
        return buffers

    # ---- what layers ask
    def waves(self, layer_slot: int, ids: Array) -> Iterator[Wave]:
        """See forward.context.ExpertReader. Experts are grouped so that each is active in exactly one wave."""
        experts, counts = np.unique(ids, return_counts=True)
        residency, table = self.residency, self._tables[layer_slot]
        residency.touch(layer_slot, experts, counts)
        resident = residency.resident[layer_slot, experts]
        self.counters.n_asked += len(experts)
        self.counters.n_hits += int(resident.sum())
        missing = experts[~resident]
        if not len(missing):
            yield Wave(table, None)
            return
        yield from self._waves_with_reads(layer_slot, table, experts, experts[resident], missing)

    def _waves_with_reads(
        self, slot: int, table: ExpertTable, experts: np.ndarray, resident: np.ndarray, missing: np.ndarray
    ) -> Iterator[Wave]:
        fills = self._claim_pages(slot, experts, missing)
        half = len(self._buffers) // 2
        halves = (self._buffers[:half], self._buffers[half:])
        rest = missing[len(fills) :]
        groups = [rest[i : i + half] for i in range(0, len(rest), half)] or [rest]
        pending = self._read_all(slot, fills + list(zip(groups[0].tolist(), halves[0], strict=False)))
        unsettled = fills
        try:
            if len(resident):
                yield Wave(table, self._mask(table, resident))
            for number, group in enumerate(groups):
                self._wait_for(pending)
                for expert, pages in unsettled:
                    self._settle(slot, expert, pages)
                active = np.concatenate([np.array([e for e, _ in unsettled], np.int64), group])
                unsettled = []
                if number + 1 < len(groups):
                    following = zip(groups[number + 1].tolist(), halves[(number + 1) % 2], strict=False)
                    pending = self._read_all(slot, list(following))
                yield from self._with_buffers(slot, table, group, halves[number % 2], active)
        finally:  # a failed read, or a step that failed in between: nothing may write to pages that others get
            for future in pending:
                future.exception()
            for _, pages in unsettled:
                self.pool.free("expert", pages)

    def _with_buffers(
        self, slot: int, table: ExpertTable, group: np.ndarray, buffers: list[np.ndarray], active: np.ndarray
    ) -> Iterator[Wave]:
        """One wave with the experts of `group` readable in loading buffers."""
        for expert, pages in zip(group.tolist(), buffers, strict=False):
            n_pages = self.layout.layers[slot].n_pages
            self.view.place_elsewhere(slot, expert, self.pool.addresses("expert", pages[:n_pages]))
        try:
            yield Wave(table, self._mask(table, active))
        finally:
            for expert in group.tolist():
                self.view.place_elsewhere(slot, expert, 0)

    @staticmethod
    def _mask(table: ExpertTable, experts: np.ndarray) -> np.ndarray:
        active = np.zeros(table.layout.n_experts, np.bool_)
        active[experts] = True
        return active

    # ---- residents
    def _claim_pages(self, slot: int, in_use: np.ndarray, missing: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Pages for as many of the missing experts as policy allows: free ones, or those of the layer's victims."""
        fills: list[tuple[int, np.ndarray]] = []
        if not self.fill_on_read:
            return fills
        busy = np.zeros(self.residency.resident.shape[1], np.bool_)
        busy[in_use] = True
        for expert in missing.tolist():
            pages = self._grow(slot, len(fills))
            if pages is None:
                victim = self.residency.victim(slot, busy)
                if victim is None:
                    break
                pages = self._take_out(slot, victim)
            fills.append((expert, pages))
        return fills

    def _grow(self, slot: int, n_claimed: int) -> np.ndarray | None:
        """Pages for one more resident of a layer, where quota or free pages allow one."""
        n_pages = int(self.residency.n_pages[slot])
        if self.quotas is not None:
            if int(self.residency.resident[slot].sum()) + n_claimed >= self.quotas[slot]:
                return None
        elif not self.may_grow(n_pages):
            return None
        return self.pool.allocate_expert(n_pages)

    def _take_out(self, slot: int, expert: int) -> np.ndarray:
        """Make a resident absent; returns its pages, still allocated."""
        pages = self.view.place_elsewhere(slot, expert, 0)
        assert pages is not None, "only a resident can be taken out"
        self.residency.resident[slot, expert] = False
        return pages

    def shrink(self, n_experts: int) -> int:
        """Give up the coldest residents; returns how many left. Only between steps."""
        victims = self.residency.coldest(n_experts)
        for slot, expert in victims:
            self.pool.free("expert", self._take_out(slot, expert))
        return len(victims)

    def preload(self, wanted: list[tuple[int, int]], progress: Callable[[int], None]) -> int:
        """Read experts (slot, expert) into the pool in order, until pages or quotas end; returns how many."""
        n_done = 0
        window = 8
        for start in range(0, len(wanted), window):
            claimed: list[tuple[int, int, np.ndarray]] = []
            for slot, expert in wanted[start : start + window]:
                pages = None if self.residency.resident[slot, expert] else self._grow_for_preload(slot, claimed)
                if pages is not None:
                    claimed.append((slot, expert, pages))
            futures = [self._read(slot, expert, pages) for slot, expert, pages in claimed]
            for (slot, expert, pages), future in zip(claimed, futures, strict=True):
                future.result()
                self._settle(slot, expert, pages)
                progress(self.layout.layers[slot].useful_bytes)
            n_done += len(claimed)
        return n_done

    def _grow_for_preload(self, slot: int, claimed: list[tuple[int, int, np.ndarray]]) -> np.ndarray | None:
        return self._grow(slot, sum(1 for other, _, _ in claimed if other == slot))

    def _settle(self, slot: int, expert: int, pages: np.ndarray) -> None:
        self.pool.allocator.set_owners("expert", pages, self.view.row(slot, expert))
        self.view.place(slot, expert, pages)
        self.residency.resident[slot, expert] = True

    # ---- reading
    def _read(self, slot: int, expert: int, pages: np.ndarray) -> Future[None]:
        return self._executor.submit(self._read_into_pages, slot, expert, pages[: int(self.residency.n_pages[slot])])

    def _read_into_pages(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """Read one expert's pages to where they belong; through a staging copy only if the pages lie scattered."""
        page_bytes = self.layout.page_bytes
        addresses = self.pool.addresses("expert", pages)
        if len(pages) == 1 or bool((np.diff(addresses) == page_bytes).all()):
            target = bytes_at(int(addresses[0]), len(pages) * page_bytes).reshape(len(pages), page_bytes)
            self.source.read_expert(slot, expert, target)
            return
        staging = np.empty((len(pages), page_bytes), np.uint8)
        self.source.read_expert(slot, expert, staging)
        for row, address in zip(staging, addresses.tolist(), strict=True):
            self.copier.copy_in(address, row)
        self.copier.wait()

    def _read_all(self, slot: int, targets: list[tuple[int, np.ndarray]]) -> list[Future[None]]:
        self.counters.n_read += len(targets)
        self.counters.read_bytes += len(targets) * self.layout.layers[slot].useful_bytes
        return [self._read(slot, expert, pages) for expert, pages in targets]

    @staticmethod
    def _wait_for(pending: list[Future[None]]) -> None:
        """Wait for all reads; raises the first error only when none is under way any more."""
        errors = [error for future in pending if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    # ---- state
    def begin_step(self) -> None:
        """A new step starts: stamps move on."""
        self.residency.step += 1

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def audit(self) -> None:
        """Raise unless table, residency and allocator tell the same story."""
        self.residency.audit()
        self.view.audit()
        for slot, layer in enumerate(self.layout.layers):
            has_address = (self.view.layer(slot) != 0).all(axis=1)
            resident = self.residency.resident[slot, : layer.n_experts]
            if (has_address != resident).any():
                raise AuditError(
                    f"layer slot {slot}: {int(has_address.sum())} experts have addresses, "
                    f"{int(resident.sum())} are resident"
                )
        pages = int((self.residency.resident.sum(axis=1) * self.residency.n_pages).sum())
        lent = self.pool.stats()["views"]["expert"]["pages"]
        if pages != lent:
            raise AuditError(f"residents hold {pages} pages, the pool lent {lent} to experts")


def spread_experts(layout: ExpertLayout) -> list[tuple[int, int]]:
    """All (slot, expert), taking one of each layer in turn: the order to fill an empty pool in without a profile."""
    width = max(layer.n_experts for layer in layout.layers)
    return [
        (slot, expert)
        for expert in range(width)
        for slot, layer in enumerate(layout.layers)
        if expert < layer.n_experts
    ]


def even_quotas(layout: ExpertLayout, n_resident: int) -> list[int]:
    """n_resident experts spread over the layers as evenly as their numbers of experts allow."""
    quotas = [0] * len(layout.layers)
    for slot, _ in spread_experts(layout)[:n_resident]:
        quotas[slot] += 1
    return quotas
