"""Launchers of the sort of assignments by expert (cuda_src/moe/token_sort.cu)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.ops.base import Array, ExpertTable
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.routing import MAX_EXPERTS

if TYPE_CHECKING:
    from rimuru.ops.cuda.moe import ExpertBuffers

THREADS = 1024
"""Assignments of a block."""

_sort = Kernel(
    "moe/token_sort.cu",
    "moe_sort",
    "ids: i32*, active: bool*, order: i32*, items: i64*, addresses: i64*, n_pages: i32, n: i32, n_experts: i32,"
    "item_tokens: i32, max_items: i32",
)
_sort_count = Kernel("moe/token_sort.cu", "moe_sort_count", "ids: i32*, block_counts: i32*, n: i32, n_experts: i32")
_sort_scan = Kernel(
    "moe/token_sort.cu",
    "moe_sort_scan",
    "block_counts: i32*, active: bool*, items: i64*, addresses: i64*, n_pages: i32, n_blocks: i32, n_experts: i32,"
    "item_tokens: i32, max_items: i32",
)
_sort_place = Kernel(
    "moe/token_sort.cu", "moe_sort_place", "ids: i32*, block_places: i32*, order: i32*, n: i32, n_experts: i32"
)
KERNELS = (_sort, _sort_count, _sort_scan, _sort_place)


def sort_assignments(
    ids: Array, active: Array | None, table: ExpertTable, item_tokens: int, listed: bool, buffers: ExpertBuffers
) -> int:
    """Fill order and items of `buffers`, where `listed` with the pages of each item's expert; returns the number of
    items in the worst case."""
    n, n_experts = ids.size, table.layout.n_experts
    pages = (table.addresses, table.layout.n_pages if listed else 0)
    if n_experts > MAX_EXPERTS:
        raise RimuruError(f"{n_experts} experts in a layer: the CUDA kernels take up to {MAX_EXPERTS}")
    max_items = min(n, n_experts + n // item_tokens)
    if n <= THREADS:
        _sort(
            (1,), (THREADS,),
            (ids, active, buffers.order, buffers.items, *pages, n, n_experts, item_tokens, max_items),
        )  # fmt: skip
    else:
        blocks = ceil_div(n, THREADS)
        counts = buffers.block_counts
        _sort_count((blocks,), (THREADS,), (ids, counts, n, n_experts))
        _sort_scan((1,), (THREADS,), (counts, active, buffers.items, *pages, blocks, n_experts, item_tokens, max_items))
        _sort_place((blocks,), (THREADS,), (ids, counts, buffers.order, n, n_experts))
    return max_items
