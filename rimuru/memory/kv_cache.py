"""KvCache: block tables of sequences, shared prefixes, windows. One group of attention layers = one row of pages.

Pages of a sequence in a group with page_tokens = 4 and a window, after 19 tokens (unit = 8 tokens):

    column      0     1     2     3     4
    page       -1    -1    p2    p3    p4          -1: left the window
    held by    unit 0 (-)  unit 1 (b)  own         b: a block, findable by its hash, perhaps shared

Columns of a finished unit belong to a block, later ones to the sequence alone: tokens after a shared prefix are
always written to the sequence's own pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.base.units import ceil_div
from rimuru.memory.page_pool import PagePool
from rimuru.memory.prefix import Block, PrefixIndex, chain_hash, root_hash, unit_hashes, unit_tokens
from rimuru.memory.specs import KvLayout
from rimuru.memory.views import KVView

SHARED_OWNER = -1


@dataclass(slots=True)
class KvSequence:
    """What KvCache knows of one sequence. Lists are per group."""

    slot: int
    hash: bytes
    """Of the finished units."""
    n_tokens: int = 0
    n_room: int = 0
    """Tokens that its pages can hold."""
    unit_tail: list[int] = field(default_factory=list)
    """Token ids after the last finished unit."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the prefixes that end with each finished unit."""
    n_columns: list[int] = field(default_factory=list)
    """Columns that have (or had) a page."""
    first_column: list[int] = field(default_factory=list)
    """Columns before this one have been given back."""
    blocks: list[list[Block | None]] = field(default_factory=list)
    """Per finished unit; None = the sequence's own pages, or given back."""
    n_to_load: int = 0
    """Tokens that come back from host memory with the next `extend`: columns that none after them sees get no page."""


