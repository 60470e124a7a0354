"""Pages in host memory: what sequences that gave way had written, until they run again.

    pool page  --copy_out-->  slot of host memory  --copy_in-->  another pool page

A saved sequence holds a slot for every KV page that its next token sees, and for its states. KV pages of finished
units are saved once for all sequences that share them, under the key by which the prefix index knows them. Memory is
taken from the copier in chunks as it is needed, up to a limit, and used again; a chunk serves one kind of page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.base.errors import AuditError, LostPagesError
from rimuru.base.units import ceil_div
from rimuru.memory.kv_cache import KvCache, KvSequence
from rimuru.memory.page_pool import PagePool
from rimuru.memory.prefix import Key
from rimuru.memory.specs import PageKind
from rimuru.memory.state_cache import StatePages

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 << 20
FIRST_BYTES_PER_S = 8e9
"""Rate of the link that is taken for granted until copies have been timed."""
_SMOOTHING = 0.3
_NO_PAGES = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class SavedSequence:
    """Where the content of one sequence lies. Slots int32."""

    n_tokens: int
    columns: list[np.ndarray]
    """Per KV group the slot of each column; -1 = no later token sees it."""
    own: np.ndarray
    """KV slots that serve this sequence alone."""
    units: list[Key]
    """Finished units whose slots it shares."""
    states: StatePages


@dataclass(slots=True, eq=False)
class _Unit:
    slots: np.ndarray
    """Per column of the unit; -1 where a window had passed."""
    n_users: int = 0


class HostSlots:
    """Slots of host memory, each as large as one unit of its kind of page."""

    def __init__(self, pool: PagePool, limit_bytes: int) -> None:
        self.pool, self.limit_bytes = pool, limit_bytes
        self.taken_bytes = 0
        """Host memory taken from the copier so far; it is never given back before the end."""
        self._rows: dict[PageKind, list[np.ndarray]] = {}
        self._free: dict[PageKind, list[int]] = {}

    def n_used(self, kind: PageKind) -> int:
        return len(self._rows.get(kind, ())) - len(self._free.get(kind, ()))

    def row(self, kind: PageKind, slot: int) -> np.ndarray:
        """uint8 [bytes of one unit]: the slot's memory."""
        return self._rows[kind][slot]

    def has_room(self, needs: dict[PageKind, int]) -> bool:
        """True where so many slots of each kind can be had."""
        n_bytes = 0
        for kind, n in needs.items():
            n_bytes += max(0, n - len(self._free.get(kind, ()))) * self.pool.allocator.unit_bytes(kind)
        return self.taken_bytes + n_bytes <= self.limit_bytes

    def take(self, kind: PageKind, n: int) -> np.ndarray:
        """n slots, int32. The caller has asked `has_room` for all that it takes."""
        free = self._free.setdefault(kind, [])
        if len(free) < n:
            self._add(kind, n - len(free))
        taken = free[len(free) - n :]
        del free[len(free) - n :]
        return np.array(taken, np.int32)

    def give(self, kind: PageKind, slots: np.ndarray) -> None:
        """Slots that nobody needs any more."""
        self._free.setdefault(kind, []).extend(slots.tolist())

    def _add(self, kind: PageKind, n_least: int) -> None:
        assert self.pool.copier is not None
        unit_bytes = self.pool.allocator.unit_bytes(kind)
        left = (self.limit_bytes - self.taken_bytes) // unit_bytes
        n = max(n_least, min(CHUNK_BYTES // unit_bytes, left // 4))
        memory = self.pool.copier.alloc_host(n * unit_bytes)
        self.taken_bytes += n * unit_bytes
        rows = self._rows.setdefault(kind, [])
        self._free[kind].extend(range(len(rows), len(rows) + n))
        rows.extend(memory[i * unit_bytes : (i + 1) * unit_bytes] for i in range(n))


class PageSwap:
    """Saves sequences of one cache to host memory of at most limit_bytes, and loads them again."""

    def __init__(self, pool: PagePool, kv: KvCache | None, limit_bytes: int) -> None:
        self.pool, self.kv = pool, kv
        self.limit_bytes = limit_bytes if pool.copier is not None else 0
        self.saved: dict[Hashable, SavedSequence] = {}
        """By sequence id: who waits with its content here."""
        self.slots = HostSlots(pool, limit_bytes)
        self.bytes_per_s = FIRST_BYTES_PER_S
        self.n_saved = self.n_loaded = 0
        self.moved_bytes = 0
        self._units: dict[Key, _Unit] = {}

    def used_bytes(self) -> int:
        """Bytes of the slots that hold something."""
        kinds: tuple[PageKind, ...] = ("kv", "ssm", "conv")
        allocator = self.pool.allocator
        return sum(self.slots.n_used(kind) * allocator.unit_bytes(kind) for kind in kinds if allocator.has(kind))

    def seconds(self, sequence: KvSequence | None, states: StatePages) -> float:
        """Forecast of moving out, and back, what leaves the pool with a sequence."""
        allocator = self.pool.allocator
        n_bytes = sum(ids.size * allocator.unit_bytes(kind) for kind, ids in states.items())
        if self.kv is not None and sequence is not None:
            n_bytes += self.kv.n_unshared_pages(sequence) * allocator.unit_bytes("kv")
        return 2 * n_bytes / self.bytes_per_s

    # ---- out
    def save(self, seq_id: Hashable, sequence: KvSequence | None, states: StatePages, n_tokens: int) -> bool:
        """Copy what the sequence needs for its next token, and wait. False, and nothing changed, where room lacks or a
        copy fails."""
        columns = [] if sequence is None else self._visible(sequence)
        new_units, shared, own = self._sort_out(sequence, columns)
        needs = {kind: ids.size for kind, ids in states.items()}
        needs["kv"] = sum(int((page >= 0).sum()) for page in new_units.values()) + sum(ids.size for ids in own)
        if not self.slots.has_room(needs):
            return False
        sources: list[tuple[PageKind, np.ndarray, np.ndarray]] = []
        for key, pages in new_units.items():
            unit = _Unit(np.full(pages.size, -1, np.int32))
            unit.slots[pages >= 0] = self.slots.take("kv", int((pages >= 0).sum()))
            self._units[key] = unit
            sources.append(("kv", pages[pages >= 0], unit.slots[pages >= 0]))
        own_slots = [self.slots.take("kv", ids.size) for ids in own]
        sources += [("kv", ids, slots) for ids, slots in zip(own, own_slots, strict=True)]
        saved = SavedSequence(n_tokens, [], np.concatenate([_NO_PAGES, *own_slots]), [*new_units, *shared], {})
        for kind, ids in states.items():
            saved.states[kind] = self.slots.take(kind, ids.size)
            sources.append((kind, ids, saved.states[kind]))
        for key in saved.units:
            self._units[key].n_users += 1
        saved.columns = self._slot_rows(sequence, columns, saved, own, own_slots)
        self.saved[seq_id] = saved
        try:
            self._copy(sources, out=True)
        except Exception as error:
            log.warning("a request that gives way is run again later: %s", error)
            self.forget(seq_id)
            return False
        self.n_saved += 1
        return True

    def _visible(self, sequence: KvSequence) -> list[np.ndarray]:
        """Per group the pages int32 of the written columns; -1 where no later token sees them."""
        assert self.kv is not None
        rows = []
        for g, view in enumerate(self.kv.view.groups):
            n_columns = ceil_div(sequence.n_tokens, self.kv.layout.groups[g].page_tokens)
            row = view.ids[sequence.slot, :n_columns].copy()
            row[: self.kv.first_visible(g, sequence.n_tokens)] = -1
            rows.append(row)
        return rows

    def _sort_out(
        self, sequence: KvSequence | None, columns: list[np.ndarray]
    ) -> tuple[dict[Key, np.ndarray], list[Key], list[np.ndarray]]:
        """(pages of units to be saved, units that are saved already, per group the pages that are its alone)."""
        new_units: dict[Key, np.ndarray] = {}
        shared: list[Key] = []
        own: list[np.ndarray] = []
        for g, row in enumerate(columns):
            assert self.kv is not None and sequence is not None
            n, alone = self.kv.unit_columns[g], row >= 0
            for number, block in enumerate(sequence.blocks[g]):
                span = slice(number * n, (number + 1) * n)
                if block is None or not alone[span].any():
                    continue
                known = self._units.get(block.key)
                if known is None:
                    new_units[block.key] = block.pages.copy()
                elif (known.slots[alone[span]] < 0).any():  # saved when a window had passed more of it
                    continue
                else:
                    shared.append(block.key)
                alone[span] = False
            own.append(row[alone])
        return new_units, shared, own

    def _slot_rows(
        self,
        sequence: KvSequence | None,
        columns: list[np.ndarray],
        saved: SavedSequence,
        own: list[np.ndarray],
        own_slots: list[np.ndarray],
    ) -> list[np.ndarray]:
        """The slot of each column that a later token sees."""
        keys, rows = set(saved.units), []
        for g, pages in enumerate(columns):
            assert self.kv is not None and sequence is not None
            n, row = self.kv.unit_columns[g], np.full(pages.size, -1, np.int32)
            for number, block in enumerate(sequence.blocks[g]):
                if block is not None and block.key in keys:
                    row[number * n : (number + 1) * n] = self._units[block.key].slots
            row[np.isin(pages, own[g]) & (pages >= 0)] = own_slots[g]
            row[pages < 0] = -1
            rows.append(row)
        return rows

    # ---- in
    def begin(self, saved: SavedSequence, sequence: KvSequence, token_ids: np.ndarray) -> list[int]:
        """Let an empty sequence start with the units that the prefix index still knows; the token ids after them, which
        `load` will need."""
        assert self.kv is not None
        tokens = token_ids[: saved.n_tokens]
        found = self.kv.match(tokens, saved.n_tokens // self.kv.n_unit)
        while found and not found[-1][1]:
            found.pop()
        self.kv.adopt(sequence, [key for key, _ in found])
        sequence.n_to_load = saved.n_tokens
        return list(tokens[sequence.n_tokens :].tolist())

    def load(self, saved: SavedSequence, sequence: KvSequence | None, states: StatePages, token_ids: list[int]) -> None:
        """Copy to the sequence's new pages what the prefix index did not bring back (token_ids, from `begin`), and
        wait. Its KV tables reach beyond saved.n_tokens already. Finished units become findable again.

        Raises LostPagesError where a copy fails: the sequence's pages hold nothing of use then.
        """
        targets: list[tuple[PageKind, np.ndarray, np.ndarray]] = []
        for g, slots in enumerate(saved.columns):
            assert self.kv is not None and sequence is not None
            first = sequence.n_tokens // self.kv.layout.groups[g].page_tokens
            wanted = np.flatnonzero(slots[first:] >= 0) + first
            pages = self.kv.view.groups[g].ids[sequence.slot, wanted]
            if (pages < 0).any():
                raise AuditError(f"group {g} of slot {sequence.slot} has no pages for what was saved")
            targets.append(("kv", pages, slots[wanted]))
        targets += [(kind, states[kind], slots) for kind, slots in saved.states.items()]
        try:
            self._copy(targets, out=False)
        except Exception as error:
            raise LostPagesError(f"what a request had written is lost, it is run again: {error}") from error
        if self.kv is not None and sequence is not None:
            self.kv.commit(sequence, token_ids)
            sequence.n_to_load = 0
        self.n_loaded += 1

    def forget(self, seq_id: Hashable) -> None:
        """Nobody will load it (again): its slots are free, unless others share them."""
        saved = self.saved.pop(seq_id, None)
        if saved is None:
            return
        self.slots.give("kv", saved.own)
        for kind, slots in saved.states.items():
            self.slots.give(kind, slots)
        for key in saved.units:
            unit = self._units[key]
            unit.n_users -= 1
            if unit.n_users == 0:
                self.slots.give("kv", unit.slots[unit.slots >= 0])
                del self._units[key]

    def _copy(self, parts: list[tuple[PageKind, np.ndarray, np.ndarray]], out: bool) -> None:
        """Between pages and slots, one way, and wait; times the link. Where one fails, none is under way afterwards."""
        copier = self.pool.copier
        assert copier is not None
        started, n_bytes = time.perf_counter(), 0
        try:
            for kind, ids, slots in parts:
                for address, slot in zip(self.pool.addresses(kind, ids).tolist(), slots.tolist(), strict=True):
                    row = self.slots.row(kind, slot)
                    copier.copy_out(row, address) if out else copier.copy_in(address, row)
                n_bytes += ids.size * self.pool.allocator.unit_bytes(kind)
        finally:
            copier.wait()
        self.moved_bytes += n_bytes
        rate = n_bytes / max(time.perf_counter() - started, 1e-6)
        if n_bytes and out:  # on the way in it may wait for a step
            self.bytes_per_s += _SMOOTHING * (rate - self.bytes_per_s)

    # ---- reports
    def stats(self) -> dict[str, Any]:
        """Sequences that wait here, used_bytes, limit_bytes, moved_bytes; saved and loaded ones since the start."""
        return {
            "sequences": len(self.saved),
            "used_bytes": self.used_bytes(),
            "limit_bytes": self.limit_bytes,
            "moved_bytes": self.moved_bytes,
            "saved": self.n_saved,
            "loaded": self.n_loaded,
        }

    def audit(self) -> None:
        """Every slot in use belongs to exactly one unit or saved sequence; users of units are counted right."""
        users: dict[Key, int] = {}
        for sequence in self.saved.values():
            for key in sequence.units:
                users[key] = users.get(key, 0) + 1
        if users != {key: unit.n_users for key, unit in self._units.items()}:
            raise AuditError("the users counted in saved units are not the saved sequences that share them")
        held: dict[PageKind, list[np.ndarray]] = {"kv": [unit.slots[unit.slots >= 0] for unit in self._units.values()]}
        for sequence in self.saved.values():
            held["kv"].append(sequence.own)
            for kind, slots in sequence.states.items():
                held.setdefault(kind, []).append(slots)
        kinds: tuple[PageKind, ...] = ("kv", "ssm", "conv")
        for kind in kinds:
            slots = np.concatenate([_NO_PAGES, *held.get(kind, [])])
            if np.unique(slots).size != slots.size or slots.size != self.slots.n_used(kind):
                raise AuditError(f"{self.slots.n_used(kind)} {kind} slots of host memory are in use, {slots.size} held")
