"""The expert store of a device: resident experts in pool pages, the others in host memory that kernels read in place.

Kernels find every expert through a table on the device, so a step needs no decision of the CPU and a decode step stays
one graph. Who is resident is decided in one of two ways:

    by the device  all experts have a copy in host memory, their home. After each router, missed experts are brought
                   into places that nobody uses in this step (ops/places.py). The host adds places and takes them away,
                   which costs no copy (a holder is read at home again), and hears of the rest a few steps later.
    by the host    where host memory does not hold all experts, fill on read is off, or everything is always resident.
                   Entries change between steps only:
                       shrink:  pool pages -> host slot (copy), table entry -> host slot, pages back to the pool
                       expand:  host slot -> pool pages (copy), table entry -> pages, slot back to the arena

Either way the device counts what its tokens choose, and what of it was resident.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.base.units import human_bytes
from rimuru.experts.copies import Staging, copy_home, copy_in, link_rate
from rimuru.experts.device_places import DevicePlaces, Heard, home_bytes, rule_of
from rimuru.experts.host_arena import HostArena
from rimuru.experts.places_jit import add_up, take_over
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.residents import ResidentSet
from rimuru.experts.source import ExpertSource
from rimuru.experts.store import MOST_COUNTED_TOKENS, StoreCounters
from rimuru.experts.ways import StepWays, is_beside, ways_of
from rimuru.forward.context import Wave
from rimuru.memory.adjuster import StepClock, StepRates
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Array, Copier, ExpertTable, Ops

log = logging.getLogger(__name__)

N_STAGING = 16
"""Experts that are on their way from the file to the device at once."""
N_TIMED = 32
"""Experts that are copied to time the link."""
REPORT_STEPS = 8
"""How often the host asks the device what was chosen and who is resident."""


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
        fill_on_read: bool = True,
        n_buffers: int = 0,
        foresees: bool = False,
        in_place: bool = True,
    ) -> None:
        super().__init__(layout, pool, view, quotas, may_grow, False, residency)
        self.source, self.ops, self.copier, self.n_threads = source, ops, copier, n_threads
        self.counters = StoreCounters()
        self.rates = StepRates()
        self.arena = HostArena(copier.alloc_host, ram_bytes, copier.is_pinned)
        self._host: dict[tuple[int, int], np.ndarray] = {}
        self._coming: dict[tuple[int, int], tuple[np.ndarray, object]] = {}
        self.by_device = fill_on_read and self._keeps_all_at_home(ram_bytes)
        """Who decides which experts are resident."""
        self.expands_freely = self.by_device
        self.places = DevicePlaces(layout, view, pool, ops, copier, self._take_buffers(n_buffers), self.fills)
        self.ways = ways_of(self.by_device, in_place and self.places.n_buffers > 0, foresees)
        """How missed experts may come (ways.py), the plainest way first."""
        self.way = self.rates.way = self.ways[0]
        """Of the running step; "resident" where nothing is missed."""
        self.chooser = StepWays(self)
        self._holders = np.full(layout.n_experts, -1, np.int32)
        """By the device: of each place (a layer's places begin at the row of its first expert) an expert of the layer,
        as last heard. Places that nobody holds yet have one in name, so that residents and places are as many."""
        self._useful_bytes = np.array([layer.useful_bytes for layer in layout.layers], np.int64)
        self._cells = np.flatnonzero(self.residency.exists.reshape(-1))
        """Where the experts of all layers lie in the arrays of residency."""
        self.is_watching, self._is_foretold = True, False
        """Whether the running step counts, and brings in what it misses: not while every expert is resident."""
        self.helpers: list[Any] = []
        """What reads experts at home, and ends before they go."""
        self._n_empty = self._n_steps = self._n_noted = 0
        self._ruled_for: tuple[float, bool] | None = None
        """Tokens together for which the device was told who comes and goes; whether loading buffers may be used."""
        self._clock, self._step_tokens = StepClock(), 1
        self.tables = [
            ExpertTable(layer, layout.page_bytes, places.addresses, biases[slot], factors[slot] if factors else {})
            for slot, (layer, places) in enumerate(zip(layout.layers, self.places.layers, strict=True))
        ]

    def _keeps_all_at_home(self, ram_bytes: int) -> bool:
        """Whether host memory takes a copy of every expert, and that is good for something."""
        if self.quotas is not None and sum(self.quotas) == self.layout.n_experts:
            return False
        if home_bytes(self.layout) <= ram_bytes:
            return True
        log.info(
            "%s of RAM do not hold a copy of all experts (%s): missed ones are read in place and not brought in",
            human_bytes(ram_bytes), human_bytes(self.layout.n_pages * self.layout.page_bytes),
        )  # fmt: skip
        return False

    def _take_buffers(self, n_buffers: int) -> np.ndarray:
        """Pool pages int32 [n, most pages of an expert] for experts that find no place: up to n_buffers."""
        buffers = []
        for _ in range(n_buffers if self.by_device else 0):
            pages = self.pool.reserve_buffer(self.layout.max_pages)
            if pages is None:
                break
            buffers.append(pages)
        return np.array(buffers, np.int32).reshape(-1, self.layout.max_pages)

    def use_way(self, way: str) -> None:
        """The next step's missed experts come in this way: one of `ways`, or "resident"."""
        self.way = way
        if way != "resident":
            self.rates.way = way
            self._set_control()

    def waves(self, layer_slot: int, ids: Array, positions: Array) -> Iterator[Wave]:
        """One wave: every expert can be read, wherever it lies. Or two: those that are there, while the others come."""
        table, places = self.tables[layer_slot], self.places.layers[layer_slot]
        self._join_foretold()
        if self.is_watching and is_beside(self.way, len(ids)):
            self.ops.fetch_aside(ids, positions, places)
            yield Wave(table, places.now)
            self.ops.join_fetch()
            yield Wave(table, places.later)
            return
        if self.is_watching:
            self.ops.fetch_experts(ids, positions, places)
        yield Wave(table, None)

    def settled(self, layer_slot: int) -> ExpertTable | None:
        """See forward.context.ExpertReader: while no expert is brought in."""
        return None if self.is_watching or self._is_foretold else self.tables[layer_slot]

    def _join_foretold(self) -> None:
        if self._is_foretold:
            self.ops.join_fetch()
            self._is_foretold = False

    @property
    def foresees(self) -> bool:
        """See forward.context.ExpertReader."""
        return self.way == "ahead" and self.is_watching

    def foresee(self, layer_slot: int, ids: Array, positions: Array) -> None:
        """See forward.context.ExpertReader."""
        self.ops.fetch_ahead(ids, positions, self.places.layers[layer_slot])
        self._is_foretold = True

    # ---- filling
    def preload(self, wanted: list[tuple[int, int]], progress: Callable[[int], None]) -> int:
        """Read every expert: in this order into the pool until pages or quotas end, the rest into host memory.

        Returns how many became resident. Reading, and copying to the device, go on side by side.
        """
        left = None if self.quotas is None else list(self.quotas)
        places = [(slot, expert, self._pages_for(slot, left)) for slot, expert in wanted]
        for slot, expert, pages in places:
            if pages is None or self.by_device:
                self._host[slot, expert] = self.arena.take(self._expert_bytes(slot))
        n_staging = 0 if self.by_device else min(N_STAGING, len(places))
        staging = Staging(self.copier, n_staging, self.layout.max_pages * self.layout.page_bytes)
        pending: deque[tuple[int, int, np.ndarray | None, int, Future[None]]] = deque()

        def finish_oldest() -> None:
            slot, expert, pages, number, future = pending.popleft()
            future.result()
            if pages is None:
                self._place_in_host(slot, expert)
            else:
                home = self._host.get((slot, expert))
                data = staging.buffers[number][: self._expert_bytes(slot)] if home is None else home
                copy_in(self.copier, self.pool, data, pages)
                staging.on_its_way(number)
                self.settle(slot, expert, pages)
            progress(self.layout.layers[slot].useful_bytes)

        with ThreadPoolExecutor(self.n_threads, thread_name_prefix="rimuru-read") as executor:
            for slot, expert, pages in places:
                number, target = -1, self._host.get((slot, expert))
                # Buffers are taken here, in order: readers that waited for one could all be behind the one waited for.
                while target is None and (number := staging.take(wait=not pending)) < 0:
                    finish_oldest()
                if target is None:
                    target = staging.buffers[number]
                out = target[: self._expert_bytes(slot)].reshape(-1, self.layout.page_bytes)
                future = executor.submit(self.source.read_expert, slot, expert, out)
                pending.append((slot, expert, pages, number, future))
                if len(pending) > 4 * N_STAGING:
                    finish_oldest()
            while pending:
                finish_oldest()
        self.copier.wait()
        self._start_places()
        return self.residency.n_resident

    def _start_places(self) -> None:
        """The device learns where everything lies, and what a profile says of its use."""
        homes = np.zeros(self.layout.n_experts, np.int64)
        if self.by_device:
            for (slot, expert), home in self._host.items():
                homes[self.view.row(slot, expert)] = home.ctypes.data
        self.places.start(homes, self.residency.weights().reshape(-1)[self._cells])
        self.view.publish(None)
        self._holders[:] = self.places.holders_at_start()
        self._set_control()
        self._time_link()

    def _set_control(self) -> None:
        """Who comes and goes, and where to. It depends on nothing else that changes."""
        rule = self.residency.n_together, self.way != "in place"
        if rule != self._ruled_for:
            self.places.set_control(*rule_of(self.residency), self.by_device, rule[1])
            self._ruled_for = rule

    def _time_link(self) -> None:
        """The link's rate: some residents are copied once more to where they lie. What a step waits for cannot hide."""
        self.rates.exposed_share = 1.0
        residents = [place for place in self._host if self.residency.resident[place]][:N_TIMED]
        pairs = [(self._host[place], ids) for place in residents if (ids := self.view.pages(*place)) is not None]
        if pairs:
            self.rates.link_bytes_per_s = link_rate(self.copier, self.pool, pairs)

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

    def _place_in_host(self, slot: int, expert: int) -> np.ndarray | None:
        """From now on the expert is read from its host slot; gives the pool pages it had."""
        base = self._host[slot, expert].ctypes.data
        offsets = np.arange(self.layout.layers[slot].n_pages, dtype=np.int64) * self.layout.page_bytes
        self.residency.resident[slot, expert] = False
        return self.view.place_elsewhere(slot, expert, base + offsets)

    # ---- moving
    def shrink(self, n_experts: int) -> list[tuple[int, int]]:
        """See ResidentSet.shrink. By the device: whoever holds the places by then is read at home. By the host: their
        bytes go to host memory first."""
        victims = self.residency.coldest(n_experts)
        if self.by_device:
            freed = [self.take_out(slot, expert) for slot, expert in victims]
            self.places.send()
            if freed:
                self.pool.free("expert", np.concatenate(freed))
            return victims
        for number, (slot, expert) in enumerate(victims):
            pages = self.view.pages(slot, expert)
            assert pages is not None, "only a resident can be taken out"
            try:
                self._host[slot, expert] = copy_home(self.copier, self.pool, self.arena, pages)
            except Exception as error:  # no memory, or a copy that could not be queued
                log.warning("%d of %d experts stay in the pool: %s", len(victims) - number, len(victims), error)
                victims = victims[:number]
                break
        self.copier.wait()
        for slot, expert in victims:
            self.pool.free("expert", self.take_out(slot, expert))
        return victims

    def take_out(self, slot: int, expert: int) -> np.ndarray:
        """Read the expert from its host slot from now on; returns its pages, still allocated."""
        if self.by_device:
            held = self._layer_holders(slot)
            place = int(np.flatnonzero(held == expert)[0])
            held[place] = -1
            self.residency.resident[slot, expert] = False
            return self.places.remove(slot, place)
        pages = self._place_in_host(slot, expert)
        assert pages is not None, "only a resident can be taken out"
        return pages

    def _layer_holders(self, slot: int) -> np.ndarray:
        return self._holders[int(self.view.rows_before[slot]) : int(self.view.rows_before[slot + 1])]

    def loading(self) -> set[tuple[int, int]]:
        return set(self._coming)

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """By the device: one more place, for whoever is missed next. By the host: queue the copy from the host slot;
        the table changes when it has happened (begin_step)."""
        if self.by_device:
            self._n_loading_pages -= len(pages)
            self.pool.allocator.set_owners("expert", pages, self.view.row(slot, expert))
            self._layer_holders(slot)[self.places.add(slot, pages)] = expert
            self._n_empty += 1
            self.residency.resident[slot, expert] = True
            return
        copy_in(self.copier, self.pool, self._host[slot, expert], pages)
        self._coming[slot, expert] = pages, self.copier.record()
        self.counters.n_read += 1
        self.counters.read_bytes += self.layout.layers[slot].useful_bytes

    def finish_reads(self) -> None:
        """See ResidentSet.finish_reads. What the device brings in comes before the copies that are queued from now."""
        if self._coming:
            self.copier.wait()
        for place in list(self._coming):
            self._arrive(*place)

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        if self.by_device:
            self.places.flip(sources, targets)
        else:
            super().flip(sources, targets)

    def _arrive(self, slot: int, expert: int) -> None:
        self.settle(slot, expert, self._coming.pop((slot, expert))[0])
        self.arena.give_back(self._host.pop((slot, expert)))

    # ---- state
    def begin_step(self) -> None:
        """A new step starts: what was heard is noted, and what changed goes to the device."""
        self._join_foretold()  # of a step that failed
        self._clock.tick()
        heard = self.places.hear()
        if heard is not None:
            self._note(heard)
        self.residency.begin_step(self._step_tokens, self._n_noted)
        self._n_noted = 0
        if self._coming:
            for place in [place for place, (_, marker) in self._coming.items() if self.copier.done(marker)]:
                self._arrive(*place)
        if not self.by_device and self.view.publish(None):
            self.places.set_residents(self.view.table.values, self.residency.resident.reshape(-1)[self._cells])
        self._set_control()
        self.places.send()
        is_whole = not self._n_empty and not self._coming and self.residency.n_resident == len(self._cells)
        self.is_watching = not is_whole
        self._n_steps += 1
        if self._n_steps % REPORT_STEPS == 0 and self.places.ask():
            self._clock.ask()
        if self.is_watching:
            self.places.last_step = self.residency.step

    def catch_up(self) -> None:
        """Wait for the steps so far, and note everything they chose. Nothing runs now."""
        self._clock.stop()
        self._clock.ask()
        try:
            heard = self.places.hear_now()
        except Exception as error:  # the next report tells as much
            log.warning("what the last steps chose is not known yet: %s", error)
            return
        self._note(heard)

    def _note(self, heard: Heard) -> None:
        """Counters, warmth, and who is resident, from a report."""
        counters = self.counters
        sums = add_up(heard.new_totals, self._useful_bytes).tolist()
        n_steps, n_tokens, n_asked, n_hits, n_read, n_filled, read_bytes = sums
        counters.n_asked += n_asked
        counters.n_hits += n_hits
        counters.n_read += n_read
        counters.n_filled += n_filled
        counters.read_bytes += read_bytes
        self._n_noted += n_tokens
        if n_steps:
            n_tokens //= n_steps
            self._step_tokens = min(max(1, n_tokens), MOST_COUNTED_TOKENS)
            self._observe(n_tokens, read_bytes // n_steps, n_steps)
        self.residency.note_cells(self._cells, heard.new_counts)
        if self.by_device:
            rows, resident = self.view.rows_before, self.residency.resident
            self._n_empty = take_over(self._holders, heard.holders, heard.is_known, rows, resident)

    def _observe(self, n_tokens: int, link_bytes: int, n_steps: int) -> None:
        """What the steps since the last report took, on average: they wait for all that comes over the link."""
        step_s = self._clock.mean_s()
        if step_s > 0.0:
            self.rates.bound_rate(step_s, link_bytes)
            link_s = link_bytes / self.rates.link_bytes_per_s
            self.rates.observe(max(1, n_tokens), step_s, min(link_s, step_s), link_bytes, link_s, n_steps)

    def close(self) -> None:
        """Host memory goes back; nothing may read experts any more."""
        for helper in self.helpers:
            helper.close()
        self.copier.close()

    def audit(self) -> None:
        """Raise unless every expert is in exactly one place, and the device sees it there."""
        if self.by_device:
            self._audit_places()
        self.residency.audit()
        self.view.audit()
        for slot, layer in enumerate(self.layout.layers):
            resident = self.residency.resident[slot, : layer.n_experts]
            if not self.by_device and (self.view.is_resident(slot) != resident).any():
                raise AuditError(f"layer slot {slot}: table and residency disagree")
            if (self.view.layer(slot) == 0).any():
                raise AuditError(f"layer slot {slot}: an expert can be read nowhere")
        n_elsewhere = 0 if self.by_device else self.residency.n_resident
        if len(self._host) + n_elsewhere != self.layout.n_experts:
            raise AuditError(
                f"{len(self._host)} experts in host memory and {n_elsewhere} only in the pool make "
                f"{self.layout.n_experts}"
            )

    def _audit_places(self) -> None:
        """Make the view exact, and compare it with the device's table and the pool."""
        heard = self.places.hear_now()
        self._note(heard)
        self.places.update_view(heard.holders)
        if (self.places.table() != self.view.table.values).any():
            raise AuditError("the device reads an expert elsewhere than the host thinks")
        n_pages = int((self.residency.resident.sum(axis=1) * self.residency.n_pages).sum())
        lent = self.pool.stats()["views"]["expert"]["pages"]
        if n_pages + self._n_loading_pages != lent or int((self._holders >= 0).sum()) != self.residency.n_resident:
            raise AuditError(
                f"{int((self._holders >= 0).sum())} places, {self.residency.n_resident} residents with {n_pages} "
                f"pages, {self._n_loading_pages} being filled: the pool lent {lent} to experts"
            )
