"""PageAllocator: which pages of the pool are free, in three levels that split on demand and merge as soon as they can.

Page ids count pages of their own kind's size from the pool's base. A conv "page" here is a run of n_rows consecutive
conv pages, named by its first id: n in `allocate("conv", n)` counts runs. Every page carries an owner tag (int32, -1 =
none) for reports and for planning moves. Calls succeed whole or change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.base.units import ceil_div
from rimuru.memory import allocator_jit as jit
from rimuru.memory.allocator_audit_jit import FAULTS
from rimuru.memory.allocator_audit_jit import audit as audit_state
from rimuru.memory.specs import PageKind, PoolLayout

Ids = np.ndarray | Sequence[int]

KIND_NUMBER: dict[str, int] = {
    "huge": jit.HUGE,
    "expert": jit.EXPERT,
    "ssm": jit.SSM,
    "slab": jit.SLAB,
    "kv": jit.KV,
    "conv": jit.CONV,
}
KIND_NAME = tuple(KIND_NUMBER)
PINNED_OWNER = -2
"""Owner tag of pages that no plan moves (loading buffers)."""
PAGE_KINDS: tuple[PageKind, ...] = ("expert", "ssm", "kv", "conv")
_available = getattr(jit.available, "py_func", jit.available)
"""Not compiled: a few numbers are read in less time than it takes to hand five arrays to compiled code."""


def parent_kind(layout: PoolLayout, kind: Literal["kv", "conv"]) -> str:
    """The L2 kind that pages of an L3 kind are carved from: "expert", "ssm" or "slab"."""
    if layout.slab_bytes:
        return "slab"
    part = layout.kv if kind == "kv" else layout.conv
    assert part is not None
    if layout.page_bytes(part.parent):
        return part.parent
    return "ssm" if layout.ssm is not None else "expert"


class PageAllocator:
    """Free and used pages of a pool of n_huge huge pages that may grow to max_huge."""

    def __init__(self, layout: PoolLayout, n_huge: int, max_huge: int | None = None) -> None:
        """Raises ValueError where the layout's page sizes do not divide each other."""
        self.layout = layout
        self.n_huge = 0
        self.max_huge = n_huge if max_huge is None else max_huge
        if not 0 <= n_huge <= self.max_huge:
            raise ValueError(f"{n_huge} huge pages do not fit in a pool of at most {self.max_huge}")
        self._pages_per_parent = [0] * jit.N_KINDS
        self._unit_pages = [1] * jit.N_KINDS
        self._unit_bytes = [0] * jit.N_KINDS
        self._per_huge = [0] * jit.N_KINDS
        self._meta = np.zeros((jit.N_KINDS, jit.N_META), np.int64)
        self._state = self._build()
        self.grow(n_huge)

    # ---- building
    def _build(self) -> jit.State:
        layout = self.layout
        self._add_kind("huge", None, layout.huge_bytes, 0, self.max_huge)
        for kind, page_bytes in (
            ("expert", layout.page_bytes("expert")),
            ("ssm", layout.page_bytes("ssm")),
            ("slab", layout.slab_bytes),
        ):
            if page_bytes:
                self._add_kind(kind, "huge", page_bytes, layout.huge_bytes, self.max_huge)
        for leaf in ("kv", "conv"):
            if layout.page_bytes(leaf):  # type: ignore[arg-type]
                above = parent_kind(layout, leaf)  # type: ignore[arg-type]
                n_parents = self.max_huge * self._per_huge[KIND_NUMBER[above]]
                size = self._unit_bytes[KIND_NUMBER[above]]
                self._add_kind(leaf, above, layout.page_bytes(leaf), size, n_parents)  # type: ignore[arg-type]
        meta = self._meta
        n_children = meta[:, jit.N_PARENTS] * meta[:, jit.N_CHILD]
        n_children[jit.HUGE] += 1  # the ring's sentinel
        n_parents_of = meta[:, jit.N_PARENTS].copy()
        n_buckets = meta[:, jit.N_CHILD] + 1
        n_buckets[jit.HUGE] = 0
        n_words = -(-n_buckets // jit.WORD)
        for column, counts in (
            (jit.CHILD_AT, n_children),
            (jit.PARENT_AT, n_parents_of),
            (jit.BUCKET_AT, n_buckets),
            (jit.BITS_AT, n_words),
        ):
            meta[:, column] = np.cumsum(counts) - counts
        child = np.zeros((int(n_children.sum()), 4), np.int32)
        ring = int(meta[jit.HUGE, jit.CHILD_AT]) + self.max_huge
        child[ring - self.max_huge : ring, jit.STATE] = jit.S_HELD
        child[ring, [jit.NEXT, jit.PREV]] = self.max_huge
        return jit.State(
            meta=meta,
            child=child,
            parent=np.zeros((int(n_parents_of.sum()), 5), np.int32),
            heads=np.full(max(1, int(n_buckets.sum())), -1, np.int32),
            bits=np.zeros(max(1, int(n_words.sum())), np.int64),
        )

    def _add_kind(self, kind: str, above: str | None, page_bytes: int, above_bytes: int, n_parents: int) -> None:
        k = KIND_NUMBER[kind]
        if kind == "huge":
            self._meta[k, [jit.N_CHILD, jit.N_PARENTS]] = n_parents, 1
            self._meta[k, jit.PARENT] = -1
            self._unit_bytes[k], self._per_huge[k], self._pages_per_parent[k] = page_bytes, 1, n_parents
            return
        assert above is not None
        if above_bytes % page_bytes:
            raise ValueError(f"{kind} pages of {page_bytes} bytes do not divide {above} pages of {above_bytes} bytes")
        if kind == "conv" and self.layout.conv is not None:
            self._unit_pages[k] = self.layout.conv.n_rows
        n_pages = above_bytes // page_bytes
        n_units = n_pages // self._unit_pages[k]
        if n_units == 0:
            raise ValueError(f"a run of {self._unit_pages[k]} {kind} pages does not fit in an {above} page")
        self._meta[k, [jit.PARENT, jit.N_CHILD, jit.N_PARENTS]] = KIND_NUMBER[above], n_units, n_parents
        self._unit_bytes[k] = page_bytes * self._unit_pages[k]
        self._pages_per_parent[k] = n_pages
        self._per_huge[k] = n_units * self._per_huge[KIND_NUMBER[above]]

    # ---- ids: what callers see <-> child numbers
    def _number(self, kind: str) -> int:
        k = KIND_NUMBER[kind]
        if self._meta[k, jit.N_CHILD] == 0:
            raise AuditError(f"this pool has no {kind} pages")
        return k

    def _units(self, k: int, ids: Ids) -> np.ndarray:
        units = np.ascontiguousarray(ids, np.int32)
        if k != jit.CONV:
            return units
        parent, rest = np.divmod(units, self._pages_per_parent[k])
        slot, inside = np.divmod(rest, self._unit_pages[k])
        n_child = int(self._meta[k, jit.N_CHILD])
        known = (inside == 0) & (slot < n_child)  # others: no first page of a run
        return np.where(known, parent * n_child + slot, -1).astype(np.int32)

    def _ids(self, k: int, units: np.ndarray) -> np.ndarray:
        if k != jit.CONV:
            return units
        parent, slot = np.divmod(units, int(self._meta[k, jit.N_CHILD]))
        return (parent * self._pages_per_parent[k] + slot * self._unit_pages[k]).astype(np.int32)

    # ---- questions
    def has(self, kind: str) -> bool:
        """True where the layout has pages of the kind."""
        return bool(self._meta[KIND_NUMBER[kind], jit.N_CHILD])

    def unit_pages(self, kind: str) -> int:
        """Pages behind one id: n_rows for conv, else 1."""
        return self._unit_pages[KIND_NUMBER[kind]]

    def unit_bytes(self, kind: str) -> int:
        """Bytes behind one id: a page; for conv a run."""
        return self._unit_bytes[KIND_NUMBER[kind]]

    def per_huge(self, kind: str) -> int:
        """Ids of a kind that one huge page gives; 0 where the pool has none."""
        return self._per_huge[KIND_NUMBER[kind]]

    def per_parent(self, kind: str) -> int:
        """Ids of a kind that one page of the level above gives."""
        return int(self._meta[KIND_NUMBER[kind], jit.N_CHILD])

    def free_pages(self, kind: str) -> int:
        """How many ids of a kind could be allocated right now (each kind on its own)."""
        k = KIND_NUMBER[kind]
        return int(_available(self._state, k)) if self._meta[k, jit.N_CHILD] else 0

    def can_allocate(self, kind: str, n: int) -> bool:
        """True where `allocate(kind, n)` would succeed."""
        return n <= self.free_pages(kind)

    def huge_needed(self, needs: Mapping[PageKind, int]) -> int:
        """Huge pages that an empty pool would split for so many ids of each kind."""
        l2_pages = dict.fromkeys(("expert", "ssm", "slab"), 0)
        for kind, n in needs.items():
            if kind in l2_pages:
                l2_pages[kind] += n
            elif n:
                l2_pages[parent_kind(self.layout, kind)] += ceil_div(n, self.per_parent(kind))  # type: ignore[arg-type]
        return sum(ceil_div(n, self.per_huge(kind)) for kind, n in l2_pages.items() if n)

    def pages_in_use(self, kind: str) -> int:
        """Allocated ids of a kind."""
        return int(self._meta[KIND_NUMBER[kind], jit.USED])

    def bytes_in_use(self, kind: str) -> int:
        """Bytes behind the allocated ids of a kind."""
        return self.pages_in_use(kind) * self.unit_bytes(kind)

    def owner_of(self, kind: str, page: int) -> int:
        """Owner tag of an allocated page."""
        return int(self.owners(kind, [page])[0])

    def owners(self, kind: str, ids: Ids) -> np.ndarray:
        """Owner tags int32 [n] of allocated pages."""
        return self._state.child[self._rows(kind, ids), jit.OWNER]

    def set_owners(self, kind: str, ids: Ids, owners: int | np.ndarray) -> None:
        """Replace the owner tags of allocated pages."""
        self._state.child[self._rows(kind, ids), jit.OWNER] = owners

    def _rows(self, kind: str, ids: Ids) -> np.ndarray:
        k = self._number(kind)
        units = self._units(k, ids)
        n_units = int(self._meta[k, jit.N_PARENTS] * self._meta[k, jit.N_CHILD])
        rows = units.astype(np.int64) + self._meta[k, jit.CHILD_AT]
        if units.size and (
            units.min() < 0 or units.max() >= n_units or (self._state.child[rows, jit.STATE] != jit.S_USED).any()
        ):
            raise AuditError(f"a {kind} page among {list(map(int, ids[:8]))} is not allocated")
        return rows

    def levels(self) -> dict[str, dict[str, int]]:
        """Pages that exist at each level now and how many of them are free to take."""
        meta = self._meta
        total = meta[:, jit.OPEN] * meta[:, jit.N_CHILD]
        l2, l3 = slice(jit.EXPERT, jit.KV), slice(jit.KV, jit.N_KINDS)
        return {
            "l1": {"total": self.n_huge, "free": int(meta[jit.HUGE, jit.FREE])},
            "l2": {"total": int(total[l2].sum()), "free": int(meta[l2, jit.FREE].sum())},
            "l3": {"total": int(total[l3].sum()), "free": int(meta[l3, jit.FREE].sum())},
        }

    # ---- pages in and out
    def allocate(self, kind: str, n: int, owner: int = -1) -> np.ndarray | None:
        """Ids int32 [n], from the fullest partly used parents; None, and nothing changed, where there are fewer."""
        k = self._number(kind)
        units = np.empty(n, np.int32)
        return self._ids(k, units) if jit.allocate(self._state, k, owner, units) else None

    def allocate_runs(self, kind: str, n_runs: int, run_length: int, owner: int = -1) -> np.ndarray | None:
        """First ids int32 [n_runs] of runs of consecutive pages inside one L2 page each. None where it cannot."""
        self._check_run(kind, run_length)
        return self.allocate(kind, n_runs, owner)

    def allocate_expert(self, n_pages: int, owner: int = -1) -> np.ndarray | None:
        """Expert page ids int32 [n_pages], neighbours where a bounded search finds them, else scattered; or None."""
        self._number("expert")
        ids = np.empty(n_pages, np.int32)
        if n_pages > 0 and jit.allocate_side_by_side(self._state, n_pages, owner, ids):
            return ids
        return self.allocate("expert", n_pages, owner)

    def free(self, kind: str, ids: Ids) -> None:
        """Give pages back. An id that is not allocated, or is given twice, raises AuditError and nothing changes."""
        k = self._number(kind)
        wrong = int(jit.free(self._state, k, self._units(k, ids)))
        if wrong >= 0:
            raise AuditError(f"{kind} page {int(ids[wrong])} is freed but not allocated (or freed twice)")

    def free_runs(self, kind: str, firsts: Ids, run_length: int) -> None:
        """Give runs back by their first ids."""
        self._check_run(kind, run_length)
        self.free(kind, firsts)

    def _check_run(self, kind: str, run_length: int) -> None:
        if run_length != self.unit_pages(kind):
            raise AuditError(f"{kind} runs have {self.unit_pages(kind)} pages, not {run_length}")

    # ---- planning moves, growing and shrinking (memory/compaction.py)
    def live_pages(self, huge: Ids) -> dict[PageKind, np.ndarray]:
        """Allocated ids per kind inside the given huge pages."""
        pages: dict[PageKind, np.ndarray] = {}
        for kind in PAGE_KINDS:
            n = self.per_huge(kind)
            if n:
                units = (np.asarray(huge, np.int64)[:, None] * n + np.arange(n)).ravel()
                pages[kind] = self._ids(KIND_NUMBER[kind], self._live(kind, units))
        return pages

    def live_children(self, kind: PageKind, l2_pages: Ids) -> np.ndarray:
        """Allocated ids of an L3 kind inside the given pages of its parent kind."""
        n = self.per_parent(kind)
        units = (np.asarray(l2_pages, np.int64)[:, None] * n + np.arange(n)).ravel()
        return self._ids(KIND_NUMBER[kind], self._live(kind, units))

    def _live(self, kind: str, units: np.ndarray) -> np.ndarray:
        at = int(self._meta[KIND_NUMBER[kind], jit.CHILD_AT])
        return units[self._state.child[at + units, jit.STATE] == jit.S_USED].astype(np.int32)

    def live_bytes_by_huge(self) -> np.ndarray:
        """Allocated bytes int64 [n_huge] in each huge page."""
        total = np.zeros(self.n_huge, np.int64)
        for kind in PAGE_KINDS:
            n = self.per_huge(kind)
            if n:
                at = int(self._meta[KIND_NUMBER[kind], jit.CHILD_AT])
                states = self._state.child[at : at + n * self.n_huge, jit.STATE]
                total += (states == jit.S_USED).reshape(self.n_huge, n).sum(axis=1) * self.unit_bytes(kind)
        return total

    def split_kind(self) -> np.ndarray:
        """int8 [n_huge]: the L2 kind (KIND_NUMBER) that each huge page is split into, 0 = none."""
        kinds = np.zeros(self.n_huge, np.int8)
        for k in (jit.EXPERT, jit.SSM, jit.SLAB):
            if self._meta[k, jit.N_CHILD]:
                kinds[self.fill_levels(KIND_NAME[k])[: self.n_huge] > 0] = k
        return kinds

    def fill_levels(self, kind: str) -> np.ndarray:
        """Used children int32 [parents] in each parent of a kind; 0 where it is not split into the kind."""
        at, n = self._meta[KIND_NUMBER[kind], [jit.PARENT_AT, jit.N_PARENTS]]
        return self._state.parent[at : at + n, jit.P_USED]

    def isolate(self, kind: str, pages: Ids) -> None:
        """Pages ("huge", or an L2 kind's pages that are split) offer nothing any more; what is in them stays."""
        jit.set_attached(self._state, KIND_NUMBER[kind], np.ascontiguousarray(pages, np.int32), False)

    def rejoin(self, kind: str, pages: Ids) -> None:
        """End of `isolate`: free huge pages return to the pool, partly used pages offer their rest again."""
        jit.set_attached(self._state, KIND_NUMBER[kind], np.ascontiguousarray(pages, np.int32), True)

    def commit_move(self, kind: str, sources: Ids) -> None:
        """Contents have been copied and tables flipped: the reserved targets live on, the sources are given back."""
        self.free(kind, sources)

    def grow(self, n_huge: int) -> None:
        """Add huge pages at the end, up to n_huge in all; their memory must be there."""
        if not self.n_huge <= n_huge <= self.max_huge:
            raise AuditError(f"cannot grow from {self.n_huge} to {n_huge} huge pages (at most {self.max_huge})")
        new = np.arange(self.n_huge, n_huge)
        is_low = 2 * new < self.max_huge  # goes to the front of the ring of free pages: the lowest last, to be first
        self.rejoin("huge", np.concatenate([new[is_low][::-1], new[~is_low]]))
        self.n_huge = n_huge

    def shrink(self, n_huge: int) -> None:
        """Remove huge pages at the end, which must be isolated and empty (see compaction.plan_shrink)."""
        if not 0 <= n_huge <= self.n_huge:
            raise AuditError(f"cannot shrink from {self.n_huge} to {n_huge} huge pages")
        tail = np.arange(n_huge, self.n_huge)
        in_use = self._state.child[tail, jit.STATE] != jit.S_HELD
        if in_use.any():
            raise AuditError(f"{int(in_use.sum())} of the {tail.size} huge pages to remove are still in use")
        self.n_huge = n_huge

    def audit(self) -> None:
        """Recount everything; AuditError with the numbers where two structures disagree."""
        fault, kind, number = audit_state(self._state, self.n_huge)
        if fault:
            raise AuditError(f"page allocator, {KIND_NAME[kind]} pages: {FAULTS[fault]} (at or counted {number})")
