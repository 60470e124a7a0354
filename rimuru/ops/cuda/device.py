"""The device: whether it can be used, what it is, pinned host memory, and small host-to-device blocks.

CuPy is imported inside functions: asking why there is no usable GPU must work without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.base.extras import install_command
from rimuru.base.units import GIB, MIB, align_up, human_bytes

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
MIN_MEMORY_BYTES = 4 * GIB
_SLOTS = 4
_MAX_VIEWS = 1024
_HUGE_PAGE_BYTES = 2 * MIB
_LARGE_BYTES = 64 * MIB
_TOUCHING_THREADS = 8
_HOST_ALLOC_FLAGS = 1 | 2  # cudaHostAllocPortable | cudaHostAllocMapped
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


def usable(device_id: int = 0) -> str | None:
    """None where the GPU can be used, else the reason in one line."""
    try:
        import cupy
    except ImportError:
        return f"CuPy is not installed: {install_command('cuda13')} (or cuda12, as the driver supports)"
    except Exception as error:  # a broken installation must not stop the CPU backend
        return f"CuPy cannot be loaded: {str(error).strip().splitlines()[0]}"
    runtime = cupy.cuda.runtime
    try:
        if runtime.getDeviceCount() <= device_id:
            return "there is no NVIDIA GPU"
        capability = (
            runtime.deviceGetAttribute(75, device_id),  # cudaDevAttrComputeCapabilityMajor
            runtime.deviceGetAttribute(76, device_id),
        )
        if capability < MIN_CAPABILITY:
            name = runtime.getDeviceProperties(device_id)["name"].decode()
            return f"{name} has compute capability {capability[0]}.{capability[1]}, 8.0 or later is needed"
        with cupy.cuda.Device(device_id):
            _, total_bytes = runtime.memGetInfo()
    except runtime.CUDARuntimeError as error:
        return f"the NVIDIA driver does not answer: {error}"
    if total_bytes < MIN_MEMORY_BYTES:
        return f"the GPU has {human_bytes(total_bytes)} of memory, {human_bytes(MIN_MEMORY_BYTES)} are needed"
    return None


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is known of a device; bytes are of its memory."""

    id: int
    name: str
    capability: tuple[int, int]
    n_multiprocessors: int
    total_bytes: int
    max_shared_bytes: int
    """Shared memory that one block may ask for."""
    sm_shared_bytes: int
    """Shared memory of a multiprocessor."""
    host_pointers: bool
    """Registered host memory has the same address on the device."""

    @classmethod
    def of(cls, device_id: int) -> DeviceInfo:
        import cupy

        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(device_id)
        return cls(
            id=device_id,
            name=properties["name"].decode(),
            capability=(properties["major"], properties["minor"]),
            n_multiprocessors=properties["multiProcessorCount"],
            total_bytes=properties["totalGlobalMem"],
            max_shared_bytes=properties["sharedMemPerBlockOptin"],
            sm_shared_bytes=properties["sharedMemPerMultiprocessor"],
            host_pointers=bool(runtime.deviceGetAttribute(_CAN_USE_HOST_POINTER, device_id)),
        )


def free_bytes() -> int:
    """Free device memory as the driver has it, plus what CuPy holds unused."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    return int(free) + int(cupy.get_default_memory_pool().free_bytes())


class PinnedMemory:
    """Page-locked host memory that kernels can read and copy engines can reach at full rate.

    Anonymous memory is registered where the device knows it by the host's address (a file mapping is refused by the
    driver), else allocated by the driver. Where neither works the memory is pageable, `pinned` is False, and a line
    is logged: copies are slower then, and kernels must not read it.
    """

    def __init__(self, n_bytes: int, host_pointers: bool = True) -> None:
        import cupy

        self._runtime = cupy.cuda.runtime
        self._registered = self._allocated = 0
        self.pinned = True
        size = align_up(max(n_bytes, 1), mmap.PAGESIZE)
        try:
            if host_pointers:
                self._memory: Any = _anonymous_memory(size)
                self._bytes = np.frombuffer(self._memory, np.uint8)
                _touch(self._bytes)
                self._runtime.hostRegister(int(self._bytes.ctypes.data), size, _HOST_ALLOC_FLAGS)
                self._registered = int(self._bytes.ctypes.data)
            else:
                self._allocated = int(self._runtime.hostAlloc(size, _HOST_ALLOC_FLAGS))
                self._memory = (ctypes.c_uint8 * size).from_address(self._allocated)
                self._bytes = np.frombuffer(self._memory, np.uint8)
        except self._runtime.CUDARuntimeError as error:
            logger.warning("no pinned memory of %s (%s): copies will be slower", human_bytes(size), error)
            self.pinned = False
            self._memory = _anonymous_memory(size)
            self._bytes = np.frombuffer(self._memory, np.uint8)
        self.array = self._bytes[:n_bytes]
        self.address = int(self._bytes.ctypes.data)
        # Memory that goes back to the system while it is registered would leave the driver with stale addresses.
        self._release = weakref.finalize(self, _unpin, self._runtime, self._registered, self._allocated)

    def close(self) -> None:
        """Unpin; copies must have ended. The array must not be used afterwards where the driver allocated it."""
        self._release()


def _anonymous_memory(size: int) -> mmap.mmap:
    """Memory in huge pages where the system has them: fewer faults when it is filled, fewer entries when it is pinned
    and when the device looks addresses up. A forked child does not get it (the system would copy what is pinned)."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES:
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(OSError, AttributeError):  # advice: nothing depends on it
                memory.madvise(getattr(mmap, advice))
    return memory


