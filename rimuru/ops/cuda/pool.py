"""The pool's memory on a reserved range of device addresses, mapped and unmapped piece by piece.

    base                    base + mapped_bytes            base + limit
    | piece | piece | piece | reserved, not backed ...     |

Growing maps pieces at the end, shrinking unmaps them; no address changes, so tables and captured graphs stay valid.
Where the driver has no such functions the pool is one plain allocation of the full limit, which never changes.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Any

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import MIB, align_up, ceil_div, human_bytes

logger = logging.getLogger(__name__)

_MAX_PIECES = 2048
_PINNED_ALLOCATION, _DEVICE_LOCATION, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DriverError(Exception):
    """A driver function failed; `code` is its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with CUDA error {code}")
        self.code = code


_DRIVER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemAddressFree": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemCreate": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    "cuMemMap": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemSetAccess": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
}


class Driver:
    """The driver's virtual memory functions. Raises OSError or AttributeError where they do not exist."""

    def __init__(self, device_id: int, library: Any = None) -> None:
        if library is None:
            library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._functions: dict[str, Any] = {}
        for name, arguments in _DRIVER_ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._location = _Location(_DEVICE_LOCATION, device_id)
        self._properties = _AllocationProperties(type=_PINNED_ALLOCATION, location=self._location)
        self._access = _Access(self._location, _READ_WRITE)

    def _call(self, name: str, *args: Any) -> None:
        code = self._functions[name](*args)
        if code != 0:
            raise DriverError(name, code)

    def granule_bytes(self) -> int:
        """Smallest unit of mapping."""
        granule = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), 0)
        return granule.value

    def reserve(self, n_bytes: int) -> int:
        base = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(base), n_bytes, 0, 0, 0)
        return base.value

    def free_range(self, base: int, n_bytes: int) -> None:
        self._call("cuMemAddressFree", base, n_bytes)

    def map(self, address: int, n_bytes: int) -> int:
        """Back a part of a reserved range with new memory; returns its handle. Undone whole where a part fails."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), n_bytes, ctypes.byref(self._properties), 0)
        mapped = False
        try:
            self._call("cuMemMap", address, n_bytes, 0, handle.value, 0)
            mapped = True
            self._call("cuMemSetAccess", address, n_bytes, ctypes.byref(self._access), 1)
        except DriverError:
            if mapped:
                self._call("cuMemUnmap", address, n_bytes)
            self._call("cuMemRelease", handle.value)
            raise
        return handle.value

    def unmap(self, address: int, n_bytes: int, handle: int) -> None:
        self._call("cuMemUnmap", address, n_bytes)
        self._call("cuMemRelease", handle)


class MappedPool:
    """PoolMemory on a reserved range. `mapped_bytes` is a whole number of pieces, at least what was asked for."""

    def __init__(self, driver: Driver, n_bytes: int, limit_bytes: int, synchronize: Any) -> None:
        self._driver, self._synchronize = driver, synchronize
        granule = driver.granule_bytes()
        limit_bytes = max(n_bytes, limit_bytes, 1)
        self.piece_bytes = align_up(max(granule, 2 * MIB, ceil_div(limit_bytes, _MAX_PIECES)), granule)
        self.limit_bytes = align_up(limit_bytes, self.piece_bytes)
        self.base = driver.reserve(self.limit_bytes)
        self._handles: list[int] = []
        self.resize(n_bytes)

    @property
    def mapped_bytes(self) -> int:
        return len(self._handles) * self.piece_bytes

    def resize(self, n_bytes: int) -> None:
        """Map or unmap pieces at the end. Raises NotEnoughMemoryError, and changes nothing, where memory is short."""
        wanted = ceil_div(n_bytes, self.piece_bytes)
        if wanted * self.piece_bytes > self.limit_bytes:
            raise NotEnoughMemoryError(
                f"the pool was reserved for {human_bytes(self.limit_bytes)} and cannot grow to {human_bytes(n_bytes)};"
                " restart with a larger --memory"
            )
        before = len(self._handles)
        if wanted < before:
            self._synchronize()  # no kernel may still read what goes
        while len(self._handles) > wanted:
            self._unmap_last()
        while len(self._handles) < wanted:
            try:
                self._handles.append(self._driver.map(self.base + self.mapped_bytes, self.piece_bytes))
            except DriverError as error:
                while len(self._handles) > before:
                    self._unmap_last()
                if error.code != _OUT_OF_MEMORY:
                    raise
                raise NotEnoughMemoryError(
                    f"the GPU has no {human_bytes(n_bytes)} free for the pool; use a smaller --memory or close what"
                    " else uses the GPU"
                ) from error

    def _unmap_last(self) -> None:
        handle = self._handles[-1]
        self._driver.unmap(self.base + self.mapped_bytes - self.piece_bytes, self.piece_bytes, handle)
        self._handles.pop()

    def close(self) -> None:
        """Give everything back."""
        if self.base:
            self.resize(0)
            self._driver.free_range(self.base, self.limit_bytes)
            self.base = 0


class PlainPool:
    """PoolMemory as one allocation of the full limit, where the driver cannot map."""

    def __init__(self, limit_bytes: int) -> None:
        import cupy

        try:
            self._memory: Any = cupy.cuda.Memory(align_up(limit_bytes, 2 * MIB))
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise NotEnoughMemoryError(
                f"the GPU has no {human_bytes(limit_bytes)} free for the pool; use a smaller --memory"
            ) from error
        self.base = int(self._memory.ptr)

    @property
    def mapped_bytes(self) -> int:
        return int(self._memory.size)

    def resize(self, n_bytes: int) -> None:
        """The allocation stays as it is; a larger one is refused."""
        if n_bytes > self.mapped_bytes:
            raise NotEnoughMemoryError(
                f"the pool is one allocation of {human_bytes(self.mapped_bytes)} and cannot grow to"
                f" {human_bytes(n_bytes)}; restart with a larger --memory"
            )

    def close(self) -> None:
        self._memory = None
        self.base = 0


def reserve(n_bytes: int, limit_bytes: int, device_id: int = 0) -> MappedPool | PlainPool:
    """The pool's memory: mapped pieces where the driver can, else one allocation, said in a log line."""
    import cupy

    cupy.cuda.runtime.free(0)  # makes the context that the driver's functions work in
    try:
        driver = Driver(device_id)
        return MappedPool(driver, n_bytes, limit_bytes, cupy.cuda.runtime.deviceSynchronize)
    except (OSError, AttributeError, DriverError) as error:
        logger.warning("the driver cannot map memory piece by piece (%s): the pool is one fixed allocation", error)
        return PlainPool(max(n_bytes, limit_bytes))
