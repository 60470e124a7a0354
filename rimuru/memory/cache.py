"""SequenceCache: all that the scheduler knows of memory. KV pages, states and prefixes of every open sequence.

    open -> (can_extend -> extend -> step -> commit)* -> release

`extend` makes room for a step's tokens, `commit` says that they were written; every way out is `release`, once. Pages
that only serve prefix reuse are given up when `extend` needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.kv_cache import KvCache
from rimuru.memory.open_sequence import CacheHit, OpenSequence
from rimuru.memory.page_pool import PagePool
from rimuru.memory.snapshots import MakePages, SnapshotStore
from rimuru.memory.specs import PageKind, PoolLayout
from rimuru.memory.state_cache import ORDER, Snapshot, StateCache, StatePages, allocate_all, free_all
from rimuru.memory.swap import PageSwap, SavedSequence

SeqId = Hashable


class SequenceCache:
    """Memory of the open sequences of one model in one pool."""

    def __init__(
        self,
        pool: PagePool,
        layout: PoolLayout,
        prefix_cache: bool = True,
        snapshots: bool = True,
        salt: bytes = b"",
        host_bytes: int = 0,
        swap_bytes: int = 0,
    ) -> None:
        """salt: names model and KV type, so that hashes never meet. snapshots: of states, where there are any.
        host_bytes: of host memory, for snapshots that leave the pool; swap_bytes: for sequences that give way."""
        self.pool = pool
        self.states = StateCache(pool, layout)
        copies = pool.copier is not None and layout.kv is not None
        self.takes_snapshots = bool(self.states) and prefix_cache and snapshots and copies
        self._prefix_cache = prefix_cache and (not self.states or self.takes_snapshots)
        self.kv = None if layout.kv is None else KvCache(pool, layout.kv, self._prefix_cache, salt)
        self._open: dict[SeqId, OpenSequence] = {}
        self._slots: dict[SeqId, int] = {}
        self._free_slots: list[int] = []
        self.swap = PageSwap(pool, self.kv, swap_bytes)
        self.snapshots = SnapshotStore(pool, self.states, self.kv, host_bytes)
        self.make_pages: MakePages | None = None
        """Set by who can move pages and knows what else the pool holds (engine/room.py)."""

    # ---- questions
    def __len__(self) -> int:
        return len(self._open)

    def n_tokens(self, seq_id: SeqId) -> int:
        """Committed tokens of a sequence."""
        return self._open[seq_id].n_tokens

    def pages_needed(self, seq_id: SeqId, n_tokens: int) -> dict[PageKind, int]:
        """Ids to allocate, by kind, for n_tokens tokens after the committed ones (conv: runs)."""
        seq = self._open[seq_id]
        needs: dict[PageKind, int] = {}
        if not seq.has_states:
            needs.update(self.states.needs)
        if self.kv is not None and seq.kv is not None:
            needs["kv"] = self.kv.pages_needed(seq.kv, self._kv_tokens(seq, n_tokens))
        return needs

    def peak_pages(self, n_tokens: int, n_step_tokens: int) -> dict[PageKind, int]:
        """Ids by kind that a sequence of n_tokens holds at most, written at most n_step_tokens at a time."""
        needs = dict(self.states.needs)
        if self.kv is not None:
            needs["kv"] = self.kv.layout.peak_pages(n_tokens, n_step_tokens)
        return needs

    def fits_alone(self, n_tokens: int, n_step_tokens: int) -> bool:
        """True where such a sequence fits once all but the loading buffers have left the pool, experts included."""
        needs = self.peak_pages(n_tokens, n_step_tokens) | {"expert": self.pool.n_buffer_pages}
        return self.pool.allocator.huge_needed(needs) <= self.pool.allocator.n_huge

    def can_extend(self, seq_id: SeqId, n_tokens: int) -> bool:
        """True where `extend` would succeed; may give up unused prefixes, as `extend` would."""
        needs = self.pages_needed(seq_id, n_tokens)
        pages = self._reserve(needs, self._slots[seq_id]) if any(needs.values()) else {}
        if pages is None:
            return False
        free_all(self.pool, pages)
        return True

    def free_pages(self, kind: PageKind) -> int:
        """Ids of a kind that could be allocated now, without giving up prefixes."""
        return self.pool.allocator.free_pages(kind)

    @property
    def cached_pages(self) -> int:
        """KV pages that only wait for reuse."""
        return self.reclaimable_pages("kv")

    def reclaimable_pages(self, kind: PageKind) -> int:
        """Ids of a kind that giving up all unused prefixes would free."""
        n = self.snapshots.unused_pages(kind)
        return n + (self.kv.index.n_unused_pages if kind == "kv" and self.kv is not None else 0)

    # ---- a sequence's life
    def open(self, seq_id: SeqId, token_ids: Sequence[int] | np.ndarray) -> CacheHit:
        """Start a sequence with the longest known prefix of its prompt; at least one token is left to compute."""
        if seq_id in self._open:
            raise AuditError(f"sequence {seq_id} is open already")
        slot = self._free_slots.pop() if self._free_slots else len(self._open)
        self.states.open(slot)
        seq = OpenSequence(None if self.kv is None else self.kv.open(slot), has_states=not self.states)
        self._open[seq_id] = seq
        self._slots[seq_id] = slot
        saved = self.swap.saved.get(seq_id)
        if saved is not None:  # with the units that the prefix index still knows; the first extend loads the rest
            seq.saved, seq.n_tokens = saved, saved.n_tokens
            if seq.kv is not None:
                seq.saved_ids = self.swap.begin(saved, seq.kv, np.asarray(token_ids, np.int32))
        elif self.kv is not None and self._prefix_cache:
            self._adopt_prefix(seq, np.asarray(token_ids, np.int32))
        return CacheHit(seq.n_tokens)

    def _adopt_prefix(self, seq: OpenSequence, tokens: np.ndarray) -> None:
        assert self.kv is not None and seq.kv is not None
        n_unit = self.kv.n_unit
        most = tokens.size - 1
        found = self.kv.match(tokens, max(0, most) // n_unit)
        hashes = [key for key, _ in found]
        for n_units in range(len(found), -1, -1):
            if n_units and not found[n_units - 1][1]:
                continue
            if not self.states:
                self.kv.adopt(seq.kv, hashes[:n_units])
                break
            before = hashes[n_units - 1] if n_units else self.kv.root
            done = n_units * n_unit
            snapshot = self.snapshots.find(before, tokens[done : done + n_unit].tolist(), most - done)
            if snapshot is not None:
                self.kv.adopt(seq.kv, hashes[:n_units])
                seq.first = self.snapshots.touch_first([self.kv.root, *hashes[:n_units]], tokens, n_unit)
                self.snapshots.take(snapshot)
                seq.restore = snapshot
                seq.n_tokens = snapshot.n_tokens
                return
        seq.n_tokens = seq.kv.n_tokens

    def extend(self, seq_id: SeqId, n_tokens: int) -> bool:
        """Make room for n_tokens tokens after the committed ones, and at first for states. False = nothing changed.

        Asking again before `commit` asks for the same room, not for more.
        """
        seq, slot = self._open[seq_id], self._slots[seq_id]
        has_room = seq.kv is None or seq.n_tokens + n_tokens <= seq.kv.n_room
        needs = {} if has_room and seq.has_states else self.pages_needed(seq_id, n_tokens)
        if not any(needs.values()):
            seq.n_pending = max(seq.n_pending, n_tokens)
            return True
        pages = self._reserve(needs, slot)
        if pages is None:
            return False
        if not seq.has_states:
            self.states.enter(slot, pages)
            seq.has_states = True
        if self.kv is not None and seq.kv is not None:
            self.kv.extend(seq.kv, self._kv_tokens(seq, n_tokens), pages["kv"])
        if seq.restore is not None:
            self._restore(seq, slot, seq.restore)
        if seq.saved is not None:
            self._load(seq_id, seq, seq.saved)
        seq.n_pending = max(seq.n_pending, n_tokens)
        return True

    @staticmethod
    def _kv_tokens(seq: OpenSequence, n_tokens: int) -> int:
        """n_tokens after the committed ones, counted from where the KV tables stand (before a restore: less)."""
        assert seq.kv is not None
        return n_tokens + seq.n_tokens - seq.kv.n_tokens

    def commit(self, seq_id: SeqId, token_ids: Sequence[int] | np.ndarray) -> None:
        """These tokens have been written. Full units become findable; pages that left a window are given back."""
        seq = self._open[seq_id]
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        if self.kv is not None and seq.kv is not None:
            self.kv.commit(seq.kv, ids)
        seq.n_tokens += len(ids)
        seq.n_pending = max(0, seq.n_pending - len(ids))

    def retract(self, seq_id: SeqId) -> None:
        """The step planned by the last `extend` did not run: nothing was written. The pages stay for the next one."""
        self._open[seq_id].n_pending = 0

    def release(self, seq_id: SeqId, keep_prefix: bool = True) -> None:
        """The sequence ends, in whatever way. Its full units stay findable (keep_prefix) until their pages are wanted.

        States stay as a snapshot at its last token, unless a step may be writing to them.
        """
        self._close(seq_id, keep_prefix, keep_states=keep_prefix)

    def _close(self, seq_id: SeqId, keep_prefix: bool, keep_states: bool) -> None:
        if seq_id not in self._open:
            raise AuditError(f"sequence {seq_id} is released but not open (or released twice)")
        seq, slot = self._open.pop(seq_id), self._slots.pop(seq_id)
        if seq.restore is not None:
            self.snapshots.release(self.snapshots.drop(seq.restore))
        gift = keep_states and seq.n_pending == 0 and self._donate(seq, slot)
        self.states.release(slot, free=not gift)
        if self.kv is not None and seq.kv is not None:
            self.kv.release(seq.kv, keep_prefix)
        self._free_slots.append(slot)

    # ---- host memory for those who give way
    def swap_seconds(self, seq_id: SeqId) -> float:
        """Forecast of moving to host memory, and back, what only this sequence uses; infinite where it cannot."""
        seq = self._open[seq_id]
        return self.swap.seconds(seq.kv, self.states.pages(self._slots[seq_id])) if self._may_swap(seq) else math.inf

    def n_lost_tokens(self, seq_id: SeqId) -> int:
        """Committed tokens that would have to be run again if what only this sequence uses were gone."""
        seq = self._open[seq_id]
        shared = 0 if self.kv is None or seq.kv is None else self.kv.n_shared_tokens(seq.kv)
        return max(0, seq.n_tokens - shared)

    def _may_swap(self, seq: OpenSequence) -> bool:
        return seq.n_tokens > 0 and seq.has_states and seq.saved is None and self.swap.limit_bytes > 0

    def swap_out(self, seq_id: SeqId) -> bool:
        """Release a sequence, with what it has written moved to host memory: the next `open` of the same id goes on
        from there. False where there is no room, and nothing changed. No step may be writing to it."""
        seq = self._open[seq_id]
        pages = self.states.pages(self._slots[seq_id])
        if not self._may_swap(seq) or not self.swap.save(seq_id, seq.kv, pages, seq.n_tokens):
            return False
        self._close(seq_id, keep_prefix=True, keep_states=False)
        return True

    def forget(self, seq_id: SeqId) -> None:
        """A sequence will not be opened again: what was saved of it goes."""
        self.swap.forget(seq_id)

    def _load(self, seq_id: SeqId, seq: OpenSequence, saved: SavedSequence) -> None:
        """Copy what was saved into the sequence's new pages; its finished units become findable again."""
        self.swap.load(saved, seq.kv, self.states.pages(self._slots[seq_id]), seq.saved_ids)
        seq.saved, seq.saved_ids = None, []
        self.swap.forget(seq_id)

    # ---- snapshots of states
    def snapshot(self, seq_id: SeqId) -> bool:
        """Save the states at the committed token count for reuse. False where there is no room, or none to save.

        Call between steps, at places where conversations branch.
        """
        seq, slot = self._open[seq_id], self._slots[seq_id]
        if not self.takes_snapshots or seq.n_pending or not seq.n_tokens or not seq.has_states:
            return False
        if self._known_snapshot(seq):
            return True
        assert seq.kv is not None
        kept = self.snapshots.save(seq.kv, lambda: self.states.pages(slot) | self._tail_pages(seq), self.make_pages)
        self._touch_first(seq, kept)
        return kept is not None

    def _touch_first(self, seq: OpenSequence, kept: Snapshot | None) -> None:
        """What the sequence began with is of use, other conversations may begin with it too; it is worth more than the
        states in between, which later ones of this sequence replace."""
        seq.first = kept if seq.first is None else seq.first
        if seq.first is not None:
            self.snapshots.touch(seq.first)

    def _known_snapshot(self, seq: OpenSequence) -> bool:
        """True, and touched, where a snapshot of exactly this prefix exists."""
        assert seq.kv is not None
        tail = seq.kv.unit_tail
        known = self.snapshots.find(seq.kv.hash, tail, len(tail))
        if known is None or len(known.tail) != len(tail):
            return False
        self.snapshots.touch(known)
        return True

    def _tail_pages(self, seq: OpenSequence, leave: bool = False) -> StatePages:
        """The KV pages after the last finished unit that hold tokens, all groups one after the other.

        leave: they leave the sequence.
        """
        assert self.kv is not None and seq.kv is not None
        parts = []
        for g, group in enumerate(self.kv.layout.groups):
            start = len(seq.kv.blocks[g]) * self.kv.unit_columns[g]
            stop = -(-seq.kv.n_tokens // group.page_tokens)
            row = self.kv.view.groups[g].ids[seq.kv.slot, start:stop]
            parts.append(row[row >= 0])
            if leave:
                row[:] = -1
        return {"kv": np.concatenate(parts)}

    def _donate(self, seq: OpenSequence, slot: int) -> bool:
        """Turn a finished sequence's states into a snapshot without copying them. True = they are the snapshot's."""
        if not self.takes_snapshots or not seq.n_tokens or not seq.has_states:
            return False
        if self._known_snapshot(seq):
            return False
        assert seq.kv is not None
        pages = self.states.pages(slot) | self._tail_pages(seq, leave=True)
        for kind, ids in pages.items():
            self.pool.allocator.set_owners(kind, ids, -1)
        self._touch_first(seq, self.snapshots.keep(seq.kv, pages))
        return True

    def _restore(self, seq: OpenSequence, slot: int, snapshot: Snapshot) -> None:
        """Copy a snapshot's states and its KV pages after the last finished unit into the sequence's own pages."""
        assert self.kv is not None and seq.kv is not None
        self.kv.commit(seq.kv, list(snapshot.tail))
        targets = self.states.pages(slot) | self._tail_pages(seq)
        self.snapshots.copy_to(snapshot, targets)
        seq.restore = None
        self.snapshots.release(self.snapshots.drop(snapshot))

    # ---- pages under pressure
    def _reserve(self, needs: dict[PageKind, int], owner: int) -> StatePages | None:
        """All of the pages, giving up unused prefixes where needed; None, and no prefix lost, where hopeless."""
        pages = allocate_all(self.pool, needs, owner)
        while pages is None and self._lacks_states(needs) and self.snapshots.retire():
            pages = allocate_all(self.pool, needs, owner)
        if pages is not None:
            return pages
        allocator = self.pool.allocator
        free_bytes = self.pool.total_bytes - sum(allocator.bytes_in_use(kind) for kind in ("expert", *ORDER))
        gain_bytes, share_bytes = self._unused_bytes(), self.snapshots.prefix_share_bytes
        make_pages = self.make_pages if self.states else None  # their pages are large, and long prefixes hang on them
        is_worth = 0 < gain_bytes <= share_bytes
        if make_pages is not None and make_pages(needs, is_worth):
            return allocate_all(self.pool, needs, owner)
        if make_pages is not None and self.pool.moves.is_waiting:  # the next step goes on
            return None
        if sum(n * allocator.unit_bytes(kind) for kind, n in needs.items()) > free_bytes + gain_bytes:
            return None
        if needs.keys() == {"kv"} and not self.states and needs["kv"] > self.free_pages("kv") + self.cached_pages:
            return None
        asks_again = make_pages is not None and not is_worth and self.snapshots.are_few
        n_extra = 1
        while pages is None:
            # where experts may go first soon, one by one
            n_short = n_extra if asks_again else max(n_extra, needs.get("kv", 0) - self.free_pages("kv"))
            if not self.evict_prefix(n_short, states_first=self._lacks_states(needs)):
                return None
            n_extra *= 2  # what lacks may be a whole larger page: give up faster and faster
            pages = allocate_all(self.pool, needs, owner)
            if pages is None and asks_again and 0 < self._unused_bytes() <= share_bytes:
                asks_again = False
                if make_pages is not None and make_pages(needs, True):
                    return allocate_all(self.pool, needs, owner)
        return pages

    def _unused_bytes(self) -> int:
        """Bytes that giving up all unused prefixes would free."""
        allocator = self.pool.allocator
        return sum(self.reclaimable_pages(kind) * allocator.unit_bytes(kind) for kind in ORDER if allocator.has(kind))

    def _lacks_states(self, needs: dict[PageKind, int]) -> bool:
        return any(needs[kind] > self.free_pages(kind) for kind in needs if kind != "kv")

    def evict_prefix(self, n_pages: int, states_first: bool = False) -> int:
        """Give up unused prefixes, the oldest first, until n_pages KV pages (or one snapshot) are free; ids freed."""
        if not states_first and self.kv is not None:
            n_freed = self.kv.evict(n_pages)
            if n_freed:
                return n_freed
        n_freed = self.snapshots.evict()
        return self.kv.evict(n_pages) if n_freed == 0 and states_first and self.kv is not None else n_freed

    # ---- one step's tables
    def max_blocks(self, seq_ids: Sequence[SeqId]) -> int:
        """Columns that Batch.kv_pages needs for these sequences."""
        columns = [max(seq.kv.n_columns) for seq in map(self._open.__getitem__, seq_ids) if seq.kv is not None]
        return max(columns, default=0)

    def fill_batch(
        self,
        seq_ids: Sequence[SeqId],
        kv_pages_out: np.ndarray,
        ssm_out: np.ndarray,
        conv_out: np.ndarray,
        fresh_out: np.ndarray,
    ) -> None:
        """Write the sequences' rows of a Batch: kv_pages [G, S, B], ssm_pages and conv_pages [S, layers], fresh [S]."""
        slots = np.array([self._slots[seq_id] for seq_id in seq_ids], np.int64)
        if self.kv is not None:
            if kv_pages_out.shape[2] < self.max_blocks(seq_ids):
                raise AuditError(f"kv_pages has {kv_pages_out.shape[2]} columns, {self.max_blocks(seq_ids)} are needed")
            self.kv.view.write_rows(slots, kv_pages_out)
        for kind, out in (("ssm", ssm_out), ("conv", conv_out)):
            if kind in self.states.views:
                out[:] = self.states.views[kind].ids[slots]  # type: ignore[index]
        fresh_out[:] = [self._open[seq_id].n_tokens == 0 for seq_id in seq_ids]

    # ---- moves, reports
    def flip(self, kind: PageKind, sources: np.ndarray, targets: np.ndarray) -> None:
        """Pages of a kind have been moved: every table that names a source now names its target."""
        if kind == "kv" and self.kv is not None:
            self.kv.flip(sources, targets)
        elif kind in self.states.views:
            self.states.flip(kind, sources, targets)
        self.snapshots.flip(kind, sources, targets)

    def flips(self) -> dict[PageKind, Callable[[np.ndarray, np.ndarray], None]]:
        """`flip` per kind, as compaction.execute wants it (the expert view brings its own)."""
        return {kind: partial(self.flip, kind) for kind in ORDER}

    def requests(self) -> list[dict[str, Any]]:
        """For reports: id, tokens, pages (ids of all kinds, shared ones included) and pages_by_kind."""
        rows = []
        for seq_id, seq in self._open.items():
            by_kind: dict[str, int] = {
                kind: ids.size * self.pool.allocator.unit_pages(kind)
                for kind, ids in self.states.pages(self._slots[seq_id]).items()
            }
            if self.kv is not None and seq.kv is not None:
                by_kind["kv"] = self.kv.n_pages(seq.kv)
            rows.append(
                {"id": seq_id, "tokens": seq.n_tokens, "pages": sum(by_kind.values()), "pages_by_kind": by_kind}
            )
        return rows

    def audit(self) -> None:
        """Every state and KV page in use is held exactly once: by a sequence, a block or a snapshot."""
        self.swap.audit()
        if len(set(self._slots.values()) | set(self._free_slots)) != len(self._open) + len(self._free_slots):
            raise AuditError("two sequences share a slot")
        self.snapshots.audit()
        held: dict[str, list[np.ndarray]] = {kind: [np.empty(0, np.int32)] for kind in ORDER}
        for snapshot in self.snapshots.all():
            for kind, ids in snapshot.pages.items():
                held[kind].append(ids)
        for slot in self._slots.values():
            for kind, ids in self.states.pages(slot).items():
                held[kind].append(ids)
        if self.kv is not None:
            held["kv"].append(self.kv.audit([seq.kv for seq in self._open.values() if seq.kv is not None]))
        for kind in ORDER:
            ids = np.concatenate(held[kind])
            if np.unique(ids).size != ids.size:
                raise AuditError(f"{ids.size - np.unique(ids).size} {kind} pages are held twice")
            if ids.size != self.pool.allocator.pages_in_use(kind):
                raise AuditError(f"{self.pool.allocator.pages_in_use(kind)} {kind} pages are in use, {ids.size} held")
