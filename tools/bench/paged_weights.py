"""The weights that tools/bench/paging.py measures with: one layer's experts as tensors, in pages and in buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rimuru.base.units import align_up
from rimuru.memory.allocator import PageAllocator
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout, KvGroupLayout, KvLayout, PoolLayout, ProjectionLayout

PAGE_BYTES = 432 * 1024
N_MOVES = 3000
SHARES = (0.5, 0.75, 1.0)
"""Of the experts in pool pages."""

LOOKED_UP = 0.0
"""In place of a share: all in the contiguous tensors, through a table."""


def first_rows(layout: ExpertLayerLayout) -> tuple[dict[str, int], int]:
    """Where the tensors gate, up, down begin in one block of memory, in rows of their own; and the block's bytes."""
    at = 0
    starts: dict[str, int] = {}
    for p in layout.projections:
        row = at // p.row_bytes if at % p.row_bytes == 0 else align_up(at, 16 * p.row_bytes) // p.row_bytes
        starts[p.name] = row
        at = (row + layout.n_experts * p.n_rows) * p.row_bytes
    return starts, align_up(at, 8)


def places_in_tensors(layout: ExpertLayerLayout) -> np.ndarray:
    """Where in `first_rows`'s block the parts of experts begin that are pages elsewhere: bytes, [experts, pages]."""
    places = np.zeros((layout.n_experts, layout.n_pages), np.int64)
    starts, _ = first_rows(layout)
    for p in layout.projections:
        for page, rows in page_parts(p):
            places[:, page] = (starts[p.name] + np.arange(layout.n_experts) * p.n_rows + rows.start) * p.row_bytes
    return places


def page_parts(p: ProjectionLayout) -> Iterator[tuple[int, slice]]:
    """(page of the expert, its rows) of a projection."""
    for j in range(p.n_pages):
        yield p.first_page + j, slice(j * p.rows_per_page, min((j + 1) * p.rows_per_page, p.n_rows))


def pages_after_moves(rng: np.random.Generator, n_layers: int, n_experts: int, n_pages: int) -> tuple[np.ndarray, int]:
    """(pages of each layer's experts, pages of their pool) as the engine's allocator gives them after a long run of
    moves: requests take pages of random experts for their keys and values and leave again, and experts come back. As
    many other layers, whose experts have a page more or less, share the pool (Q4_K_M), which has room for one expert in
    twenty more."""
    sizes = np.repeat([n_pages, n_pages ^ 1], n_layers * n_experts)
    n_pool = int(sizes.sum() * 1.05)
    experts = ExpertLayout(PAGE_BYTES, (ExpertLayerLayout(0, len(sizes), n_pages, ()),))
    kv = KvLayout(PAGE_BYTES // 8, (KvGroupLayout((0,), 1, 8, 8, 4, None, 2),), "expert")
    allocator = PageAllocator(PoolLayout(PAGE_BYTES, experts, kv, None, None, 0), n_pool)
    held: dict[int, np.ndarray] = {}

    def bring_in(wanted: np.ndarray) -> None:
        for expert in wanted.tolist():
            pages = None if expert in held else allocator.allocate_expert(int(sizes[expert]))
            if pages is not None:
                held[expert] = pages

    bring_in(np.arange(len(sizes)))
    requests: list[np.ndarray] = []
    for _ in range(N_MOVES):
        n_wanted = int(rng.integers(1, n_pool))  # eight of them are an expert page
        while requests and sum(map(len, requests)) + n_wanted > int(rng.uniform(0.2, 0.8) * 8 * n_pool):
            allocator.free("kv", requests.pop(int(rng.integers(len(requests)))))
        while not allocator.can_allocate("kv", n_wanted):
            allocator.free("expert", held.pop(list(held)[int(rng.integers(len(held)))]))
        taken = allocator.allocate("kv", n_wanted)
        assert taken is not None
        requests.append(taken)
        bring_in(rng.integers(0, len(sizes), 64))
    for taken in requests:
        allocator.free("kv", taken)
    bring_in(np.arange(len(sizes)))
    return np.stack([held[i] for i in range(n_layers * n_experts)]).reshape(n_layers, n_experts, n_pages), n_pool


class Weights:
    """One layer's experts three times: as tensors, in pool pages, and in buffers."""

    def __init__(self, ops: Any, layout: ExpertLayerLayout, samples: dict[str, Any], pool: Any, pages: Any, seed: int):
        import cupy

        rng = np.random.default_rng(seed)
        n = layout.n_experts
        starts, n_bytes = first_rows(layout)
        tensors = cupy.empty(n_bytes, np.uint8)
        self.tensors = tensors.view(np.int64)
        self.layout, ranks = layout, rng.permutation(n)
        self._buffer = cupy.empty((n, layout.n_pages, PAGE_BYTES), np.uint8)
        for p in layout.projections:
            start = starts[p.name] * p.row_bytes
            rows = tensors[start : start + n * p.n_rows * p.row_bytes].reshape(n, p.n_rows, p.row_bytes)
            sample = samples[p.name]
            for expert in range(n):
                shift = int(rng.integers(p.n_rows))
                rows[expert] = cupy.roll(sample[expert % len(sample)], shift, axis=0)
                for j, part in page_parts(p):
                    data = rows[expert, part].reshape(-1)
                    pool[int(pages[expert, j]), : data.size] = data
                    self._buffer[expert, j, : data.size] = data
        offsets = np.arange(layout.n_pages, dtype=np.int64) * PAGE_BYTES
        in_pool = int(pool.data.ptr) + pages.astype(np.int64) * PAGE_BYTES
        in_buffers = int(self._buffer.data.ptr) + np.arange(n)[:, None] * layout.n_pages * PAGE_BYTES + offsets
        self.tables = {
            share: ops.upload(np.where((ranks < round(share * n))[:, None], in_pool, in_buffers)) for share in SHARES
        }
        self.tables[LOOKED_UP] = ops.upload(int(tensors.data.ptr) + places_in_tensors(layout))

    def in_host_memory(self, ops: Any, copier: Any) -> Any:
        """A table of copies in pinned memory."""
        import cupy

        host = copier.alloc_host(self._buffer.nbytes)
        table = np.arange(self.layout.n_experts)[:, None] * self.layout.n_pages + np.arange(self.layout.n_pages)
        for p in self.layout.projections:
            start = first_rows(self.layout)[0][p.name] * p.row_bytes
            n_bytes = self.layout.n_experts * p.n_rows * p.row_bytes
            rows = cupy.asnumpy(self.tensors.view(np.uint8)[start : start + n_bytes])
            target = host.reshape(self.layout.n_experts, self.layout.n_pages, PAGE_BYTES)
            for j, part in page_parts(p):
                data = rows.reshape(self.layout.n_experts, p.n_rows, -1)[:, part].reshape(self.layout.n_experts, -1)
                target[:, j, : data.shape[1]] = data
        return ops.upload(int(host.ctypes.data) + table.astype(np.int64) * PAGE_BYTES)
