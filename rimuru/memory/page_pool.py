"""PagePool: the pool's memory, its layout and its allocator under one roof. Knows addresses as integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rimuru.base import env
from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.memory.allocator import PAGE_KINDS, PINNED_OWNER, Ids, PageAllocator
from rimuru.memory.compaction import MovePlan
from rimuru.memory.move_budget import STEP_MOVE_BYTES, MoveBudget
from rimuru.memory.specs import PageKind, PoolLayout

if TYPE_CHECKING:
    from rimuru.ops.base import Copier, PoolMemory

BUFFER_OWNER = PINNED_OWNER
"""Owner tag of expert pages that serve as loading buffers. They never move: tables may hold their addresses."""
POISON = 0xFF
"""Byte written over freed pages under RIMURU_POISON=1: NaN as f16, bf16 and f32."""


class PagePool:
    """Pages at memory.base + id * page_bytes. The pool has floor(mapped bytes / huge page) huge pages."""

    def __init__(
        self, memory: PoolMemory, layout: PoolLayout, limit_bytes: int | None = None, copier: Copier | None = None
    ) -> None:
        """limit_bytes: what the pool may grow to (default: what is mapped). copier: for poisoning and snapshots.

        Raises NotEnoughMemoryError where not even one huge page is mapped.
        """
        self.memory = memory
        self.layout = layout
        self.copier = copier
        n_huge = memory.mapped_bytes // layout.huge_bytes
        if n_huge == 0:
            raise NotEnoughMemoryError(
                f"the page pool got {memory.mapped_bytes} bytes, less than one huge page of {layout.huge_bytes}; "
                "raise --memory"
            )
        limit = max(memory.mapped_bytes, limit_bytes or 0)
        self.allocator = PageAllocator(layout, n_huge, limit // layout.huge_bytes)
        self.moves = MoveBudget(STEP_MOVE_BYTES["cuda"])
        self._buffers: list[np.ndarray] = []
        self._poisons = copier is not None and env.poison_free_pages()

    # ---- addresses
    @property
    def base(self) -> int:
        return self.memory.base

    @property
    def total_bytes(self) -> int:
        return self.allocator.n_huge * self.layout.huge_bytes

    def address(self, kind: PageKind, page: int) -> int:
        """Address of a page's first byte."""
        return self.memory.base + int(page) * self.layout.page_bytes(kind)

    def addresses(self, kind: PageKind, ids: Ids) -> np.ndarray:
        """Addresses int64, same shape as ids; 0 where an id is negative (no page)."""
        ids = np.asarray(ids, np.int64)
        return np.where(ids >= 0, self.memory.base + ids * self.layout.page_bytes(kind), 0)

    # ---- pages in and out
    def allocate(self, kind: PageKind, n: int, owner: int = -1) -> np.ndarray | None:
        """See PageAllocator.allocate."""
        return self.allocator.allocate(kind, n, owner)

    def allocate_expert(self, n_pages: int, owner: int = -1) -> np.ndarray | None:
        """See PageAllocator.allocate_expert."""
        return self.allocator.allocate_expert(n_pages, owner)

    def free(self, kind: PageKind, ids: Ids) -> None:
        """Give pages back (conv: runs by their first ids). Nothing may read them any more."""
        self.allocator.free(kind, ids)
        if self._poisons:
            self.poison(kind, ids)

    def poison(self, kind: PageKind, ids: Ids) -> None:
        """Fill pages with NaN patterns, so that a stale or unwritten read shows. Waits: a fill still under way would
        meet what the pages' next owner writes there, for nothing orders copies before the steps queued after them."""
        assert self.copier is not None
        for address in self.addresses(kind, ids).ravel():
            self.copier.fill(int(address), self.allocator.unit_bytes(kind), POISON)
        self.copier.wait()

    def reserve_buffer(self, n_pages: int) -> np.ndarray | None:
        """Expert pages int32 [n_pages] for loading, side by side where possible; counted under views.buffer."""
        ids = self.allocator.allocate_expert(n_pages, BUFFER_OWNER)
        if ids is not None:
            self._buffers.append(ids)
        return ids

    def release_buffer(self, ids: np.ndarray) -> None:
        """Give a loading buffer back."""
        for i, held in enumerate(self._buffers):
            if np.array_equal(held, ids):
                self.free("expert", ids)
                del self._buffers[i]
                return
        raise AuditError(f"expert pages {list(map(int, ids[:8]))} are no loading buffer")

    @property
    def n_buffer_pages(self) -> int:
        """Expert pages that serve as loading buffers."""
        return sum(ids.size for ids in self._buffers)

    # ---- resizing
    def grow(self, n_bytes: int) -> None:
        """Map memory up to n_bytes and add the huge pages that fit. A failing map leaves the old pool."""
        n_huge = min(n_bytes // self.layout.huge_bytes, self.allocator.max_huge)
        if n_huge > self.allocator.n_huge:
            self.memory.resize(max(n_bytes, self.memory.mapped_bytes))
            self.allocator.grow(n_huge)

    def finish_shrink(self, plan: MovePlan, n_bytes: int) -> None:
        """After the last commit of plan_shrink(allocator, n_bytes // huge_bytes): let the pool's end go."""
        self.allocator.shrink(n_bytes // self.layout.huge_bytes)
        plan.finish()
        self.memory.resize(n_bytes)

    # ---- reports
    def stats(self) -> dict[str, Any]:
        """total_bytes, free_bytes (not allocated to any page), views.{expert,kv,ssm,conv,buffer}, levels."""
        n_buffer = self.n_buffer_pages
        views: dict[str, dict[str, int]] = {}
        for kind in PAGE_KINDS:
            n_ids = self.allocator.pages_in_use(kind) - (n_buffer if kind == "expert" else 0)
            views[kind] = {
                "pages": n_ids * self.allocator.unit_pages(kind),
                "bytes": n_ids * self.allocator.unit_bytes(kind),
            }
        views["buffer"] = {"pages": n_buffer, "bytes": n_buffer * self.layout.page_bytes("expert")}
        used_bytes = sum(view["bytes"] for view in views.values())
        return {
            "total_bytes": self.total_bytes,
            "free_bytes": self.total_bytes - used_bytes,
            "views": views,
            "levels": self.allocator.levels(),
        }

    def audit(self) -> None:
        """Allocator, mapped memory and loading buffers agree; else AuditError."""
        self.allocator.audit()
        if self.total_bytes > self.memory.mapped_bytes:
            raise AuditError(f"the pool counts {self.total_bytes} bytes, but {self.memory.mapped_bytes} are mapped")
        for ids in self._buffers:
            if (self.allocator.owners("expert", ids) != BUFFER_OWNER).any():
                raise AuditError(f"loading buffer pages {list(map(int, ids[:8]))} belong to somebody else")