def _touch(memory: np.ndarray) -> None:
    """Give large memory its pages, by several threads: pinning would do it with one."""
    if memory.nbytes < _LARGE_BYTES:
        return

    def touch(part: np.ndarray) -> None:
        part[:: mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(_TOUCHING_THREADS, thread_name_prefix="rimuru-touch") as threads:
        list(threads.map(touch, np.array_split(memory, _TOUCHING_THREADS)))


def _unpin(runtime: Any, registered: int, allocated: int) -> None:
    try:
        if registered:
            runtime.hostUnregister(registered)
        if allocated:
            runtime.freeHost(allocated)
    except runtime.CUDARuntimeError as error:  # at exit the driver may be gone before the memory
        logger.debug("pinned memory was not released: %s", error)


class StagedBytes:
    """A block of device memory at a fixed address that takes small host arrays by one asynchronous copy.

    The copy runs on the current stream, so it is ordered with the kernels that read the block. The host writes into
    one of a few pinned slots in turn and waits only if that slot's copy is still pending. Growing moves the block and
    keeps the old one, since captured graphs may point at it.
    """

    def __init__(self) -> None:
        self._capacity = 0
        self._device: Any = None
        self._outgrown: list[Any] = []
        self._slots: list[PinnedMemory] = []
        self._events: list[Any] = []
        self._views: dict[tuple[Any, ...], Any] = {}
        self._turn = 0

    @property
    def address(self) -> int:
        return 0 if self._device is None else int(self._device.data.ptr)

    @property
    def n_bytes(self) -> int:
        """Device bytes that the block takes now."""
        return self._capacity

    def reserve(self, n_bytes: int) -> None:
        """Make room for n_bytes."""
        import cupy

        if n_bytes <= self._capacity:
            return
        self._outgrown.append((self._device, self._slots))
        self._views.clear()
        self._capacity = align_up(max(n_bytes, 4096), 4096)
        self._device = cupy.empty(self._capacity, cupy.uint8)
        self._slots = [PinnedMemory(self._capacity) for _ in range(_SLOTS)]
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(_SLOTS)]

    def close(self) -> None:
        """Unpin the slots; their copies must have ended."""
        for slots in (self._slots, *(slots for _, slots in self._outgrown)):
            for slot in slots:
                slot.close()
        self._slots, self._outgrown, self._device, self._capacity = [], [], None, 0
        self._views.clear()

    def send(self, arrays: Sequence[np.ndarray]) -> list[int]:
        """Queue the arrays' bytes one after another, each from a multiple of 16; returns their device addresses."""
        import cupy

        self._turn = (self._turn + 1) % _SLOTS
        slot, event = self._slots[self._turn], self._events[self._turn]
        event.synchronize()
        at, addresses, base = 0, [], self.address
        for array in arrays:
            n_bytes = array.nbytes
            slot.array[at : at + n_bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            addresses.append(base + at)
            at = (at + n_bytes + 15) & ~15
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(base, slot.address, at, 1, stream.ptr)
        event.record(stream)
        return addresses

    def view(self, address: int, shape: Sequence[int], dtype: Any) -> Any:
        """A device array on bytes that `send` placed. Views are kept: equal steps ask for equal ones."""
        key = (address, *shape, dtype)
        view = self._views.get(key)
        if view is None:
            import cupy

            memory = cupy.cuda.MemoryPointer(self._device.data.mem, address - int(self._device.data.mem.ptr))
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = cupy.ndarray(tuple(shape), dtype, memory)
        return view
