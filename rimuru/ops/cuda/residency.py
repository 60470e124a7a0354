"""Launchers of the residency step (cuda_src/moe/residency.cu)."""

from __future__ import annotations

from rimuru.base.errors import RimuruError
from rimuru.ops.base import Array
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.routing import MAX_EXPERTS
from rimuru.ops.places import ExpertPlaces, LayerPlaces

FETCH_BLOCKS = 64
"""Blocks that share the copies: 1 MB of reads under way."""
_FETCH_THREADS = 256

fetch_kernel = Kernel(
    "moe/residency.cu",
    "moe_fetch",
    "ids: i32*, positions: i32*, addresses: i64*, homes: i64*, pages: i64*, holders: i32*, place_of: i32*,"
    "last_used: i32*, scores: f32*, counts: i32*, buffered: i32*, totals: i32*, control: i32*, buffers: i64*,"
    "n_buffers: i32, buffer_pages: i32, n_tokens: i32, top_k: i32, n_experts: i32, n_pages: i32, page_bytes: i32",
)
set_places_kernel = Kernel(
    "moe/residency.cu",
    "moe_set_places",
    "commands: i64*, addresses: i64*, homes: i64*, pages: i64*, holders: i32*, place_of: i32*, n_commands: i32,"
    "max_pages: i32, page_bytes: i32",
)
KERNELS = (fetch_kernel, set_places_kernel)


def fetch_experts(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_experts."""
    n_tokens, top_k = ids.shape
    layout = places.layout
    if layout.n_experts > MAX_EXPERTS or places.page_bytes % 16:
        raise RimuruError(
            f"block {layout.layer}: {layout.n_experts} experts in pages of {places.page_bytes} bytes cannot be fetched"
        )
    fetch_kernel(
        (FETCH_BLOCKS,),
        (_FETCH_THREADS,),
        (
            ids, positions, places.addresses, places.homes, places.pages, places.holders, places.place_of,
            places.last_used, places.scores, places.counts, places.buffered, places.totals, places.control,
            places.buffers, *places.buffers.shape, n_tokens, top_k, layout.n_experts, layout.n_pages,
            places.page_bytes,
        ),
    )  # fmt: skip


def set_places(commands: Array, n_commands: int, places: ExpertPlaces) -> None:
    """See Ops.set_places."""
    set_places_kernel(
        (1,),
        (32,),
        (
            commands, places.addresses, places.homes, places.pages, places.holders, places.place_of, n_commands,
            commands.shape[1] - 4, places.page_bytes,
        ),
    )  # fmt: skip
