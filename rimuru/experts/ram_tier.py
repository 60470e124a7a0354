"""Copies of experts in host memory, within a limit: what stands between the pool and the disk.

    disk --read--> a slot of its own here --copy--> pool pages          an expert that the tier keeps
    disk --read--> staging                --copy--> pool pages          one that is not worth a slot
    pool pages     --copy--> a slot                                     a resident that leaves the pool and is worth one

Worth is how often tokens chose an expert lately. It is no order of recency: a step reads everything that is absent, one
layer after the other, and the least recently used one is what comes next. Copies of residents go first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.experts.host_arena import HostArena
from rimuru.experts.residency import Residency
from rimuru.memory.specs import ExpertLayout

Place = tuple[int, int]
"""(layer slot, expert)."""


class RamTier:
    """Which experts have a copy in host memory, and where."""

    def __init__(self, layout: ExpertLayout, arena: HostArena, residency: Residency) -> None:
        self.layout, self.arena, self.residency = layout, arena, residency
        self._slots: dict[Place, np.ndarray] = {}
        self._is_held = np.zeros(residency.resident.shape, np.bool_)
        n_bytes = [layer.n_pages * layout.page_bytes for layer in layout.layers]
        self._slot_bytes = np.array(n_bytes, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, place: Place) -> np.ndarray | None:
        """The copy, uint8 [bytes of the expert's pages], or None."""
        return self._slots.get(place)

    def claim_free(self, place: Place) -> np.ndarray | None:
        """A slot for a copy that is about to be made, where memory is left."""
        try:
            slot = self.arena.take(int(self._slot_bytes[place[0]]))
        except NotEnoughMemoryError:
            return None
        self._slots[place] = slot
        self._is_held[place] = True
        return slot

    def claim(self, place: Place, busy: Iterable[Place]) -> np.ndarray | None:
        """The same; where no memory is left, the slot of the copy that is worth least, if that is less than the
        expert's worth. Copies that are `busy` stay."""
        slot = self.claim_free(place)
        if slot is not None:
            return slot
        leaves = self._is_held & (self._slot_bytes == self._slot_bytes[place[0]])[:, None]
        for other in busy:
            leaves[other] = False
        worth = np.where(leaves, np.where(self.residency.resident, -1.0, self.residency.scores), np.inf)
        index = int(worth.argmin())
        if worth.flat[index] >= self.residency.scores[place]:
            return None
        victim = self.residency.place_of(index)
        slot = self._slots.pop(victim)
        self._is_held[victim] = False
        self._slots[place] = slot
        self._is_held[place] = True
        return slot

    def drop(self, place: Place) -> None:
        """Forget a copy: it was never made, or is wrong."""
        self.arena.give_back(self._slots.pop(place))
        self._is_held[place] = False

    def audit(self) -> None:
        """Raise unless the slots are the arena's, and no two copies share one."""
        n_bytes = sum(slot.nbytes for slot in self._slots.values())
        if n_bytes != self.arena.used_bytes:
            raise AuditError(f"copies in host memory take {n_bytes} bytes, {self.arena.used_bytes} are lent")
        if len({int(slot.ctypes.data) for slot in self._slots.values()}) != len(self._slots):
            raise AuditError("two copies in host memory share a slot")
        if set(self._slots) != {self.residency.place_of(int(index)) for index in np.flatnonzero(self._is_held)}:
            raise AuditError("the copies in host memory are not those that are counted")
