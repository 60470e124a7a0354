"""Snapshots of states: where their bytes are, and who has to go.

    pool pages  --evict-->  host memory (bounded)  --the oldest--> forgotten
        ^--- a sequence that starts from one gets a copy in its own pages, from wherever it is

A snapshot's KV pages after the last finished unit go with it, and so do those of the finished units that no other
snapshot stands on: without a state they are of no use. Where these have to go first, the snapshot is forgotten. Least
recently used ones leave first, at both places; what a conversation began with counts as used whenever it goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from rimuru.base.errors import AuditError, LostPagesError
from rimuru.memory.kv_cache import KvCache, KvSequence
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind
from rimuru.memory.state_cache import Snapshot, SnapshotIndex, StateCache, StatePages, allocate_all, free_all

log = logging.getLogger(__name__)

MakePages = Callable[[dict[PageKind, int], bool], bool]
"""make_pages(needs, is_worth_experts): free so many ids of each kind by moving pages, and from experts if that is worth
it. False where that leads nowhere."""
SHARE = 1 / 16
"""Of the pool: what snapshots may take from experts. Beyond it the oldest snapshot gives way."""
FEWEST, FEWEST_SHARE = 2, 1 / 8
"""So many snapshots may do so in a pool of which they are more than SHARE, up to a larger share: a conversation needs
the states of its system prompt and of its last turn, or all of it is run again at every turn."""
PREFIX_SHARE = 1 / 8
"""Of the pool: unused prefixes of models with states are worth more than experts up to here, or up to twice what their
snapshots may take."""


class HostStates:
    """Host memory for states that left the pool: equal slots, each holds the pages of one snapshot one after another.

    | ssm pages | conv runs | kv pages |
    """

    def __init__(self, pool: PagePool, slot_bytes: int, limit_bytes: int) -> None:
        """limit_bytes: most that all slots take; memory is taken as slots are first used, and kept."""
        self.pool, self.slot_bytes = pool, slot_bytes
        self.n_slots = limit_bytes // slot_bytes if slot_bytes else 0
        self._memory: list[np.ndarray] = []
        self._free: list[int] = []

    @property
    def n_used(self) -> int:
        return len(self._memory) - len(self._free)

    @property
    def is_full(self) -> bool:
        return self.n_used == self.n_slots

    def save(self, pages: StatePages) -> int | None:
        """Copy pages out and wait; the slot that holds them, None where all are taken or a copy fails."""
        copier = self.pool.copier
        if copier is None or self.is_full:
            return None
        if not self._free:
            self._memory.append(copier.alloc_host(self.slot_bytes))
            self._free.append(len(self._memory) - 1)
        slot = self._free.pop()
        try:
            for address, part in self._parts(slot, pages):
                copier.copy_out(part, address)
        except Exception as error:
            log.warning("states were not moved to host memory: %s", error)
            copier.wait()
            self.free(slot)
            return None
        copier.wait()
        return slot

    def load(self, slot: int, targets: StatePages) -> None:
        """Copy a slot into pages, as many of each kind as were saved, and wait."""
        copier = self.pool.copier
        assert copier is not None
        try:
            for address, part in self._parts(slot, targets):
                copier.copy_in(address, part)
        finally:
            copier.wait()

    def free(self, slot: int) -> None:
        """The slot's content is not needed any more."""
        self._free.append(slot)

    def _parts(self, slot: int, pages: StatePages) -> list[tuple[int, np.ndarray]]:
        """(address of a page, its place in the slot)."""
        parts, at = [], 0
        for kind, ids in pages.items():
            n_bytes = self.pool.allocator.unit_bytes(kind)
            for address in self.pool.addresses(kind, ids).tolist():
                parts.append((address, self._memory[slot][at : at + n_bytes]))
                at += n_bytes
        if at > self.slot_bytes:
            raise AuditError(f"states of {at} bytes do not fit in a host slot of {self.slot_bytes} bytes")
        return parts


