"""Which experts are resident, how lately each was used, and who leaves next."""

from __future__ import annotations

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.specs import ExpertLayout

NEVER = -1


class Residency:
    """Recency of every (layer slot, expert) as arrays [n_slots, max experts].

    Stamps are step numbers, not times: within a step all layers look equally recent. Plain recency over layers would
    throw out exactly the layers that come next, because they were used the longest ago.
    """

    def __init__(self, layout: ExpertLayout) -> None:
        self.layout = layout
        n_slots = len(layout.layers)
        width = max(layer.n_experts for layer in layout.layers)
        self.resident = np.zeros((n_slots, width), np.bool_)
        self.last_used = np.full((n_slots, width), NEVER, np.int64)
        self.n_uses = np.zeros((n_slots, width), np.int64)
        self.n_pages = np.array([layer.n_pages for layer in layout.layers], np.int64)
        self.step = 0

    @property
    def n_resident(self) -> int:
        return int(self.resident.sum())

    def resident_per_layer(self) -> list[int]:
        return [int(n) for n in self.resident.sum(axis=1)]

    def touch(self, slot: int, experts: np.ndarray, counts: np.ndarray) -> None:
        """Note that the running step uses these experts, each for `counts` tokens."""
        self.last_used[slot, experts] = self.step
        self.n_uses[slot, experts] += counts

    def victim(self, slot: int, in_use: np.ndarray) -> int | None:
        """The resident of a layer that was used the longest ago and is not in_use (bool [width]); lowest id on ties."""
        candidates = np.flatnonzero(self.resident[slot] & ~in_use)
        if not len(candidates):
            return None
        return int(candidates[np.argmin(self.last_used[slot, candidates])])

    def coldest(self, n_experts: int) -> list[tuple[int, int]]:
        """(slot, expert) of the n coldest residents over all layers: longest unused first, then fewest uses, then the
        layer that has most of its experts resident."""
        slots, experts = np.nonzero(self.resident)
        share = self.resident.sum(axis=1)[slots] / np.array([layer.n_experts for layer in self.layout.layers])[slots]
        order = np.lexsort((experts, slots, -share, self.n_uses[slots, experts], self.last_used[slots, experts]))
        return [(int(slots[i]), int(experts[i])) for i in order[:n_experts]]

    def hottest_absent(self, n_experts: int) -> list[tuple[int, int]]:
        """(slot, expert) of the n hottest non-residents: most lately used first, then most used; experts never used
        come last, spread evenly over the layers."""
        exists = np.arange(self.resident.shape[1])[None, :] < np.array(
            [layer.n_experts for layer in self.layout.layers]
        ).reshape(-1, 1)
        slots, experts = np.nonzero(~self.resident & exists)
        order = np.lexsort((slots, experts, -self.n_uses[slots, experts], -self.last_used[slots, experts]))
        return [(int(slots[i]), int(experts[i])) for i in order[:n_experts]]

    def audit(self) -> None:
        """Raise unless every flag belongs to an expert that exists."""
        for slot, layer in enumerate(self.layout.layers):
            if self.resident[slot, layer.n_experts :].any():
                raise AuditError(f"layer slot {slot} has residents beyond its {layer.n_experts} experts")
