"""StateCache: SSM and convolution states of sequences, and snapshots of them for prefix reuse.

A sequence holds one SSM page per recurrent layer and one run of conv pages per convolution layer from its first step
on. A recurrent state is worth something only at the exact token count at which it was saved, so a snapshot stands for
exactly one prefix: finished units (by their hash) plus the token ids after them. It holds

    one SSM page per layer | one conv run per layer | per KV group, copies of the pages after the last finished unit

The KV pages of the finished units stay in the prefix index: as long as a snapshot stands on them, and no longer; it is
dropped when they are forgotten. Where snapshots live, and which one gives way, is memory/snapshots.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind, PoolLayout
from rimuru.memory.views import ConvView, SequenceView, SSMView

StatePages = dict[PageKind, np.ndarray]
ORDER: tuple[PageKind, ...] = ("ssm", "conv", "kv")
"""Kinds in the order in which a request's pages are taken: the largest first."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """States after exactly n_tokens tokens. pages: "ssm" int32 [layers], "conv" first ids [layers], "kv" [copies]."""

    unit_hash: bytes
    units: tuple[bytes, ...]
    """Hashes of the prefixes that end with each finished unit; the last one is unit_hash."""
    tail: tuple[int, ...]
    n_tokens: int
    pages: StatePages
    """Empty where the bytes are in host memory."""
    n_users: int = 0
    """Sequences that will still copy from it."""
    host_slot: int | None = None


def allocate_all(pool: PagePool, needs: dict[PageKind, int], owner: int) -> StatePages | None:
    """Pages of several kinds, the largest first: all of them or none."""
    pages: StatePages = {}
    for kind in ORDER:
        if kind in needs:
            ids = pool.allocate(kind, needs[kind], owner)
            if ids is None:
                free_all(pool, pages)
                return None
            pages[kind] = ids
    return pages


def free_all(pool: PagePool, pages: StatePages) -> None:
    """Give pages of several kinds back."""
    for kind, ids in pages.items():
        pool.free(kind, ids)


