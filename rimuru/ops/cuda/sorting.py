"""Launchers of the sort of assignments by expert (cuda_src/moe/token_sort.cu)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.ops.base import Array
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.routing import MAX_EXPERTS

if TYPE_CHECKING:
    from rimuru.ops.cuda.moe import ExpertBuffers

THREADS = 1024
"""Assignments of a block."""

_sort = Kernel(
    "moe/token_sort.cu",
    "moe_sort",
    "ids: i32*, active: bool*, order: i32*, items: *, n_items: i32*, n: i32, n_experts: i32, item_tokens: i32",
)
_sort_count = Kernel("moe/token_sort.cu", "moe_sort_count", "ids: i32*, block_counts: i32*, n: i32, n_experts: i32")
_sort_scan = Kernel(
    "moe/token_sort.cu",
    "moe_sort_scan",
    "block_counts: i32*, active: bool*, items: *, n_items: i32*, n_blocks: i32, n_experts: i32, item_tokens: i32",
)
_sort_place = Kernel(
    "moe/token_sort.cu", "moe_sort_place", "ids: i32*, block_places: i32*, order: i32*, n: i32, n_experts: i32"
)
KERNELS = (_sort, _sort_count, _sort_scan, _sort_place)


def sort_assignments(ids: Array, active: Array | None, n_experts: int, item_tokens: int, buffers: ExpertBuffers) -> int:
    """Fill order and items of `buffers`; returns the number of items in the worst case."""
    n = ids.size
    if n_experts > MAX_EXPERTS:
        raise RimuruError(f"{n_experts} experts in a layer: the CUDA kernels take up to {MAX_EXPERTS}")
    if n <= THREADS:
        outputs = (buffers.order, buffers.items, buffers.n_items)
        _sort((1,), (THREADS,), (ids, active, *outputs, n, n_experts, item_tokens))
    else:
        blocks = ceil_div(n, THREADS)
        counts = buffers.block_counts
        _sort_count((blocks,), (THREADS,), (ids, counts, n, n_experts))
        scan = (counts, active, buffers.items, buffers.n_items, blocks, n_experts, item_tokens)
        _sort_scan((1,), (THREADS,), scan)
        _sort_place((blocks,), (THREADS,), (ids, counts, buffers.order, n, n_experts))
    return min(n, n_experts + n // item_tokens)
