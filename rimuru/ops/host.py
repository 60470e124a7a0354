"""Host memory: bytes by address, the stored number types, the pool's range and the copier of host backends."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.base.units import MIB, align_up, human_bytes

_HUGE_PAGE_BYTES = 2 * MIB
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Older Pythons do not name it. Without it Linux refuses ranges larger than RAM, also those that are never touched."""


def bytes_at(address: int, n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] on the memory at an address, without a copy. The caller keeps that memory alive."""
    if address == 0:
        raise AuditError(f"a view of {n_bytes} bytes was asked for at address 0")
    return np.frombuffer(memoryview((ctypes.c_uint8 * n_bytes).from_address(address)), dtype=np.uint8)


def elements_at(address: int, n_elements: int, element: str) -> np.ndarray:
    """The stored elements at an address, without a copy: float32, float16, or uint16 for bf16."""
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[element]
    return bytes_at(address, n_elements * np.dtype(dtype).itemsize).view(dtype)


def decode(stored: np.ndarray, element: str) -> np.ndarray:
    """Stored elements as float32 (exact)."""
    if element == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def encode(values: np.ndarray, element: str) -> np.ndarray:
    """Values in a stored type, rounded to nearest even: float32, float16, or uint16 for bf16."""
    if element == "f32":
        return values.astype(np.float32)
    if element == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


class HostPool:
    """The pool's memory in RAM: a reserved range whose pages become real when they are first touched.

        base                      base + mapped_bytes            base + limit_bytes
        | mapped: content is kept | given back to the system     |

    Growing and shrinking move no address. `limit_bytes` cost address space only.
    """

    def __init__(self, n_bytes: int, limit_bytes: int) -> None:
        self.limit_bytes = max(n_bytes, limit_bytes)
        reserved = align_up(max(self.limit_bytes, 1), mmap.PAGESIZE) + _HUGE_PAGE_BYTES
        try:
            if hasattr(mmap, "MAP_ANONYMOUS"):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
                self._range = mmap.mmap(-1, reserved, flags=flags)
            else:
                self._range = mmap.mmap(-1, reserved)
        except (OSError, OverflowError):
            raise NotEnoughMemoryError(
                f"the system refuses a range of {human_bytes(reserved)} for the pool; give a smaller --memory"
            ) from None
        self._bytes: np.ndarray | None = np.frombuffer(self._range, np.uint8)
        start = int(self._bytes.ctypes.data)
        self.base = align_up(start, _HUGE_PAGE_BYTES)
        self._skip_bytes = self.base - start
        self._mapped_bytes = n_bytes
        self._advise("MADV_HUGEPAGE", 0, self.limit_bytes)

    @property
    def mapped_bytes(self) -> int:
        return self._mapped_bytes

    def resize(self, n_bytes: int) -> None:
        """Change the mapped length; what is cut off goes back to the system and reads as zero if mapped again."""
        if n_bytes > self.limit_bytes:
            raise NotEnoughMemoryError(
                f"the pool was reserved for {human_bytes(self.limit_bytes)} and cannot grow to {human_bytes(n_bytes)};"
                " restart with a larger --memory"
            )
        if n_bytes < self._mapped_bytes:
            self._advise("MADV_DONTNEED", n_bytes, self._mapped_bytes)
        self._mapped_bytes = n_bytes

    def _advise(self, advice: str, start: int, stop: int) -> None:
        """madvise on the whole system pages inside [start, stop) of the pool, where the platform knows the advice."""
        code = getattr(mmap, advice, None)
        first = align_up(self._skip_bytes + start, mmap.PAGESIZE)
        n_bytes = align_up(self._skip_bytes + stop, mmap.PAGESIZE) - first
        if code is None or n_bytes <= 0:
            return
        try:
            self._range.madvise(code, first, n_bytes)
        except OSError:
            return  # an advice that the kernel does not take costs speed or memory, never correctness

    def close(self) -> None:
        """Give the memory back. Views of it must be gone; where some are not, it goes with the last of them."""
        self._bytes = None
        try:
            self._range.close()
        except BufferError:
            self._advise("MADV_DONTNEED", 0, self._mapped_bytes)
        self._mapped_bytes = 0


class HostCopier:
    """The Copier of host backends: every copy has happened when the call returns; a marker counts the copies."""

    def __init__(self) -> None:
        self._n_copies = 0

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        """uint8 [n_bytes], aligned to a system page so that files can be read into it directly."""
        if n_bytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)

    def is_pinned(self, array: np.ndarray) -> bool:
        """The device is the host."""
        return True

    def copy_in(self, address: int, source: np.ndarray) -> None:
        flat = source.reshape(-1).view(np.uint8)
        bytes_at(address, flat.size)[:] = flat
        self._n_copies += 1

    def copy_out(self, target: np.ndarray, address: int) -> None:
        flat = target.reshape(-1).view(np.uint8)
        flat[:] = bytes_at(address, flat.size)
        self._n_copies += 1

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        bytes_at(target, n_bytes)[:] = bytes_at(source, n_bytes)
        self._n_copies += 1

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        bytes_at(address, n_bytes)[:] = value
        self._n_copies += 1

    def record(self) -> int:
        return self._n_copies

    def done(self, marker: int) -> bool:
        return marker <= self._n_copies

    def close(self) -> None:
        """Memory is RAM, which nothing has to unpin."""

    def wait(self, marker: int | None = None) -> None:
        """Nothing is ever pending."""
