"""Host memory for experts that are not in the pool: blocks that the device can read, handed out expert by expert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.base.units import MIB, human_bytes

BLOCK_BYTES = 256 * MIB
"""Pinned memory is made in blocks of this size, when it is needed: pinning costs about 30 ms a GiB."""


class PinningError(NotEnoughMemoryError):
    """The system does not pin as much memory as was asked for: a device cannot read it where it lies."""


class HostArena:
    """Slots of whole pages in blocks from `alloc_host` (uint8 [n_bytes], pinned where there is a device).

    Slots of one size are kept in a list of their own when they come back: a model has few expert sizes.
    is_readable(block): whether a device can read a block in place; None where nobody wants to.
    """

    def __init__(
        self,
        alloc_host: Callable[[int], np.ndarray],
        limit_bytes: int,
        is_readable: Callable[[np.ndarray], bool] | None = None,
    ) -> None:
        self._alloc_host, self.limit_bytes, self._is_readable = alloc_host, limit_bytes, is_readable
        self._blocks: list[np.ndarray] = []
        self._spare: list[np.ndarray] = []
        self._next = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self.used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return sum(block.nbytes for block in (*self._blocks, *self._spare))

    def reserve(self, n_bytes: int) -> None:
        """Make blocks for n_bytes more now. Raises PinningError where a device cannot read one; NotEnoughMemoryError
        beyond the limit."""
        wanted = self.held_bytes + n_bytes
        while self.held_bytes < min(wanted, self.limit_bytes):
            self._spare.append(self._new_block(1))

    def take(self, n_bytes: int) -> np.ndarray:
        """A slot uint8 [n_bytes]. Raises NotEnoughMemoryError beyond the limit, PinningError where a device cannot read
        the memory."""
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
        fitting = [block for block in self._spare if block.nbytes >= n_bytes]
        if fitting:
            self._spare = [block for block in self._spare if block is not fitting[0]]
        self._blocks.append(fitting[0] if fitting else self._new_block(n_bytes))
        self._next = 0

    def _new_block(self, n_bytes: int) -> np.ndarray:
        size = max(min(BLOCK_BYTES, self.limit_bytes - self.held_bytes), n_bytes)
        if self.held_bytes + size > self.limit_bytes:
            raise NotEnoughMemoryError(
                f"experts outside the device need more than the {human_bytes(self.limit_bytes)} of RAM they may take; "
                "give more --ram or more --memory"
            )
        block = self._alloc_host(size)
        if self._is_readable is not None and not self._is_readable(block):
            raise PinningError(f"the system does not pin more than {human_bytes(self.held_bytes)} of RAM")
        return block

    def give_back(self, slot: np.ndarray) -> None:
        """A slot that nothing reads any more."""
        if self.used_bytes < slot.nbytes:
            raise AuditError(f"{slot.nbytes} bytes came back to an arena that lent {self.used_bytes}")
        self.used_bytes -= slot.nbytes
        self._free.setdefault(slot.nbytes, []).append(slot)
