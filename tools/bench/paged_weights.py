"""The weights that tools/bench/paging.py measures with: one layer's experts as tensors, in pages and in buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rimuru.base.units import align_up
from rimuru.memory.specs import ExpertLayerLayout, ProjectionLayout

PAGE_BYTES = 432 * 1024
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
