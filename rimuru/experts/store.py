"""The CPU's expert store: resident experts in pool pages, the others read from the file when a layer asks for them.

A step's router names the experts; those that are missing are read into a victim's pages (fill on read: one transfer,
and the expert is resident afterwards) or, where no page may be taken, into loading buffers for this layer only. While
one group of experts computes, the next is being read. Placement never changes a result.

    waves(slot, ids):   [resident]        [filled + buffers A]    [buffers B]    [buffers A] ...
    reads:              filled, A ------> B ------------------->  A ---------->

An expert that cannot be read concerns the tokens that chose it. It counts as zeros in this step, which keeps numbers
finite; its tokens' rows are noted, and the engine ends their requests (`take_unread`). No row depends on one of another
request, so the others get what they would have got.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import NotEnoughMemoryError, RimuruError, StoreReadError
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.residents import ResidentSet, Unread
from rimuru.experts.source import ExpertSource
from rimuru.forward.context import Wave
from rimuru.memory.adjuster import StepRates
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Array, Copier, ExpertTable
from rimuru.ops.host import bytes_at

log = logging.getLogger(__name__)

MOST_COUNTED_TOKENS = 96
"""A long prompt piece counts as a step of so many tokens where residency asks how many run together."""


@dataclass(slots=True)
class StoreCounters:
    """Since the start: experts asked for (once per step, layer and expert), found resident, bytes read."""

    n_asked: int = 0
    n_hits: int = 0
    n_read: int = 0
    read_bytes: int = 0
    n_filled: int = 0
    """Of those read on a device: brought into the pool on the way."""

    @property
    def hit_rate(self) -> float:
        return self.n_hits / self.n_asked if self.n_asked else 1.0


@dataclass(slots=True)
class _StepClock:
    """What one step took: seconds, tokens, and bytes read because it asked for them."""

    began: float = 0.0
    last: float = 0.0
    waited_s: float = 0.0
    read_s: float = 0.0
    """All reads together, which run side by side."""
    link_bytes: int = 0
    n_tokens: int = 0


class HostExpertStore(ResidentSet):
    """Experts of a model whose pool is host memory; quotas and may_grow as ResidentSet says.

    n_buffers: experts that loading buffers can hold at once (an even number of at least 2; taken from the pool now).
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
        residency: ResidencyPolicy = "auto",
        factors: list[dict[str, Array]] | None = None,
    ) -> None:
        super().__init__(layout, pool, view, quotas, may_grow, fill_on_read, residency)
        self.source, self.copier, self.n_threads = source, copier, n_threads
        self.counters = StoreCounters()
        self.rates = StepRates(way="fill" if fill_on_read else "buffers")
        self._loading: dict[tuple[int, int], tuple[np.ndarray, Future[float]]] = {}
        self._unreadable: set[tuple[int, int]] = set()
        self._unread: list[Unread] = []
        self._clock = _StepClock()
        self._open_waves: Generator[Wave, None, None] | None = None
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix="rimuru-read")
        self._tables = [
            ExpertTable(layer, layout.page_bytes, view.layer(slot), biases[slot], factors[slot] if factors else {})
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
    def waves(self, layer_slot: int, ids: Array, positions: Array) -> Iterator[Wave]:
        """See forward.context.ExpertReader. Experts are grouped so that each is active in exactly one wave."""
        self._end_waves()
        self._open_waves = self._waves(layer_slot, ids)
        return self._open_waves

    def settled(self, layer_slot: int) -> ExpertTable | None:
        """See forward.context.ExpertReader. Waves are known when the experts are."""
        return None

    def _end_waves(self) -> None:
        """The last layer's waves are over, also where the step failed between two of them and its traceback keeps the
        generator alive: buffers and pages that were being filled are given back now."""
        if self._open_waves is not None:
            self._open_waves.close()
            self._open_waves = None

    def _waves(self, layer_slot: int, ids: Array) -> Generator[Wave, None, None]:
        residency, table = self.residency, self._tables[layer_slot]
        experts = residency.note(layer_slot, ids)
        self._settle_arrived(layer_slot, experts)
        self._clock.n_tokens = max(self._clock.n_tokens, len(ids))
        resident = residency.resident[layer_slot, experts]
        self.counters.n_asked += len(experts)
        self.counters.n_hits += int(resident.sum())
        missing = experts[~resident]
        if not len(missing):
            yield Wave(table, None)
        else:
            yield from self._waves_with_reads(layer_slot, table, ids, experts, experts[resident], missing)
        self._clock.last = time.perf_counter()

    def _waves_with_reads(
        self,
        slot: int,
        table: ExpertTable,
        ids: Array,
        experts: np.ndarray,
        resident: np.ndarray,
        missing: np.ndarray,
    ) -> Iterator[Wave]:
        fills = self.claim_pages(slot, experts, missing)
        half = len(self._buffers) // 2
        halves = (self._buffers[:half], self._buffers[half:])
        rest = missing[~np.isin(missing, [expert for expert, _ in fills])]
        groups = [rest[i : i + half] for i in range(0, len(rest), half)] or [rest]
        targets = fills + list(zip(groups[0].tolist(), halves[0], strict=False))
        pending = self._read_all(slot, targets)
        unsettled, n_fills = fills, len(fills)
        try:
            if len(resident):
                yield Wave(table, self._mask(table, resident))
            for number in range(len(groups)):
                lost = self._lost(slot, ids, targets, pending)
                active = np.array([expert for expert, _ in targets], np.int64)
                for expert, pages in targets[:n_fills]:
                    if expert not in lost:
                        self.settle_fill(slot, expert, pages)
                        self._unreadable.discard((slot, expert))
                unsettled = [fill for fill in unsettled if not self.residency.resident[slot, fill[0]]]
                passing = [target for target in targets[:n_fills] if target[0] in lost] + targets[n_fills:]
                if number + 1 < len(groups):
                    targets = list(zip(groups[number + 1].tolist(), halves[(number + 1) % 2], strict=False))
                    pending = self._read_all(slot, targets)
                n_fills = 0
                yield from self._with_buffers(slot, table, passing, active)
        finally:  # a step that failed in between: nothing may write to pages that others get
            for future in pending:
                future.exception()
            for _, pages in unsettled:
                self.give_up(pages)

    def _lost(
        self, slot: int, ids: Array, targets: list[tuple[int, np.ndarray]], pending: list[Future[float]]
    ) -> set[int]:
        """Wait for reads; the experts that did not come. They are zeros in their pages from now on, and the rows of
        ids [T, k] that name them are noted."""
        lost = set()
        for (expert, pages), error in zip(targets, self._errors(pending), strict=True):
            if error is None:
                continue
            layer = self.layout.layers[slot]
            if not isinstance(error, RimuruError):
                error = StoreReadError(f"expert {expert} of block {layer.layer} could not be read: {error}")
            log.error("%s; it counts as zeros for the rest of this step", error)
            self._blank(pages[: layer.n_pages])
            self._unread.append(Unread(np.flatnonzero((ids == expert).any(axis=1)), error))
            self._unreadable.add((slot, expert))
            lost.add(expert)
        return lost

    def _blank(self, pages: np.ndarray) -> None:
        """Fill expert pages with zeros, which every format of weights reads as zeros."""
        for address in self.pool.addresses("expert", pages).tolist():
            self.copier.fill(address, self.layout.page_bytes, 0)
        self.copier.wait()

    def take_unread(self) -> list[Unread]:
        """See ResidentSet.take_unread."""
        unread, self._unread = self._unread, []
        return unread

    def _with_buffers(
        self, slot: int, table: ExpertTable, passing: list[tuple[int, np.ndarray]], active: np.ndarray
    ) -> Iterator[Wave]:
        """One wave with the experts of `passing` readable in pages that are not theirs."""
        for expert, pages in passing:
            n_pages = self.layout.layers[slot].n_pages
            self.view.place_elsewhere(slot, expert, self.pool.addresses("expert", pages[:n_pages]))
        try:
            yield Wave(table, self._mask(table, active))
        finally:
            for expert, _ in passing:
                self.view.place_elsewhere(slot, expert, 0)

    def _mask(self, table: ExpertTable, experts: np.ndarray) -> Array:
        active = np.zeros(table.layout.n_experts, np.bool_)
        active[experts] = True
        return active

    # ---- filling the pool at start
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
            self._wait_for(futures)
            for slot, expert, pages in claimed:
                self.settle(slot, expert, pages)
                progress(self.layout.layers[slot].useful_bytes)
            n_done += len(claimed)
        return n_done

    def _grow_for_preload(self, slot: int, claimed: list[tuple[int, int, np.ndarray]]) -> np.ndarray | None:
        return self._grow(slot, sum(1 for other, _, _ in claimed if other == slot))

    # ---- reading
    def _read(self, slot: int, expert: int, pages: np.ndarray) -> Future[float]:
        return self._executor.submit(self._timed_read, slot, expert, pages[: int(self.residency.n_pages[slot])])

    def _timed_read(self, slot: int, expert: int, pages: np.ndarray) -> float:
        """Seconds that the read took."""
        started = time.perf_counter()
        self._read_into_pages(slot, expert, pages)
        return time.perf_counter() - started

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

    def _read_all(self, slot: int, targets: list[tuple[int, np.ndarray]]) -> list[Future[float]]:
        self.counters.n_read += len(targets)
        n_bytes = len(targets) * self.layout.layers[slot].useful_bytes
        self.counters.read_bytes += n_bytes
        self._clock.link_bytes += n_bytes
        return [self._read(slot, expert, pages) for expert, pages in targets]

    def _wait_for(self, pending: list[Future[float]]) -> None:
        """Wait for all reads; raises the first error only when none is under way any more."""
        for error in self._errors(pending):
            if error is not None:
                raise error

    def _errors(self, pending: list[Future[float]]) -> list[BaseException | None]:
        """Wait for all reads; what went wrong with each."""
        started = time.perf_counter()
        errors = [self._error(future) for future in pending]
        self._clock.waited_s += time.perf_counter() - started
        came = [future for future, error in zip(pending, errors, strict=True) if error is None]
        self._clock.read_s += sum(future.result() for future in came)
        return errors

    def _error(self, future: Future[float]) -> BaseException | None:
        """Wait for a read: None where its expert is in its pages now."""
        return future.exception()

    # ---- reading beside the steps
    def loading(self) -> set[tuple[int, int]]:
        """Experts on their way after `expand`, and those whose last attempt failed: only a step asks for them again."""
        return set(self._loading) | self._unreadable

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """See ResidentSet.start_read."""
        self.counters.n_read += 1
        self.counters.read_bytes += self.layout.layers[slot].useful_bytes
        self._loading[slot, expert] = pages, self._read(slot, expert, pages)

    def finish_reads(self) -> None:
        """See ResidentSet.finish_reads."""
        for place in list(self._loading):
            self._arrive(*place)

    def _settle_arrived(self, slot: int, experts: np.ndarray) -> None:
        """Experts of a layer that a step asks for while they are on their way are waited for: one read is enough."""
        for place in [place for place in self._loading if place[0] == slot and place[1] in experts]:
            self._arrive(*place)

    def _arrive(self, slot: int, expert: int) -> None:
        """Wait for a read of `expand`. One that fails concerns no request: its pages go back."""
        pages, future = self._loading.pop((slot, expert))
        error = self._error(future)
        if error is None:
            self.settle(slot, expert, pages)
            return
        self.give_up(pages)
        self._unreadable.add((slot, expert))
        log.warning("expert %d of block %d stays out of memory: %s", expert, self.layout.layers[slot].layer, error)

    # ---- state
    def begin_step(self) -> None:
        """A new step starts: what the last one cost is noted, and experts that have arrived become readable."""
        self._end_waves()
        self._unread = []
        clock = self._clock
        if clock.last > clock.began:
            busy_s = clock.read_s / self.n_threads
            self.rates.observe(clock.n_tokens, clock.last - clock.began, clock.waited_s, clock.link_bytes, busy_s)
        self.residency.begin_step(max(1, min(clock.n_tokens, MOST_COUNTED_TOKENS)), clock.n_tokens)
        for place in [place for place, (_, future) in self._loading.items() if future.done()]:
            self._arrive(*place)
        self._clock = _StepClock(began=time.perf_counter())

    def close(self) -> None:
        self._end_waves()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def audit(self) -> None:
        """See ResidentSet.audit. Ends what a failed step left open."""
        self._end_waves()
        super().audit()


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


def pages_of(layout: ExpertLayout, n_by_slot: list[int] | None) -> int:
    """Pages of so many experts of each layer slot; 0 for None."""
    if n_by_slot is None:
        return 0
    return sum(n * layer.n_pages for n, layer in zip(n_by_slot, layout.layers, strict=True))
