"""Experts as the reserve of requests: what the scheduler asks when pages are short (policy `paper`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.base.units import ceil_div
from rimuru.experts.store import HostExpertStore
from rimuru.memory.adjuster import paper_decision
from rimuru.memory.cache import SequenceCache
from rimuru.memory.compaction import make_room
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind, PoolLayout

Flip = Callable[[np.ndarray, np.ndarray], None]


class CompactingRoom:
    """Makes room by moving pages only: for pools whose experts are fixed in number, or that hold none."""

    def __init__(self, cache: SequenceCache, pool: PagePool, layout: PoolLayout) -> None:
        self.cache, self.pool, self.layout = cache, pool, layout
        self.store: HostExpertStore | None = None

    def make(self, seq_id: int, n_tokens: int) -> bool:
        """See engine.scheduler.Room."""
        return self._compact(seq_id, n_tokens)

    def _compact(self, seq_id: int, n_tokens: int) -> bool:
        """Form the pages that the request needs out of free pieces; True where it can be extended now."""
        for kind, n_pages in self.cache.pages_needed(seq_id, n_tokens).items():
            if n_pages:
                make_room(self.pool, kind, n_pages, self.flips())
        return self.cache.can_extend(seq_id, n_tokens)

    def flips(self) -> dict[str, Flip]:
        """What has to learn that pages of a kind were moved."""
        flips: dict[str, Flip] = {}
        if self.store is not None:
            flips["expert"] = self.store.view.flip
        kinds: tuple[PageKind, ...] = ("kv", "ssm", "conv")
        for kind in kinds:
            flips[kind] = self._cache_flip(kind)
        return flips

    def _cache_flip(self, kind: PageKind) -> Flip:
        return lambda sources, targets: self.cache.flip(kind, sources, targets)


class ExpertRoom(CompactingRoom):
    """Shrinks the coldest experts for a request's pages, and says when free pages may hold one more expert.

    `offload_limit`: most experts that may be non-resident; None = all of them.
    """

    def __init__(self, cache: SequenceCache, pool: PagePool, layout: PoolLayout, offload_limit: int | None) -> None:
        super().__init__(cache, pool, layout)
        assert layout.expert is not None
        self.offload_limit = offload_limit
        self.pages_per_expert = layout.expert.n_pages / layout.expert.n_experts
        self.n_shrunk = 0

    def make(self, seq_id: int, n_tokens: int) -> bool:
        """See engine.scheduler.Room. Shrinks no more experts than the pages that are short; a state's huge page is
        then gathered by moving what else lies in it."""
        needed = self.pages_short(seq_id, n_tokens)
        n_shrunk = 0
        if needed > 0:
            n_shrink, _ = paper_decision(needed, self.pool.allocator.free_pages("expert"), self.pages_per_expert)
            n_shrunk = self.shrink(n_shrink)
        return self._compact(seq_id, n_tokens) or n_shrunk > 0

    def pages_short(self, seq_id: int, n_tokens: int) -> int:
        """R_b: expert pages that the request needs beyond what is free; SSM pages count as whole huge pages."""
        assert self.layout.expert is not None
        allocator, page_bytes = self.pool.allocator, self.layout.expert.page_bytes
        short = 0
        for kind, n_pages in self.cache.pages_needed(seq_id, n_tokens).items():
            missing = n_pages - allocator.free_pages(kind)
            if missing <= 0:
                continue
            if self._parent(kind) == "ssm":  # free expert pages can be gathered into whole huge pages
                per_huge = self.layout.huge_bytes // allocator.unit_bytes(kind)
                wanted = ceil_div(missing, per_huge) * (self.layout.huge_bytes // page_bytes)
                short += max(0, wanted - allocator.free_pages("expert"))
            else:  # free expert pages are counted as free pages of the kind already
                short += ceil_div(missing * allocator.unit_bytes(kind), page_bytes)
        return short

    def _parent(self, kind: PageKind) -> str:
        """The L2 kind that a page of `kind` is, or is carved from."""
        if kind in ("ssm", "expert"):
            return kind
        part = self.layout.kv if kind == "kv" else self.layout.conv
        assert part is not None
        return part.parent

    def shrink(self, n_experts: int) -> int:
        """Give up to n_experts of the coldest experts; returns how many went."""
        assert self.store is not None and self.layout.expert is not None
        if self.offload_limit is not None:
            absent = self.layout.expert.n_experts - self.store.residency.n_resident
            n_experts = min(n_experts, max(0, self.offload_limit - absent))
        n_shrunk = self.store.shrink(n_experts) if n_experts else 0
        self.n_shrunk += n_shrunk
        return n_shrunk

    def may_grow(self, n_pages: int) -> bool:
        """Whether free pages are plenty (F_b > 3 k), so that a missed expert may stay."""
        free = self.pool.allocator.free_pages("expert")
        _, n_expand = paper_decision(0, free, self.pages_per_expert)
        return n_expand > 0 and free >= n_pages
