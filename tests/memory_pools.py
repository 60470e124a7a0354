"""Layouts, memory and a copier for the tests of rimuru.memory: small, made by hand, in plain RAM."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import (
    ConvLayout,
    ExpertLayerLayout,
    ExpertLayout,
    KvGroupLayout,
    KvLayout,
    PoolLayout,
    SsmLayout,
)


def kv_layout(page_bytes: int, parent: str, *groups: tuple[int, int | None]) -> KvLayout:
    """Groups are (page_tokens, window)."""
    return KvLayout(
        page_bytes,
        tuple(KvGroupLayout((g,), 1, 8, 8, tokens, window, 2) for g, (tokens, window) in enumerate(groups)),
        parent,  # type: ignore[arg-type]
    )


def experts(page_bytes: int, *layers: tuple[int, int]) -> ExpertLayout:
    """Layers are (n_experts, n_pages)."""
    return ExpertLayout(page_bytes, tuple(ExpertLayerLayout(i, n, pages, ()) for i, (n, pages) in enumerate(layers)))


def hybrid(n_rows: int = 3) -> PoolLayout:
    """Like Qwen3.5 in small: L1 = lcm(expert, ssm), KV in expert pages, conv rows in SSM pages."""
    return PoolLayout(
        huge_bytes=2304,
        expert=experts(288, (6, 3), (4, 2)),
        kv=kv_layout(48, "expert", (4, None)),
        ssm=SsmLayout(768, 700, (0, 2)),
        conv=ConvLayout(32, 30, n_rows, (0, 1, 2), "ssm"),
        slab_bytes=0,
    )


def moe(*groups: tuple[int, int | None], kv_bytes: int = 64) -> PoolLayout:
    """Experts and KV only: a huge page is an expert page."""
    return PoolLayout(
        512, experts(512, (8, 3), (8, 4)), kv_layout(kv_bytes, "expert", *groups or ((4, None),)), None, None, 0
    )


def dense(*groups: tuple[int, int | None]) -> PoolLayout:
    """No experts and no states: KV pages carved from slabs of a whole huge page."""
    return PoolLayout(1024, None, kv_layout(64, "expert", *groups or ((4, None),)), None, None, 1024)


def dense_hybrid() -> PoolLayout:
    """States but no experts: everything is carved from SSM pages."""
    return PoolLayout(
        768, None, kv_layout(64, "ssm", (4, None)), SsmLayout(384, 384, (0,)), ConvLayout(32, 32, 2, (0, 1), "ssm"), 0
    )


class Ram:
    """Pool memory of n_bytes, able to grow to limit_bytes at the same address."""

    def __init__(self, n_bytes: int, limit_bytes: int | None = None) -> None:
        self.bytes = np.zeros(max(n_bytes, limit_bytes or 0), np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.mapped_bytes = n_bytes

    def resize(self, n_bytes: int) -> None:
        self.mapped_bytes = n_bytes

    def close(self) -> None:
        self.mapped_bytes = 0


class RamCopier:
    """Copies at once. `fail_after` copies, it raises instead."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.n_copies = 0
        self.fail_after = fail_after

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        return np.zeros(n_bytes, np.uint8)

    def copy_in(self, address: int, source: np.ndarray) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def copy_out(self, target: np.ndarray, address: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        if self.fail_after is not None and self.n_copies >= self.fail_after:
            raise OSError("copy failed")
        self.n_copies += 1
        ctypes.memmove(target, source, n_bytes)

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        ctypes.memset(address, value, n_bytes)

    def record(self) -> Any:
        return None

    def done(self, marker: Any) -> bool:
        return True

    def wait(self, marker: Any | None = None) -> None:
        return None


def make_pool(
    layout: PoolLayout, n_huge: int, max_huge: int | None = None, copier: RamCopier | None = None
) -> PagePool:
    """A pool in RAM, with a copier."""
    limit = None if max_huge is None else max_huge * layout.huge_bytes
    return PagePool(Ram(n_huge * layout.huge_bytes, limit), layout, limit, copier or RamCopier())


def page_bytes_of(pool: PagePool, kind: str, page: int) -> np.ndarray:
    """The bytes behind one id (a conv run: all of its rows), as a window on the memory."""
    start = pool.address(kind, page) - pool.base  # type: ignore[arg-type]
    return pool.memory.bytes[start : start + pool.allocator.unit_bytes(kind)]  # type: ignore[attr-defined]
