"""Stores of experts without experts: residency, pages and decisions are real, copies are bytes in a queue.

SimulatedStore lets the host say who is resident, as the CPU's store does and a device's without fill on read;
SimulatedPlaces lets the device say so, by the rule of cuda_src/moe/residency.cu.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from rimuru.experts.device_places import rule_of
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.residents import ResidentSet
from rimuru.memory.adjuster import StepRates
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView

MOST_COUNTED_TOKENS = 96


class SimulatedStore(ResidentSet):
    """See ResidentSet. `use` stands for the layers of a step, `pass_bytes` for the link."""

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        fill_on_read: bool,
        residency: ResidencyPolicy,
    ) -> None:
        super().__init__(layout, pool, ExpertView(pool), quotas, may_grow, fill_on_read, residency)
        self.rates = StepRates()
        self.n_asked = self.n_hits = self.n_expanded = 0
        self._new_owners: list[tuple[np.ndarray, int]] = []
        self._queue: deque[tuple[int, int, np.ndarray]] = deque()
        self.n_buffers = max(layer.n_experts for layer in layout.layers) if fill_on_read else 0
        """Experts of a layer that loading buffers take when they find no place. A host that fills has one for each."""
        self.queued_bytes = 0.0
        """Of expansions that the link still has to carry."""
        self._bytes = [layer.useful_bytes for layer in layout.layers]

    # ---- filling at start
    def preload(self) -> int:
        """Make experts resident, the hottest first, until quotas or pages end; how many."""
        n_before = self.residency.n_resident
        for slot, expert in self.residency.hottest():
            pages = self._grow(slot, 0)
            if pages is not None:
                self.settle(slot, expert, pages)
        return self.residency.n_resident - n_before

    # ---- a step
    def use(self, counts: np.ndarray, n_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """A step uses these experts, int32 [n_slots, width] choices. Bytes float64 [n_slots] of the experts that are
        used, used but absent, absent at all, and read where they lie; with fill on read, missed ones are resident
        afterwards, as far as they find a place."""
        residency = self.residency
        residency.begin_step(max(1, min(n_tokens, MOST_COUNTED_TOKENS)))
        n_slots = len(self._bytes)
        used, missed, in_place = np.zeros(n_slots), np.zeros(n_slots), np.zeros(n_slots)
        absent = (residency.exists & ~residency.resident).sum(axis=1) * np.array(self._bytes, np.float64)
        is_used = counts > 0
        for slot, expert in [(s, e) for s, e, _ in self._queue if is_used[s, e]]:
            self._arrive(slot, expert)  # its copy is in the queue already
        is_missed = is_used & ~self._readable
        n_used, n_missed = is_used.sum(axis=1), is_missed.sum(axis=1)
        self.n_asked += int(n_used.sum())
        self.n_hits += int(n_used.sum() - n_missed.sum())
        residency.note_all(counts)
        self._weigh(counts, n_tokens)
        for slot in range(n_slots):
            used[slot], missed[slot] = n_used[slot] * self._bytes[slot], n_missed[slot] * self._bytes[slot]
            if n_missed[slot]:
                self._fill(slot, is_used[slot], np.flatnonzero(is_missed[slot]))
                n_left = int((is_missed[slot] & ~self._readable[slot]).sum())
                in_place[slot] = max(0, n_left - self.n_buffers) * self._bytes[slot]
        self._note_owners()
        return used, missed, absent, in_place

    @property
    def _readable(self) -> np.ndarray:
        """bool [n_slots, width]: who is in the pool."""
        return self.residency.resident

    def _weigh(self, counts: np.ndarray, n_tokens: int) -> None:
        """What a step of n_tokens chose, before anybody comes for it."""

    def _fill(self, slot: int, in_use: np.ndarray, missing: np.ndarray) -> None:
        """What claim_pages and settle do together, without the time between them; owners are noted once per step."""
        if not self.fill_on_read:
            return
        for number, expert in enumerate(missing.tolist()):
            pages = self._grow(slot, 0)
            if pages is None:
                missing = missing[number:]
                break
            self.settle(slot, expert, pages)
            self.fills.add(self.residency.step, slot, expert)
        else:
            return
        for expert, victim in self.residency.exchanges(slot, in_use, missing):
            self._exchange(slot, expert, victim)
            self.fills.add(self.residency.step, slot, expert, victim)

    def _exchange(self, slot: int, expert: int, victim: int) -> None:
        pages = self.take_out(slot, victim)
        self.view.place(slot, expert, pages)
        self.residency.resident[slot, expert] = True
        self._new_owners.append((pages, self.view.row(slot, expert)))

    def _note_owners(self) -> None:
        if self._new_owners:
            rows = np.repeat([row for _, row in self._new_owners], [len(pages) for pages, _ in self._new_owners])
            self.pool.allocator.set_owners("expert", np.concatenate([pages for pages, _ in self._new_owners]), rows)
            self._new_owners.clear()

    # ---- the link
    def loading(self) -> set[tuple[int, int]]:
        """See ResidentSet.loading."""
        return {(slot, expert) for slot, expert, _ in self._queue}

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """See ResidentSet.start_read."""
        self.n_expanded += 1
        self.queued_bytes += self._bytes[slot]
        self._queue.append((slot, expert, pages))

    def finish_reads(self) -> None:
        """See ResidentSet.finish_reads. The link still has to carry them."""
        while self._queue:
            self.settle(*self._queue.popleft())

    def pass_bytes(self, n_bytes: float) -> None:
        """The link had time for n_bytes of the queue: experts whose last byte came are resident."""
        self.queued_bytes = max(0.0, self.queued_bytes - n_bytes)
        behind = sum(self._bytes[slot] for slot, _, _ in self._queue)
        while self._queue:
            behind -= self._bytes[self._queue[0][0]]
            if self.queued_bytes > behind + 0.5:
                return
            self.settle(*self._queue.popleft())

    def _arrive(self, slot: int, expert: int) -> None:
        """A queued expert is needed now: it goes first."""
        for number, (s, e, pages) in enumerate(self._queue):
            if (s, e) == (slot, expert):
                del self._queue[number]
                self.settle(slot, expert, pages)
                return


class SimulatedPlaces(SimulatedStore):
    """As experts/device_store.py with fill on read: the adjuster adds empty places and takes places away, which moves
    nothing; who is missed comes into an empty one, or into that of a colder one whom the step does not use."""

    def __init__(
        self,
        layout: ExpertLayout,
        pool: PagePool,
        quotas: list[int] | None,
        may_grow: Callable[[int], bool],
        residency: ResidencyPolicy,
    ) -> None:
        super().__init__(layout, pool, quotas, may_grow, True, residency)
        self.expands_freely = True
        shape = self.residency.resident.shape
        self._scores, self._stamps = np.zeros(shape), np.zeros(shape, np.int64)
        self._is_empty = np.zeros(shape, np.bool_)
        """Of the residents, those in name only: nobody has come into their place yet."""

    @property
    def _readable(self) -> np.ndarray:
        return self.residency.resident & ~self._is_empty

    def start_read(self, slot: int, expert: int, pages: np.ndarray) -> None:
        """See ResidentSet.start_read: one more place."""
        self.n_expanded += 1
        self.settle(slot, expert, pages)
        self._is_empty[slot, expert] = True

    def take_out(self, slot: int, expert: int) -> np.ndarray:
        """See ResidentSet.take_out."""
        self._is_empty[slot, expert] = False
        return super().take_out(slot, expert)

    def _weigh(self, counts: np.ndarray, n_tokens: int) -> None:
        time = n_tokens / rule_of(self.residency)[2]
        self._scores *= np.exp(-time)
        self._scores += -np.expm1(-time) / time * counts
        self._stamps[counts > 0] = self.residency.step

    def _fill(self, slot: int, in_use: np.ndarray, missing: np.ndarray) -> None:
        by_recency, all_come, _ = rule_of(self.residency)
        scores, is_empty = self._scores[slot], self._is_empty[slot]
        comers = missing[np.argsort(-scores[missing], kind="stable")].tolist()
        empty = np.flatnonzero(is_empty).tolist()
        while comers and empty:
            comer = comers.pop(0)
            name = comer if comer in empty else empty[-1]
            empty.remove(name)
            is_empty[name] = False
            if name != comer:
                self._exchange(slot, comer, name)
            self.fills.add(self.residency.step, slot, comer)
        leaving = np.flatnonzero(self.residency.resident[slot] & ~in_use & ~is_empty)
        order = (scores[leaving], self._stamps[slot, leaving]) if by_recency else (scores[leaving],)
        for comer, victim in zip(comers, leaving[np.lexsort(order)].tolist(), strict=False):
            if not all_come and not scores[victim] < scores[comer]:
                break
            self._exchange(slot, comer, victim)
            self.fills.add(self.residency.step, slot, comer, victim)
