"""Experts as the reserve of requests: what the scheduler asks when pages are short, and what quiet steps give back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from rimuru.base.units import ceil_div
from rimuru.experts.residency import Residency
from rimuru.memory.adjuster import DecisionLog, Record, StepRates, cost_expand, paper_decision, shrink_pays
from rimuru.memory.cache import SequenceCache
from rimuru.memory.compaction import make_room
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind, PoolLayout
from rimuru.memory.views import ExpertView

log = logging.getLogger(__name__)

Flip = Callable[[np.ndarray, np.ndarray], None]
ElasticPolicy = Literal["paper", "cost"]


class ElasticStore(Protocol):
    """What a room asks of a store of experts (experts/residents.py)."""

    @property
    def view(self) -> ExpertView: ...
    @property
    def residency(self) -> Residency: ...
    @property
    def rates(self) -> StepRates: ...
    def shrink(self, n_experts: int) -> list[tuple[int, int]]: ...
    def expand(self, n_experts: int) -> list[tuple[int, int]]: ...
    def finish_reads(self) -> None: ...


class CompactingRoom:
    """Makes room by moving pages only: for pools whose experts are fixed in number, or that hold none."""

    def __init__(self, cache: SequenceCache, pool: PagePool, layout: PoolLayout) -> None:
        self.cache, self.pool, self.layout = cache, pool, layout
        self.store: ElasticStore | None = None

    def make(self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False) -> bool:
        """See engine.scheduler.Room."""
        return self._compact(seq_id, n_tokens)

    def adjust(self, n_running: int) -> None:
        """See engine.scheduler.Room. A fixed number of experts stays as it is."""

    def before_moves(self) -> None:
        """Pages are about to move: nothing may be writing to them."""
        if self.store is not None:
            self.store.finish_reads()

    def _compact(self, seq_id: int, n_tokens: int) -> bool:
        """Form the pages that the request needs out of free pieces; True where it can be extended now."""
        if self.cache.can_extend(seq_id, n_tokens):
            return True
        self.before_moves()
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
    """Shrinks the coldest experts for a request's pages, and expands the hottest into pages that nobody wants.

    `offload_limit`: most experts that may be non-resident; None = all of them.
    """

    def __init__(
        self,
        cache: SequenceCache,
        pool: PagePool,
        layout: PoolLayout,
        offload_limit: int | None,
        policy: ElasticPolicy = "paper",
    ) -> None:
        super().__init__(cache, pool, layout)
        assert layout.expert is not None
        self.offload_limit, self.policy = offload_limit, policy
        self.pages_per_expert = layout.expert.n_pages / layout.expert.n_experts
        self.expert_bytes = self.pages_per_expert * layout.expert.page_bytes
        self.decisions = DecisionLog()
        self._is_short = False
        """In this step a request wants pages that experts may not give."""
        self._kv_per_page = 1
        if layout.kv is not None and layout.kv.parent == "expert":
            self._kv_per_page = layout.expert.page_bytes // layout.kv.page_bytes

    @property
    def n_shrunk(self) -> int:
        """Experts given up since the start."""
        return self.decisions.counts["shrink"]

    # ---- need
    def make(self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False) -> bool:
        """See engine.scheduler.Room. Gives up as many experts as the policy says, or none where those that may leave
        are not enough; a state's huge page is then gathered by moving what else lies in it."""
        needed = self.pages_short(seq_id, n_tokens)
        if needed == 0:
            if self._compact(seq_id, n_tokens):
                return True
            needed = 1  # kinds of pages compete for what is free, or loading buffers stand in the way
        n_shrink, _ = paper_decision(needed, self.free_pages, self.pages_per_expert)
        most = self._most_shrinks()
        if n_shrink > most and ceil_div(needed, max(1, int(self.pages_per_expert))) <= most:
            n_shrink = most
        if n_shrink > most or n_shrink == 0:
            self._is_short = True
            return self._compact(seq_id, n_tokens)
        if self.policy == "cost" and not self._pays(n_shrink, n_running, is_running):
            return self._compact(seq_id, n_tokens)
        n_shrunk = self.shrink(n_shrink, f"request {seq_id} needs {needed} pages")
        return self._compact(seq_id, n_tokens) or n_shrunk > 0

    def _pays(self, n_shrink: int, n_running: int, is_running: bool) -> bool:
        assert self.store is not None and self.layout.expert is not None
        residency, rates = self.store.residency, self.store.rates
        used = float(residency.use_probability(residency.coldest_indices(n_shrink)).sum())
        more_s = used * self.expert_bytes / rates.link_bytes_per_s
        if shrink_pays(n_running, is_running, rates.compute_s, rates.link_s, more_s, rates.hidden_share):
            return True
        reason = f"{n_shrink} experts would cost {more_s * 1e3:.1f} ms of every step of {n_running} requests"
        self.decisions.add(Record(residency.step, "refuse", reason, -1, -1, 0, 0))
        return False

    def pages_short(self, seq_id: int, n_tokens: int) -> int:
        """R_b: expert pages that the request needs beyond what is free; SSM pages count as whole huge pages."""
        assert self.layout.expert is not None
        allocator, page_bytes = self.pool.allocator, self.layout.expert.page_bytes
        per_huge = self.layout.huge_bytes // page_bytes
        short = for_states = 0
        for kind, n_pages in self.cache.pages_needed(seq_id, n_tokens).items():
            missing = n_pages - allocator.free_pages(kind)
            if missing > 0 and self._parent(kind) == "ssm":
                for_states += ceil_div(missing, self.layout.huge_bytes // allocator.unit_bytes(kind)) * per_huge
            elif missing > 0:
                short += ceil_div(missing * allocator.unit_bytes(kind), page_bytes)
        if for_states:  # free expert pages between others can be gathered
            short += max(0, for_states - (allocator.free_pages("expert") - allocator.free_pages("huge") * per_huge))
        return short

    def _parent(self, kind: PageKind) -> str:
        """The L2 kind that a page of `kind` is, or is carved from."""
        if kind in ("ssm", "expert"):
            return kind
        part = self.layout.kv if kind == "kv" else self.layout.conv
        assert part is not None
        return part.parent

    @property
    def free_pages(self) -> int:
        """F_b: free expert pages."""
        return self.pool.allocator.free_pages("expert")

    def _most_shrinks(self) -> int:
        """Experts that may still be given up."""
        assert self.store is not None and self.layout.expert is not None
        n_resident = self.store.residency.n_resident
        if self.offload_limit is None:
            return n_resident
        return min(n_resident, max(0, self.offload_limit - (self.layout.expert.n_experts - n_resident)))

    def shrink(self, n_experts: int, reason: str = "the pool shrinks") -> int:
        """Give up to n_experts of the coldest experts, within the limit; returns how many went."""
        assert self.store is not None
        n_experts = min(n_experts, self._most_shrinks())
        victims = self.store.shrink(n_experts) if n_experts > 0 else []
        self._record("shrink", reason, victims)
        return len(victims)

    # ---- once per step
    def adjust(self, n_running: int) -> None:
        """See engine.scheduler.Room. Nobody lacks pages: keep a small reserve, give the rest to experts."""
        assert self.store is not None
        is_short, self._is_short = self._is_short, False
        if is_short:
            return
        free = self.free_pages
        n_shrink, n_expand = paper_decision(0, free + self._unused_prefix_pages(), self.pages_per_expert)
        if n_shrink and n_running and (self.policy == "paper" or self._pays(1, n_running, True)):
            self.shrink(1, f"{free} pages are free")
        elif n_expand and free > 3 * self.pages_per_expert:
            rates = self.store.rates
            if self.policy == "cost":
                idle_s = max(0.0, rates.hidden_share * rates.compute_s - rates.link_s)
                expert_s = self.expert_bytes / rates.link_bytes_per_s
                n_expand = cost_expand(free, self.pages_per_expert, idle_s, expert_s)
            else:
                _, n_expand = paper_decision(0, free, self.pages_per_expert)
            if n_expand:
                self._record("expand", f"{free} pages are free", self.store.expand(n_expand))

    def _unused_prefix_pages(self) -> int:
        """Expert pages that requests could have by giving up prefixes that nobody uses."""
        return self.cache.reclaimable_pages("kv") // self._kv_per_page

    def may_grow(self, n_pages: int) -> bool:
        """Whether free pages are plenty (F_b > 3 k), so that a missed expert may stay."""
        free = self.free_pages
        return not self._is_short and free > 4 * self.pages_per_expert and free >= n_pages

    def _record(self, action: str, reason: str, places: list[tuple[int, int]]) -> None:
        layout = self.layout.expert
        assert layout is not None and self.store is not None
        for slot, expert in places:
            layer = layout.layers[slot]
            n_bytes = layer.n_pages * layout.page_bytes
            self.decisions.add(
                Record(self.store.residency.step, action, reason, layer.layer, expert, layer.n_pages, n_bytes)
            )
            log.debug("%s expert %d of block %d: %s", action, expert, layer.layer, reason)