class KvCache:
    """KV pages of all sequences of one model."""

    def __init__(self, pool: PagePool, layout: KvLayout, prefix_cache: bool, salt: bytes) -> None:
        self.pool = pool
        self.layout = layout
        self.view = KVView(pool, layout)
        self.index = PrefixIndex()
        self.prefix_cache = prefix_cache
        self.n_unit = unit_tokens(layout)
        self.root = root_hash(salt)
        self.unit_columns = [self.n_unit // group.page_tokens for group in layout.groups]
        self._page_tokens = [group.page_tokens for group in layout.groups]
        self._windowed = [g for g, group in enumerate(layout.groups) if group.window is not None]
        self.on_evict: Callable[[bytes], None] | None = None
        """Told the hash of a prefix whose pages are forgotten."""
        self.is_of_use: Callable[[bytes], bool] | None = None
        """Whether a state is kept that stands on the units up to a hash; None: units are of use without one."""

    # ---- prefixes
    def open(self, slot: int) -> KvSequence:
        """An empty sequence."""
        n_groups = len(self.layout.groups)
        for group in self.view.groups:
            group.reserve(slot + 1, 1)
            group.clear(slot)
        return KvSequence(
            slot, self.root, n_columns=[0] * n_groups, first_column=[0] * n_groups, blocks=[[] for _ in range(n_groups)]
        )

    def match(self, token_ids: np.ndarray, n_units: int) -> list[tuple[bytes, bool]]:
        """(hash, whether it can be continued from there) of each known unit among the first n_units.

        A unit is known while all groups without a window have its pages; it can be continued from where every group
        with a window also has all pages that the next token sees.
        """
        found: list[tuple[bytes, bool]] = []
        if not self.prefix_cache:
            return found
        full = [g for g in range(len(self.layout.groups)) if g not in self._windowed]
        seen: list[list[bool]] = [[] for _ in self.layout.groups]
        for key in unit_hashes(self.root, token_ids, n_units, self.n_unit):
            blocks = [self.index.get(g, key) for g in range(len(self.layout.groups))]
            if any(blocks[g] is None for g in full) or all(block is None for block in blocks):
                break
            for g in self._windowed:
                block = blocks[g]
                seen[g].extend([False] * self.unit_columns[g] if block is None else (block.pages >= 0).tolist())
            n_tokens = (len(found) + 1) * self.n_unit
            found.append((key, all(all(seen[g][self.first_visible(g, n_tokens) :]) for g in self._windowed)))
        return found

    def adopt(self, sequence: KvSequence, hashes: list[bytes]) -> None:
        """Let an empty sequence start with the pages of these units (from `match`, its last one continuable)."""
        n_tokens = len(hashes) * self.n_unit
        for g, view in enumerate(self.view.groups):
            n = self.unit_columns[g]
            first_unit = self.first_visible(g, n_tokens) // n
            view.reserve(sequence.slot + 1, len(hashes) * n)
            sequence.blocks[g] = [None] * first_unit
            for unit in range(first_unit, len(hashes)):
                block = self.index.get(g, hashes[unit])
                if block is None:
                    raise AuditError(f"prefix unit {unit} of group {g} is gone between match and adopt")
                self.index.take(block)
                sequence.blocks[g].append(block)
                view.ids[sequence.slot, unit * n : (unit + 1) * n] = block.pages
            sequence.n_columns[g] = len(hashes) * n
            sequence.first_column[g] = first_unit * n
        sequence.n_tokens = sequence.n_room = n_tokens
        sequence.hash = hashes[-1] if hashes else self.root
        sequence.hashes = list(hashes)

    def first_visible(self, g: int, n_tokens: int) -> int:
        """First column of group g that a token at position n_tokens or later sees."""
        group = self.layout.groups[g]
        return 0 if group.window is None else max(0, n_tokens - group.window + 1) // group.page_tokens

    # ---- growing
    def pages_needed(self, sequence: KvSequence, n_tokens: int) -> int:
        """Pages to allocate for n_tokens more tokens than the committed ones."""
        if sequence.n_tokens + n_tokens <= sequence.n_room:
            return 0
        return sum(self._columns_needed(sequence, n_tokens))

    def _columns_needed(self, sequence: KvSequence, n_tokens: int) -> list[int]:
        total = sequence.n_tokens + n_tokens
        return [
            max(0, ceil_div(total, page_tokens) - self._next_column(sequence, g))
            for g, page_tokens in enumerate(self._page_tokens)
        ]

    def _next_column(self, sequence: KvSequence, g: int) -> int:
        """The next column of group g that gets a page."""
        hidden = self.first_visible(g, sequence.n_to_load) if sequence.n_to_load else 0
        return max(sequence.n_columns[g], hidden)

    def extend(self, sequence: KvSequence, n_tokens: int, pages: np.ndarray) -> None:
        """Enter newly allocated pages, as many as `pages_needed` said, into the tables."""
        at = 0
        for g, n_new in enumerate(self._columns_needed(sequence, n_tokens)):
            view = self.view.groups[g]
            start = self._next_column(sequence, g)
            view.reserve(sequence.slot + 1, start + n_new)
            view.ids[sequence.slot, start : start + n_new] = pages[at : at + n_new]
            sequence.n_columns[g] = start + n_new
            at += n_new
        sequence.n_room = min(n * columns for n, columns in zip(self._page_tokens, sequence.n_columns, strict=True))
        if at != pages.size:
            raise AuditError(f"{pages.size} KV pages for {at} columns of a sequence")

    def commit(self, sequence: KvSequence, token_ids: list[int]) -> None:
        """Tokens have been written: finished units become findable, pages that left a window are given back."""
        if sequence.n_tokens + len(token_ids) > sequence.n_room:
            raise AuditError(
                f"{len(token_ids)} tokens after {sequence.n_tokens} were committed, but the sequence has room for "
                f"{sequence.n_room}"
            )
        tail = sequence.unit_tail
        tail.extend(token_ids)
        n_done = len(tail) // self.n_unit
        if n_done:
            tokens = np.array(tail[: n_done * self.n_unit], np.int32).reshape(n_done, self.n_unit)
            for unit in tokens:
                sequence.hash = chain_hash(sequence.hash, unit)
                sequence.hashes.append(sequence.hash)
                self._finish_unit(sequence)
            del tail[: n_done * self.n_unit]
        sequence.n_tokens += len(token_ids)
        self._leave_windows(sequence)

    def _finish_unit(self, sequence: KvSequence) -> None:
        """The next unit is complete: its pages, as far as they are still there, become blocks."""
        for g in range(len(self.layout.groups)):
            unit = len(sequence.blocks[g])
            sequence.blocks[g].append(self._register(sequence, g, unit) if self.prefix_cache else None)

    def _register(self, sequence: KvSequence, g: int, unit: int) -> Block | None:
        """Make a unit's own pages findable; None where others' are, or none is left."""
        n = self.unit_columns[g]
        pages = self.view.groups[g].ids[sequence.slot, unit * n : (unit + 1) * n]
        block = self.index.register(g, sequence.hashes[unit], pages) if (pages >= 0).any() else None
        if block is not None:
            self.pool.allocator.set_owners("kv", block.live, SHARED_OWNER)
        return block

    def register_again(self, sequence: KvSequence) -> None:
        """A state of the sequence is to be kept: units that it wrote while others' pages were findable for them, which
        have left since, become findable in its own pages."""
        for g, blocks in enumerate(sequence.blocks):
            for unit, block in enumerate(blocks):
                if block is None and self.index.get(g, sequence.hashes[unit]) is None:
                    blocks[unit] = self._register(sequence, g, unit)

    def _leave_windows(self, sequence: KvSequence) -> None:
        """Give back own pages, and whole blocks, that no later token sees."""
        gone: list[np.ndarray] = []
        for g in self._windowed:
            view, n = self.view.groups[g], self.unit_columns[g]
            stop = self.first_visible(g, sequence.n_tokens)
            column = sequence.first_column[g]
            while column < stop:
                unit = column // n
                block = sequence.blocks[g][unit] if unit < len(sequence.blocks[g]) else None
                if block is None:
                    end = column + 1
                    gone.append(view.ids[sequence.slot, column:end].copy())
                else:
                    end = (unit + 1) * n
                    if end > stop:
                        break
                    pages = self.index.drop(block, self._is_of_use(block))
                    sequence.blocks[g][unit] = None
                    if pages is not None:
                        gone.append(pages)
                view.ids[sequence.slot, column:end] = -1
                column = end
            sequence.first_column[g] = column
        if gone:
            pages = np.concatenate(gone)
            self.pool.free("kv", pages[pages >= 0])

    def n_shared_tokens(self, sequence: KvSequence) -> int:
        """Tokens at its start whose pages other open sequences use too."""
        n_units = 0
        for blocks in zip(*sequence.blocks, strict=True):
            if not all(block is None or block.n_users > 1 for block in blocks):
                break
            n_units += any(block is not None for block in blocks)
        return n_units * self.n_unit

    def n_unshared_pages(self, sequence: KvSequence) -> int:
        """Pages that leave with it."""
        n_shared = sum(
            block.live.size for blocks in sequence.blocks for block in blocks if block is not None and block.n_users > 1
        )
        return self.n_pages(sequence) - n_shared

    # ---- the end of a sequence, pressure
    def own_pages(self, sequence: KvSequence, g: int) -> np.ndarray:
        """Pages of group g that belong to this sequence alone, int32, in column order."""
        row = self.view.groups[g].ids[sequence.slot, : sequence.n_columns[g]]
        own = row >= 0
        n = self.unit_columns[g]
        for unit, block in enumerate(sequence.blocks[g]):
            if block is not None:
                own[unit * n : (unit + 1) * n] = False
        return row[own]

    def release(self, sequence: KvSequence, keep_prefix: bool) -> None:
        """Every way out: own pages are freed, blocks lose a user, the last units first (they are evicted first)."""
        own = [self.own_pages(sequence, g) for g in range(len(self.layout.groups))]
        for unit in reversed(range(len(sequence.blocks[0]))):
            for g in range(len(self.layout.groups)):
                block = sequence.blocks[g][unit]
                if block is not None:
                    pages = self.index.drop(block, keep_prefix and self._is_of_use(block))
                    if pages is not None:
                        self._forget(block, pages)
        self.pool.free("kv", np.concatenate(own))
        for view in self.view.groups:
            view.clear(sequence.slot)

    def evict(self, n_pages: int) -> int:
        """Forget unused blocks, oldest first, until n_pages are free; how many were freed."""
        blocks, pages = self.index.evict(n_pages)
        if blocks:
            self.pool.free("kv", pages)
            for block in blocks:
                self._tell(block)
        return pages.size

    def _is_of_use(self, block: Block) -> bool:
        return self.is_of_use is None or self.is_of_use(block.key[1])

    def forget_units(self, hashes: list[bytes]) -> None:
        """No state stands on the units with these hashes any more: pages that nobody uses are free."""
        parts = []
        for key in hashes:
            for g in range(len(self.layout.groups)):
                block = self.index.get(g, key)
                if block is not None and block.n_users == 0:
                    parts.append(self.index.remove(block))
        if parts:
            self.pool.free("kv", np.concatenate(parts))

    def knows_units(self, hashes: Sequence[bytes]) -> bool:
        """Whether every group without a window has pages of all these units."""
        full = [g for g in range(len(self.layout.groups)) if g not in self._windowed]
        return all(self.index.get(g, key) is not None for key in hashes for g in full)

    def _forget(self, block: Block, pages: np.ndarray) -> None:
        self.pool.free("kv", pages)
        self._tell(block)

    def _tell(self, block: Block) -> None:
        if self.on_evict is not None and self.layout.groups[block.key[0]].window is None:
            self.on_evict(block.key[1])

    # ---- reports
    def n_pages(self, sequence: KvSequence) -> int:
        """Pages that the sequence uses, shared ones included."""
        return sum(
            int((view.ids[sequence.slot, : sequence.n_columns[g]] >= 0).sum())
            for g, view in enumerate(self.view.groups)
        )

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages."""
        for view in self.view.groups:
            view.flip(sources, targets)
        self.index.flip(sources, targets)

    def audit(self, sequences: list[KvSequence]) -> np.ndarray:
        """Tables, blocks and their users agree; all pages held, int32. AuditError with the numbers otherwise."""
        self.index.audit()
        n_useless = sum(not self._is_of_use(block) for block in self.index.unused())
        if n_useless:
            raise AuditError(f"{n_useless} prefix blocks wait for reuse, but no state is kept that stands on them")
        users = dict.fromkeys(self.index.users(), 0)
        held = [self.index.pages()]
        for sequence in sequences:
            for g, view in enumerate(self.view.groups):
                n = self.unit_columns[g]
                if len(sequence.blocks[g]) != sequence.n_tokens // self.n_unit:
                    raise AuditError(
                        f"slot {sequence.slot} has {sequence.n_tokens} tokens but {len(sequence.blocks[g])} units"
                    )
                for unit, block in enumerate(sequence.blocks[g]):
                    if block is None:
                        continue
                    users[block.key] = users.get(block.key, 0) + 1
                    if (view.ids[sequence.slot, unit * n : (unit + 1) * n] != block.pages).any():
                        raise AuditError(f"slot {sequence.slot}, group {g}: unit {unit} is not its block's pages")
                row = view.ids[sequence.slot]
                if (row[: sequence.first_column[g]] >= 0).any() or (row[sequence.n_columns[g] :] >= 0).any():
                    raise AuditError(f"slot {sequence.slot}, group {g} names pages outside of its columns")
                if (row[self.first_visible(g, sequence.n_tokens) : sequence.n_columns[g]] < 0).any():
                    raise AuditError(f"slot {sequence.slot}, group {g} lacks a page that its next token sees")
                held.append(self.own_pages(sequence, g))
        if users != self.index.users():
            raise AuditError("the users counted in prefix blocks are not the open sequences that hold them")
        return np.concatenate(held)