class SnapshotStore(SnapshotIndex):
    """The index, and the pages or host slots of what is in it."""

    def __init__(self, pool: PagePool, states: StateCache, kv: KvCache | None, host_bytes: int) -> None:
        """host_bytes: host memory that snapshots may take, 0 = none."""
        super().__init__()
        self.pool, self.states, self.kv = pool, states, kv
        needs = dict(states.needs)
        if kv is not None:
            needs["kv"] = sum(kv.unit_columns)
        self.slot_bytes = sum(n * pool.allocator.unit_bytes(kind) for kind, n in needs.items())
        """Of the largest snapshot."""
        self.host = HostStates(pool, self.slot_bytes, host_bytes)
        if kv is not None and states:
            kv.on_evict, kv.is_of_use, self.on_useless = self._lose_unit, self.is_of_use, kv.forget_units

    def save(
        self,
        sequence: KvSequence,
        sources: Callable[[], StatePages],
        make_pages: MakePages | None,
    ) -> Snapshot | None:
        """Copy the source pages into a new snapshot of what a sequence has written: into free pages, else into host
        memory, else into pages that experts give up (make_pages; moves pages, so that the sources are asked for again),
        else into those of the oldest snapshots. None where nothing of that is possible."""
        pages = sources()
        needs = {kind: ids.size for kind, ids in pages.items()}
        targets = allocate_all(self.pool, needs, -1)
        slot = None
        if targets is None and self.host.n_slots:
            if self.host.is_full:
                self._forget_oldest_on_host()
            slot = self.host.save(pages)
        if targets is None and slot is None and make_pages is not None and make_pages(needs, self._may_grow()):
            targets = allocate_all(self.pool, needs, -1)
            pages = sources()
        while targets is None and slot is None:
            if not self.evict():
                return None
            targets = allocate_all(self.pool, needs, -1)
        if targets is not None:
            try:
                self.states.copy(pages, targets)
            except Exception as error:
                log.warning("states are not kept: %s", error)
                free_all(self.pool, targets)
                return None
        return self.keep(sequence, targets or {}, slot)

    def keep(self, sequence: KvSequence, pages: StatePages, host_slot: int | None = None) -> Snapshot:
        """Make states of what a sequence has written findable; their pages, or their slot, are the snapshot's now."""
        assert self.kv is not None
        self.kv.register_again(sequence)
        snapshot = Snapshot(
            sequence.hash,
            tuple(sequence.hashes),
            tuple(sequence.unit_tail),
            sequence.n_tokens,
            pages,
            host_slot=host_slot,
        )
        self.add(snapshot)
        return snapshot

    @property
    def share_bytes(self) -> float:
        """What snapshots may take from experts."""
        total_bytes = self.pool.total_bytes
        return max(SHARE * total_bytes, min(FEWEST * self.slot_bytes, FEWEST_SHARE * total_bytes))

    @property
    def are_few(self) -> bool:
        """Whether the pool is so small that SHARE of it holds less than the snapshots of one conversation."""
        return self.share_bytes > SHARE * self.pool.total_bytes

    @property
    def prefix_share_bytes(self) -> float:
        """What unused prefixes, snapshots included, may keep from experts."""
        return max(PREFIX_SHARE * self.pool.total_bytes, 2 * self.share_bytes)

    def _may_grow(self) -> bool:
        allocator = self.pool.allocator
        held_bytes = sum(ids.size * allocator.unit_bytes(kind) for s in self.all() for kind, ids in s.pages.items())
        return held_bytes + self.slot_bytes <= self.share_bytes

    def evict(self) -> int:
        """The least recently used snapshot in the pool that nobody is about to copy from leaves it, for host memory
        where it finds room there. Ids that became free."""
        snapshot = self.oldest(lambda s: bool(s.pages))
        if snapshot is None:
            return 0
        n_freed = sum(ids.size for ids in snapshot.pages.values())
        if self.host.is_full and self.oldest() is not snapshot:
            self._forget_oldest_on_host()
        snapshot.host_slot = self.host.save(snapshot.pages)
        if snapshot.host_slot is None:
            self.release(self.forget(snapshot))
        else:
            free_all(self.pool, snapshot.pages)
            snapshot.pages = {}
        return n_freed

    def retire(self) -> int:
        """`evict`, only where host memory has room and nothing is lost by it."""
        return 0 if self.host.is_full else self.evict()

    def _forget_oldest_on_host(self) -> None:
        oldest = self.oldest(lambda s: s.host_slot is not None)
        if oldest is not None:
            self.release(self.forget(oldest))

    def copy_to(self, snapshot: Snapshot, targets: StatePages) -> None:
        """Fill a sequence's pages with the snapshot's states, and wait. Where that fails: LostPagesError, and nobody
        finds the snapshot any more."""
        try:
            if snapshot.host_slot is None:
                self.states.copy(snapshot.pages, targets)
            else:
                self.host.load(snapshot.host_slot, targets)
        except Exception as error:
            if any(known is snapshot for known in self._order.values()):
                self.release(self.forget(snapshot))
            raise LostPagesError(f"kept states are lost, the prompt is run from its beginning: {error}") from error

    def release(self, snapshot: Snapshot | None) -> None:
        """Give back what a forgotten snapshot holds (None: what `drop` and `forget` say where it is still needed)."""
        if snapshot is None:
            return
        free_all(self.pool, snapshot.pages)
        snapshot.pages = {}
        if snapshot.host_slot is not None:
            self.host.free(snapshot.host_slot)
            snapshot.host_slot = None

    def _lose_unit(self, unit_hash: bytes) -> None:
        """The KV pages of a unit are gone, and with them all snapshots that stand on it."""
        for snapshot in self.forget_unit(unit_hash):
            self.release(snapshot)

    def audit(self) -> None:
        """Every snapshot is at one place, every host slot in use is one snapshot's; the units below them are there."""
        slots = [s.host_slot for s in self.all() if s.host_slot is not None]
        if len(set(slots)) != len(slots) or len(slots) != self.host.n_used:
            raise AuditError(f"{self.host.n_used} host slots are in use, snapshots hold {sorted(slots)}")
        if any((s.host_slot is None) != bool(s.pages) for s in self.all()):
            raise AuditError("a snapshot has both pages and a host slot, or neither")
        units = Counter(unit for s in self._order.values() for unit in s.units)
        if units != self._standing:
            raise AuditError(f"snapshots stand on {len(units)} units, {len(self._standing)} are counted")
        if self.kv is not None and not self.kv.knows_units(list(units)):
            raise AuditError("a snapshot stands on units whose KV pages are gone")
