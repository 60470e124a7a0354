"""Experts as the reserve of requests: what the scheduler asks when pages are short (policy `paper`)."""

from __future__ import annotations

from rimuru.base.units import ceil_div
from rimuru.experts.store import HostExpertStore
from rimuru.memory.adjuster import paper_decision
from rimuru.memory.cache import SequenceCache
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PoolLayout


class ExpertRoom:
    """Shrinks the coldest experts for a request's pages, and says when free pages may hold one more expert.

    `offload_limit`: most experts that may be non-resident; None = all of them.
    """

    def __init__(self, cache: SequenceCache, pool: PagePool, layout: PoolLayout, offload_limit: int | None) -> None:
        assert layout.expert is not None
        self.cache, self.pool, self.layout, self.offload_limit = cache, pool, layout, offload_limit
        self.pages_per_expert = layout.expert.n_pages / layout.expert.n_experts
        self.store: HostExpertStore | None = None
        self.n_shrunk = 0

    def make(self, seq_id: int, n_tokens: int) -> bool:
        """See engine.scheduler.Room."""
        needed = self.pages_short(seq_id, n_tokens)
        n_shrink, _ = paper_decision(needed, self.pool.allocator.free_pages("expert"), self.pages_per_expert)
        return needed > 0 and self.shrink(n_shrink) > 0

    def pages_short(self, seq_id: int, n_tokens: int) -> int:
        """R_b: expert pages that the request needs beyond what is free; SSM pages count as whole huge pages."""
        assert self.layout.expert is not None
        page_bytes, short = self.layout.expert.page_bytes, 0
        for kind, n_pages in self.cache.pages_needed(seq_id, n_tokens).items():
            missing = n_pages - self.cache.free_pages(kind)
            if missing <= 0:
                continue
            if kind == "ssm":
                per_huge = self.layout.huge_bytes // self.layout.page_bytes("ssm")
                short += ceil_div(missing, per_huge) * (self.layout.huge_bytes // page_bytes)
            else:
                short += ceil_div(missing * self.layout.page_bytes(kind), page_bytes)  # type: ignore[arg-type]
        return short

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
