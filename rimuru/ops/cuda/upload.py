"""Large host arrays to the device: through two pinned blocks in turn, so that reading and copying overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from rimuru.base.units import MIB
from rimuru.ops.cuda.device import PinnedMemory

_BLOCK_BYTES = 16 * MIB
_SMALL_BYTES = 1 * MIB


class Uploader:
    """Copies host arrays (of a mapped file, for one) to new device arrays. The pinned blocks are made when needed."""

    def __init__(self, host_pointers: bool) -> None:
        self._host_pointers = host_pointers
        self._blocks: list[PinnedMemory] = []
        self._events: list[Any] = []

    def upload(self, host: np.ndarray) -> Any:
        """A device array with the values of `host`; the host array may change once this returns."""
        import cupy

        host = np.ascontiguousarray(host)
        if host.nbytes < _SMALL_BYTES:
            return cupy.asarray(host)
        array = cupy.empty(host.shape, host.dtype)
        self._stream_bytes(int(array.data.ptr), host.reshape(-1).view(np.uint8))
        return array

    def _stream_bytes(self, target: int, source: np.ndarray) -> None:
        import cupy

        if not self._blocks:
            self._blocks = [PinnedMemory(_BLOCK_BYTES, self._host_pointers) for _ in range(2)]
            self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        stream = cupy.cuda.get_current_stream()
        for turn, start in enumerate(range(0, source.size, _BLOCK_BYTES)):
            block, event = self._blocks[turn % 2], self._events[turn % 2]
            piece = source[start : start + _BLOCK_BYTES]
            event.synchronize()
            block.array[: piece.size] = piece
            cupy.cuda.runtime.memcpyAsync(target + start, block.address, piece.size, 1, stream.ptr)
            event.record(stream)

    def release(self) -> None:
        """Free the pinned blocks; after loading."""
        for event in self._events:
            event.synchronize()
        for block in self._blocks:
            block.close()
        self._blocks, self._events = [], []
