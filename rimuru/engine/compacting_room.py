"""The room of requests in a pool whose experts stay as many as they are, or that has none: free pages, gathered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.base.units import ceil_div, counted
from rimuru.engine.elastic_store import ElasticStore
from rimuru.memory.cache import SequenceCache
from rimuru.memory.compaction import make_room
from rimuru.memory.decisions import DecisionLog, Record
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind, PoolLayout
from rimuru.memory.state_cache import allocate_all, free_all

Flip = Callable[[np.ndarray, np.ndarray], None]


class CompactingRoom:
    """Makes room by moving pages only: for pools whose experts are fixed in number, or that hold none."""

    def __init__(self, cache: SequenceCache, pool: PagePool, layout: PoolLayout) -> None:
        self.cache, self.pool, self.layout = cache, pool, layout
        self._store: ElasticStore | None = None
        self.decisions = DecisionLog()
        cache.make_pages = self.make_pages

    @property
    def store(self) -> ElasticStore | None:
        return self._store

    @store.setter
    def store(self, store: ElasticStore) -> None:
        self._store, self.decisions.fills = store, store.fills

    def make(
        self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False, again_s: float = 0.0
    ) -> bool:
        """See engine.scheduler.Room."""
        return self._compact(seq_id, n_tokens)

    def admits(
        self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int, n_waiting: int, n_start_tokens: int
    ) -> bool:
        """See engine.scheduler.Room. Free pages are good for nothing else."""
        return True

    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        """See engine.scheduler.Room. A fixed number of experts stays as it is; which ones, depends on who runs."""
        if self.store is not None:
            self.store.residency.n_requests = self.store.rates.n_requests = n_running

    def before_moves(self) -> None:
        """Pages are about to move: nothing may be writing to them."""
        if self.store is not None:
            self.store.finish_reads()

    @property
    def is_moving(self) -> bool:
        """See engine.scheduler.Room."""
        return self.pool.moves.is_waiting

    def next_step(self) -> None:
        """See engine.scheduler.Room."""
        self.pool.moves.next_step()

    def _compact(self, seq_id: int, n_tokens: int) -> bool:
        """Form the pages that the request needs out of free pieces; True where it can be extended now. Where this step
        may not move enough for it, `is_moving` is set."""
        self.pool.moves.is_waiting = False
        if self.cache.can_extend(seq_id, n_tokens):  # a cache with states gathers by itself
            return True
        if not self.is_moving:
            self._gather(self.cache.pages_needed(seq_id, n_tokens))
        fits = self.cache.can_extend(seq_id, n_tokens)
        self.pool.moves.is_waiting = self.is_moving and not fits
        return fits

    def _gather(self, needs: dict[PageKind, int]) -> None:
        """Move pages so that free ones of each kind can be formed."""
        self.before_moves()
        for wanted in (self._parents_wanted(needs), needs):  # together first: a page is good for one thing only
            for kind, n_pages in wanted.items():
                if n_pages and not self.is_moving:
                    reason = f"{counted(n_pages, 'page')} of kind {kind} must be free"
                    moved = make_room(self.pool, kind, n_pages, self.flips())[1]
                    self.note_moves(moved, reason)

    def note_moves(self, moved: dict[PageKind, int], reason: str) -> None:
        """So many pages of each kind were moved within the pool."""
        step = 0 if self.store is None else self.store.residency.step
        for kind, n_pages in moved.items():
            n_bytes = n_pages * self.pool.layout.page_bytes(kind)
            self.decisions.add(Record(step, "move", reason, -1, -1, n_pages, n_bytes))

    def make_pages(self, needs: dict[PageKind, int], is_worth_experts: bool) -> bool:
        """For the cache: free so many ids of each kind, by moving pages and, where that is worth it, from experts."""
        self.pool.moves.is_waiting = False
        self._gather(needs)
        pages = allocate_all(self.pool, needs, -1)
        if pages is not None:
            free_all(self.pool, pages)
        return pages is not None

    def _parents_wanted(self, needs: dict[PageKind, int]) -> dict[PageKind, int]:
        """Expert and SSM pages that these needs take together, beyond the room in those that are split already."""
        allocator = self.pool.allocator
        wanted: dict[PageKind, int] = {"ssm": needs.get("ssm", 0), "expert": 0}
        for kind, part in (("kv", self.layout.kv), ("conv", self.layout.conv)):
            n = needs.get(kind, 0)  # type: ignore[call-overload]
            if n and part is not None and allocator.has(part.parent):
                per_parent = allocator.per_parent(kind)
                in_split = allocator.free_pages(kind) - allocator.free_pages(part.parent) * per_parent
                wanted[part.parent] += ceil_div(max(0, n - in_split), per_parent)
        return wanted

    def flips(self) -> dict[str, Flip]:
        """What has to learn that pages of a kind were moved."""
        flips: dict[str, Flip] = {}
        if self.store is not None:
            flips["expert"] = self.store.flip
        kinds: tuple[PageKind, ...] = ("kv", "ssm", "conv")
        for kind in kinds:
            flips[kind] = self._cache_flip(kind)
        return flips

    def _cache_flip(self, kind: PageKind) -> Flip:
        return lambda sources, targets: self.cache.flip(kind, sources, targets)
