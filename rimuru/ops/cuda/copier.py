"""CudaCopier: bytes between host memory, buffers and the pool, on a stream of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from rimuru.ops.cuda.device import PinnedMemory

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3


class CudaCopier:
    """The Copier of the device. Copies run in the order of the calls, beside the computing stream.

    Nothing orders them with kernels but the caller: pages are given away only after the step that read them has ended,
    and table entries change only after `done`. Where an order on the device is wanted instead, `follow` and `lead`
    give it without waiting.
    """

    def __init__(self, device_id: int, host_pointers: bool, leader: Any = None) -> None:
        import cupy

        self._cupy, self._runtime, self._leader = cupy, cupy.cuda.runtime, leader
        self._device_id, self._host_pointers = device_id, host_pointers
        with cupy.cuda.Device(device_id):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self._order = cupy.cuda.Event(disable_timing=True)  # a wait looks at the last record, so one is enough
        self._sources: list[tuple[Any, np.ndarray]] = []  # (event after the copy, memory that it reads or writes)
        self._recent: list[np.ndarray] = []
        self._pinned: list[PinnedMemory] = []

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        """uint8 [n_bytes] of page-aligned, pinned memory; it lives until `close`."""
        memory = PinnedMemory(n_bytes, self._host_pointers)
        self._pinned.append(memory)
        return memory.array

    def is_pinned(self, array: np.ndarray) -> bool:
        """True where the array lies in pinned memory of this copier, so that kernels may read it."""
        address = int(array.ctypes.data)
        return any(p.pinned and p.address <= address < p.address + max(1, p.array.size) for p in self._pinned)

    def copy_in(self, address: int, source: np.ndarray) -> None:
        if not source.flags.c_contiguous:
            raise ValueError(f"a copy source of shape {source.shape} is not contiguous")
        self._copy(address, int(source.ctypes.data), source.nbytes, _HOST_TO_DEVICE)
        self._recent.append(source)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        if not target.flags.c_contiguous:
            raise ValueError(f"a copy target of shape {target.shape} is not contiguous")
        self._copy(int(target.ctypes.data), address, target.nbytes, _DEVICE_TO_HOST)
        self._recent.append(target)

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        self._copy(target, source, n_bytes, _DEVICE_TO_DEVICE)

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        with self._cupy.cuda.Device(self._device_id):
            self._follow_leader()
            self._runtime.memsetAsync(address, value, n_bytes, self.stream.ptr)

    def record(self) -> Any:
        with self._cupy.cuda.Device(self._device_id):
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
        self._sources += [(event, source) for source in self._recent]
        self._recent.clear()
        return event

    def done(self, marker: Any) -> bool:
        return bool(marker.done)

    def wait(self, marker: Any | None = None) -> None:
        if marker is None:
            self.stream.synchronize()
            self._sources.clear()
            self._recent.clear()
            return
        marker.synchronize()
        self._sources = [(event, source) for event, source in self._sources if not event.done]

    def follow(self, stream: Any) -> None:
        """Copies queued from now on start after the work queued on `stream` so far (readers of what they overwrite)."""
        self._order.record(stream)
        self.stream.wait_event(self._order)

    def lead(self, stream: Any) -> None:
        """Work queued on `stream` from now on starts after the copies queued so far."""
        stream.wait_event(self.record())

    def close(self) -> None:
        """Wait for all copies and unpin."""
        self.wait()
        for memory in self._pinned:
            memory.close()
        self._pinned.clear()

    def _copy(self, target: int, source: int, n_bytes: int, kind: int) -> None:
        with self._cupy.cuda.Device(self._device_id):
            self._follow_leader()
            self._runtime.memcpyAsync(target, source, n_bytes, kind, self.stream.ptr)

    def _follow_leader(self) -> None:
        """Start after the work that the leading stream, if there is one, has been given so far."""
        if self._leader is not None:
            self.follow(self._leader)
