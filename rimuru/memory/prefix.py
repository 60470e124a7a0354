"""Finding KV pages again by the tokens that led to them.

A unit is the least common multiple of the groups' page_tokens. Each unit of a sequence has a hash of all tokens up to
its end (chained: blake2b-128 of the previous unit's hash and the unit's token ids, starting from a salt that names
model and KV type). A block is one group's pages of one unit; it is found by (group, hash). Blocks in use are counted;
unused ones wait, oldest first, until their pages are wanted.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.memory.specs import KvLayout

Key = tuple[int, bytes]


def unit_tokens(layout: KvLayout) -> int:
    """Tokens of a unit: prefixes are shared at multiples of it."""
    return math.lcm(*(group.page_tokens for group in layout.groups))


def root_hash(salt: bytes) -> bytes:
    """Hash of the empty prefix; caches of different models or KV types have different salts."""
    return hashlib.blake2b(salt, digest_size=16, person=b"rimuru-prefix").digest()


def chain_hash(before: bytes, token_ids: np.ndarray) -> bytes:
    """Hash of a prefix that is one unit (int32 token ids) longer than the one with hash `before`."""
    return hashlib.blake2b(before + token_ids.tobytes(), digest_size=16).digest()


def unit_hashes(root: bytes, token_ids: Sequence[int] | np.ndarray, n_units: int, n_unit: int) -> Iterator[bytes]:
    """Hashes of the first n_units units of n_unit tokens each."""
    tokens = np.asarray(token_ids[: n_units * n_unit], np.int32)
    before = root
    for i in range(n_units):
        before = chain_hash(before, tokens[i * n_unit : (i + 1) * n_unit])
        yield before


@dataclass(slots=True, eq=False)
class Block:
    """One group's pages of one unit. pages int32 [unit / page_tokens]; -1 where a window had passed already."""

    key: Key
    pages: np.ndarray
    n_users: int
    n_live: int
    """Pages that it holds; moves do not change how many."""

    @property
    def live(self) -> np.ndarray:
        """The pages that it holds."""
        return self.pages if self.n_live == self.pages.size else self.pages[self.pages >= 0]


_NO_PAGES = np.empty(0, np.int32)


class PrefixIndex:
    """All findable blocks. Pages are handed in by `register` and handed out by `evict` and `drop`, never freed here."""

    def __init__(self) -> None:
        self._blocks: dict[Key, Block] = {}
        self._unused: OrderedDict[Key, Block] = OrderedDict()
        self.n_unused_pages = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, group: int, key: bytes) -> Block | None:
        """The block of a group with this prefix hash."""
        return self._blocks.get((group, key))

    def register(self, group: int, key: bytes, pages: np.ndarray) -> Block | None:
        """Make a sequence's own pages findable; it is the first user. None where the prefix is known already."""
        if (group, key) in self._blocks:
            return None
        block = Block((group, key), pages.copy(), 1, int(np.count_nonzero(pages >= 0)))
        self._blocks[block.key] = block
        return block

    def take(self, block: Block) -> None:
        """One more sequence uses the block."""
        if block.n_users == 0:
            del self._unused[block.key]
            self.n_unused_pages -= block.n_live
        block.n_users += 1

    def drop(self, block: Block, keep: bool = True) -> np.ndarray | None:
        """One user less. Without users the block waits for reuse, or (keep=False) is forgotten: its pages int32."""
        if block.n_users <= 0:
            raise AuditError(f"a prefix block of group {block.key[0]} is given back more often than it was taken")
        block.n_users -= 1
        if block.n_users:
            return None
        if keep:
            self._unused[block.key] = block
            self.n_unused_pages += block.n_live
            return None
        del self._blocks[block.key]
        return block.live

    def remove(self, block: Block) -> np.ndarray:
        """Forget a block without users; its pages int32, which are the caller's."""
        del self._unused[block.key], self._blocks[block.key]
        self.n_unused_pages -= block.n_live
        return block.live

    def unused(self) -> Iterable[Block]:
        """Blocks without users."""
        return self._unused.values()

    def evict(self, n_pages: int) -> tuple[list[Block], np.ndarray]:
        """Forget blocks without users, those unused for longest first, until they hold n_pages or none is left. The
        blocks, and all their pages int32, which are the caller's."""
        blocks, parts, n_freed = [], [_NO_PAGES], 0
        while n_freed < n_pages and self._unused:
            key, block = self._unused.popitem(last=False)
            del self._blocks[key]
            blocks.append(block)
            parts.append(block.live)
            n_freed += block.n_live
        self.n_unused_pages -= n_freed
        return blocks, np.concatenate(parts)

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Moved pages: blocks that hold a source now hold its target."""
        moved = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        for block in self._blocks.values():
            block.pages = np.array([moved.get(page, page) for page in block.pages.tolist()], np.int32)

    def pages(self) -> np.ndarray:
        """All pages held by blocks, int32."""
        parts = [block.live for block in self._blocks.values()]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def users(self) -> dict[Key, int]:
        """Users of each block."""
        return {key: block.n_users for key, block in self._blocks.items()}

    def audit(self) -> None:
        """Unused blocks are exactly those without users, their pages are counted, no page is in two blocks."""
        waiting = {key for key, block in self._blocks.items() if block.n_users == 0}
        if waiting != set(self._unused):
            raise AuditError(f"{len(waiting)} prefix blocks have no user, but {len(self._unused)} wait for reuse")
        if any(np.count_nonzero(block.pages >= 0) != block.n_live for block in self._blocks.values()):
            raise AuditError("a prefix block holds more or fewer pages than it counts")
        n_pages = sum(block.n_live for block in self._unused.values())
        if n_pages != self.n_unused_pages:
            raise AuditError(f"{n_pages} pages wait for reuse, but {self.n_unused_pages} are counted")
        pages = self.pages()
        if np.unique(pages).size != pages.size:
            raise AuditError("a KV page belongs to two prefix blocks")