class StateCache:
    """State pages per sequence slot."""

    def __init__(self, pool: PagePool, layout: PoolLayout) -> None:
        self.pool = pool
        self.views: dict[PageKind, SequenceView] = {}
        if layout.ssm is not None and layout.ssm.layers:
            self.views["ssm"] = SSMView(pool, layout.ssm)
        if layout.conv is not None and layout.conv.layers:
            self.views["conv"] = ConvView(pool, layout.conv)
        self.needs: dict[PageKind, int] = {kind: view.ids.shape[1] for kind, view in self.views.items()}
        """Ids that a sequence needs, by kind."""

    def __bool__(self) -> bool:
        return bool(self.views)

    def open(self, slot: int) -> None:
        """Make room for a slot, without pages."""
        for view in self.views.values():
            view.reserve(slot + 1, 1)
            view.clear(slot)

    def enter(self, slot: int, pages: StatePages) -> None:
        """The slot's states live in these pages from now on."""
        for kind, view in self.views.items():
            view.ids[slot] = pages[kind]

    def pages(self, slot: int) -> StatePages:
        """The slot's ids per kind; only where it has pages."""
        return {kind: view.ids[slot].copy() for kind, view in self.views.items() if view.ids[slot, 0] >= 0}

    def release(self, slot: int, free: bool = True) -> None:
        """Free the slot's pages, or (free=False) leave them to whoever took them over."""
        for kind, ids in self.pages(slot).items():
            if free:
                self.pool.free(kind, ids)
        for view in self.views.values():
            view.clear(slot)

    def copy(self, sources: StatePages, targets: StatePages) -> None:
        """Copy pages of any kind, and wait: the next step may read the targets."""
        copier = self.pool.copier
        if copier is None:
            raise AuditError("states cannot be copied: the pool has no copier")
        try:
            for kind, ids in sources.items():
                n_bytes = self.pool.allocator.unit_bytes(kind)
                pairs = zip(self.pool.addresses(kind, targets[kind]), self.pool.addresses(kind, ids), strict=True)
                for target, source in pairs:
                    copier.copy_within(int(target), int(source), n_bytes)
        finally:
            copier.wait()

    def flip(self, kind: PageKind, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages."""
        self.views[kind].flip(sources, targets)


class SnapshotIndex:
    """All snapshots, findable by prefix, least recently used first."""

    def __init__(self) -> None:
        self._by_unit: dict[bytes, list[Snapshot]] = {}
        self._order: OrderedDict[int, Snapshot] = OrderedDict()
        self._doomed: dict[int, Snapshot] = {}
        self._standing: Counter[bytes] = Counter()
        """How many snapshots stand on the units up to a hash."""
        self.on_useless: Callable[[list[bytes]], None] | None = None
        """Told the hashes of prefixes that no snapshot stands on any more."""

    def __len__(self) -> int:
        return len(self._order)

    def all(self) -> list[Snapshot]:
        """Every snapshot that holds pages, forgotten ones with users included."""
        return [*self._order.values(), *self._doomed.values()]

    def find(self, unit_hash: bytes, tail: Sequence[int], longest: int) -> Snapshot | None:
        """The longest snapshot after these units whose further tokens begin `tail`, of at most `longest` tokens."""
        best: Snapshot | None = None
        for snapshot in self._by_unit.get(unit_hash, ()):
            n = len(snapshot.tail)
            longer = best is None or n > len(best.tail)
            if longer and n <= longest and snapshot.tail == tuple(tail[:n]):
                best = snapshot
        return best

    def add(self, snapshot: Snapshot) -> None:
        """Make a snapshot findable, as the most recently used one."""
        self._by_unit.setdefault(snapshot.unit_hash, []).append(snapshot)
        self._standing.update(snapshot.units)
        self._order[id(snapshot)] = snapshot

    def touch(self, snapshot: Snapshot) -> None:
        """It was of use now, if it is still there."""
        if id(snapshot) in self._order:
            self._order.move_to_end(id(snapshot))

    def is_of_use(self, unit_hash: bytes) -> bool:
        """Whether a snapshot stands on the units up to this hash."""
        return unit_hash in self._standing

    def touch_first(self, hashes: list[bytes], tokens: np.ndarray, n_unit: int) -> Snapshot | None:
        """The shortest snapshot on the way was of use too: what many conversations begin with. hashes: of the prefixes
        of 0, 1, .. units."""
        for n_units, unit_hash in enumerate(hashes):
            tail = tokens[n_units * n_unit : (n_units + 1) * n_unit].tolist()
            first = self.find(unit_hash, tail, len(tail))
            if first is not None:
                self.touch(first)
                return first
        return None

    def take(self, snapshot: Snapshot) -> None:
        """A sequence will copy from it."""
        snapshot.n_users += 1
        self.touch(snapshot)

    def drop(self, snapshot: Snapshot) -> Snapshot | None:
        """The sequence has copied (or gave up). The snapshot, where its pages are to be freed now."""
        snapshot.n_users -= 1
        return self._doomed.pop(id(snapshot), None) if snapshot.n_users == 0 else None

    def forget(self, snapshot: Snapshot) -> Snapshot | None:
        """Not findable any more. The snapshot, where its pages are to be freed now; else they are at the last drop."""
        del self._order[id(snapshot)]
        same_unit = self._by_unit[snapshot.unit_hash]
        same_unit.remove(snapshot)
        if not same_unit:
            del self._by_unit[snapshot.unit_hash]
        self._standing.subtract(snapshot.units)
        useless = [unit for unit in snapshot.units if not self._standing[unit]]
        for unit in useless:
            del self._standing[unit]
        if useless and self.on_useless is not None:
            self.on_useless(useless)
        if snapshot.n_users == 0:
            return snapshot
        self._doomed[id(snapshot)] = snapshot
        return None

    def forget_unit(self, unit_hash: bytes) -> list[Snapshot]:
        """A unit's KV pages are gone: snapshots that stand on it go too. Those to be freed now."""
        lost = list(self._by_unit.get(unit_hash, ()))
        if self._standing[unit_hash] > len(lost):
            lost = [snapshot for snapshot in self._order.values() if unit_hash in snapshot.units]
        freed = [self.forget(snapshot) for snapshot in lost]
        return [snapshot for snapshot in freed if snapshot is not None]

    def oldest(self, wanted: Callable[[Snapshot], bool] = lambda snapshot: True) -> Snapshot | None:
        """The least recently used snapshot that nobody is about to copy from, among those that are wanted."""
        return next((s for s in self._order.values() if s.n_users == 0 and wanted(s)), None)

    def unused_pages(self, kind: PageKind) -> int:
        """Ids of a kind that forgetting all unused snapshots would free."""
        return sum(s.pages[kind].size for s in self._order.values() if s.n_users == 0 and kind in s.pages)

    def flip(self, kind: PageKind, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages."""
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for snapshot in self.all():
            if kind in snapshot.pages:
                ids = snapshot.pages[kind].tolist()
                snapshot.pages[kind] = np.array([moved.get(page, page) for page in ids], np.int32)
