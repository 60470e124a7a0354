"""Host memory for experts that are not in the pool: blocks that the device can read, handed out expert by expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.base.units import MIB, human_bytes

BLOCK_BYTES = 256 * MIB
"""Pinned memory is made in blocks of this size, when it is needed: pinning costs about 30 ms a GiB."""


class HostArena:
    """Slots of whole pages in blocks from `alloc_host` (uint8 [n_bytes], pinned where there is a device).

    Slots of one size are kept in a list of their own when they come back: a model has few expert sizes.
    """

    def __init__(self, alloc_host: Callable[[int], np.ndarray], limit_bytes: int) -> None:
        self._alloc_host, self.limit_bytes = alloc_host, limit_bytes
        self._blocks: list[np.ndarray] = []
        self._next = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self.used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, n_bytes: int) -> np.ndarray:
        """A slot uint8 [n_bytes]. Raises NotEnoughMemoryError beyond the limit."""
        freed = self._free.get(n_bytes)
        if freed:
            slot = freed.pop()
        else:
            if not self._blocks or self._next + n_bytes > self._blocks[-1].nbytes:
                self._add_block(n_bytes)
            slot = self._blocks[-1][self._next : self._next + n_bytes]
            self._next += n_bytes
        self.used_bytes += n_bytes
        return slot

    def _add_block(self, n_bytes: int) -> None:
        size = max(min(BLOCK_BYTES, self.limit_bytes - self.held_bytes), n_bytes)
        if self.held_bytes + size > self.limit_bytes:
            raise NotEnoughMemoryError(
                f"experts outside the device need more than the {human_bytes(self.limit_bytes)} of RAM they may take; "
                "give more --ram or more --memory"
            )
        self._blocks.append(self._alloc_host(size))
        self._next = 0

    def give_back(self, slot: np.ndarray) -> None:
        """A slot that nothing reads any more."""
        if self.used_bytes < slot.nbytes:
            raise AuditError(f"{slot.nbytes} bytes came back to an arena that lent {self.used_bytes}")
        self.used_bytes -= slot.nbytes
        self._free.setdefault(slot.nbytes, []).append(slot)
