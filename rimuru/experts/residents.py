"""The residents: which pages hold which expert. Everything about tiers but reading and computing.

    absent --begin--> loading (pages taken, not readable yet) --settle--> resident --take_out--> absent

Pages of a loading expert are pinned: no plan moves what a read is writing to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.experts.residency import Residency, ResidencyPolicy
from rimuru.memory.allocator import PINNED_OWNER
from rimuru.memory.decisions import FillLog
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unread:
    """An expert that a step wanted and did not get: the step's token rows that chose it, int64 [n], and why."""

    rows: np.ndarray
    error: BaseException


class ResidentSet:
    """Residents of one model in one pool.

    quotas: most residents per layer slot, or None where free pages decide.
    may_grow(n_pages): whether the pool has so many expert pages to spare for one more resident.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        view: ExpertView,
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        fill_on_read: bool = True,
        residency: ResidencyPolicy = "auto",
    ) -> None:
        self.layout, self.pool, self.view = layout, pool, view
        self.quotas, self.may_grow, self.fill_on_read = quotas, may_grow, fill_on_read
        self.residency = Residency(layout, residency)
        self.fills = FillLog(layout)
        self.expands_freely = False
        """Whether `expand` moves nothing: its pages are for experts that steps read anyway."""
        self._n_loading_pages = 0
        self._left_for: dict[int, int] = {}
        """Of the fills that were claimed last: experts and the victims whose pages they got."""

    # ---- pages for experts that a step reads
    def claim_pages(self, slot: int, in_use: np.ndarray, missing: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(expert, pages) for as many of the missing experts as policy allows: free pages, or those of the layer's
        victims, never of an expert in_use (ids of the layer's experts that the running step uses)."""
        fills: list[tuple[int, np.ndarray]] = []
        self._left_for.clear()
        if not self.fill_on_read:
            return fills
        for expert in missing.tolist():
            pages = self._grow(slot, len(fills))
            if pages is None:
                break
            fills.append((expert, pages))
        if len(fills) < len(missing):
            busy = np.zeros(self.residency.resident.shape[1], np.bool_)
            busy[in_use] = True
            for expert, victim in self.residency.exchanges(slot, busy, missing[len(fills) :]):
                pages = self.take_out(slot, victim)
                self._pin(pages)
                self._left_for[expert] = victim
                fills.append((expert, pages))
        return fills

    def _grow(self, slot: int, n_claimed: int) -> np.ndarray | None:
        """Pages for one more resident of a layer, where quota or free pages allow one."""
        if self.quotas is not None:
            if int(self.residency.resident[slot].sum()) + n_claimed >= self.quotas[slot]:
                return None
        elif not self.may_grow(int(self.residency.n_pages[slot])):
            return None
        return self.begin(slot)

    def begin(self, slot: int) -> np.ndarray | None:
        """Pages for an expert of the layer slot that is about to be read, or None."""
        n_pages = int(self.residency.n_pages[slot])
        pages = self.pool.allocate_expert(n_pages, PINNED_OWNER)
        self._n_loading_pages += n_pages if pages is not None else 0
        return pages

    def _pin(self, pages: np.ndarray) -> None:
        self.pool.allocator.set_owners("expert", pages, PINNED_OWNER)
        self._n_loading_pages += len(pages)

    def settle(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """The expert's bytes are in these pages: it is resident from now on."""
        self._n_loading_pages -= len(pages)
        self.pool.allocator.set_owners("expert", pages, self.view.row(slot, expert))
        self.view.place(slot, expert, pages)
        self.residency.resident[slot, expert] = True

    def settle_fill(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """Settle one of the last `claim_pages`, and note it."""
        self.settle(slot, expert, pages)
        self.fills.add(self.residency.step, slot, expert, self._left_for.get(expert, -1))

    def give_up(self, pages: np.ndarray) -> None:
        """A read failed or is not wanted any more: its pages go back."""
        self._n_loading_pages -= len(pages)
        self.pool.free("expert", pages)

    # ---- residents that leave
    def take_out(self, slot: int, expert: int) -> np.ndarray:
        """Make a resident absent; returns its pages, still allocated."""
        pages = self.view.place_elsewhere(slot, expert, 0)
        assert pages is not None, "only a resident can be taken out"
        self.residency.resident[slot, expert] = False
        return pages

    def shrink(self, n_experts: int) -> list[tuple[int, int]]:
        """Give up the coldest residents, between steps; (slot, expert) of those that left."""
        victims = self.residency.coldest(n_experts)
        for slot, expert in victims:
            self.pool.free("expert", self.take_out(slot, expert))
        return victims

    # ---- experts that come without being asked for
    def expand(self, n_experts: int) -> list[tuple[int, int]]:
        """Start bringing the hottest absent experts into free pages; (slot, expert) of those that were begun."""
        begun: list[tuple[int, int]] = []
        busy = self.loading()
        for place in self.residency.hottest_absent(n_experts + len(busy)):
            if place in busy:
                continue
            if len(begun) >= n_experts:
                break
            pages = self.begin(place[0])
            if pages is None:
                break
            try:
                self.start_read(*place, pages)
            except Exception as error:
                log.warning("expert %d of layer slot %d stays absent: %s", place[1], place[0], error)
                self.give_up(pages)
                break
            begun.append(place)
        return begun

    def loading(self) -> set[tuple[int, int]]:
        """Experts that are on their way after `expand`."""
        return set()

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """Bring an expert into pages from `begin` without waiting for it."""
        raise AuditError("this store cannot read beside its steps")

    def finish_reads(self) -> None:
        """Wait for what `expand` has begun. Before pages move."""

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Pages int32 [n] have been copied from sources to targets: read them there."""
        self.view.flip(sources, targets)

    def take_unread(self) -> list[Unread]:
        """What could not be read in the step that has just been run: results of these rows are worthless."""
        return []

    def catch_up(self) -> None:
        """Note what steps have used that nobody has heard of yet."""

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
        if pages + self._n_loading_pages != lent:
            raise AuditError(
                f"residents hold {pages} pages and {self._n_loading_pages} are being filled, but the pool lent "
                f"{lent} to experts"
            )
