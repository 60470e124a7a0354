"""Launchers of the residency step (cuda_src/moe/residency.cu)."""

from __future__ import annotations

from typing import Any

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
    "copies: i64*, now: bool*, later: bool*, log: i64*,"
    "n_buffers: i32, buffer_pages: i32, n_tokens: i32, top_k: i32, n_experts: i32, n_pages: i32, page_bytes: i32,"
    "slot: i32, foretells: i32",
)
set_places_kernel = Kernel(
    "moe/residency.cu",
    "moe_set_places",
    "commands: i64*, addresses: i64*, homes: i64*, pages: i64*, holders: i32*, place_of: i32*, n_commands: i32,"
    "max_pages: i32, page_bytes: i32",
)
bring_kernel = Kernel("moe/residency.cu", "moe_bring", "copies: i64*, buffer_pages: i32, n_pages: i32, page_bytes: i32")
border_kernel = Kernel("moe/residency.cu", "moe_border", "n_threads: i32")
KERNELS = (fetch_kernel, set_places_kernel, bring_kernel, border_kernel)


def fetch_experts(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_experts."""
    _fetch(ids, positions, places, FETCH_BLOCKS, (None, None, None), False)


def plan_fetch(ids: Array, positions: Array, places: LayerPlaces, foretells: bool = False) -> None:
    """All but the copies of fetch_experts, or of fetch_ahead: they are listed in places.copies."""
    _fetch(ids, positions, places, 1, (places.copies, places.now, places.later), foretells)


def bring(places: LayerPlaces, stream: Any = None) -> None:
    """The copies that plan_fetch has listed."""
    bring_kernel(
        (FETCH_BLOCKS,),
        (_FETCH_THREADS,),
        (places.copies, places.buffers.shape[1], places.layout.n_pages, places.page_bytes),
        stream=stream,
    )


def _fetch(
    ids: Array, positions: Array, places: LayerPlaces, n_blocks: int, outputs: tuple[Any, Any, Any], foretells: bool
) -> None:
    n_tokens, top_k = ids.shape
    layout = places.layout
    if layout.n_experts > MAX_EXPERTS or places.page_bytes % 16:
        raise RimuruError(
            f"block {layout.layer}: {layout.n_experts} experts in pages of {places.page_bytes} bytes cannot be fetched"
        )
    fetch_kernel(
        (n_blocks,),
        (_FETCH_THREADS,),
        (
            ids, positions, places.addresses, places.homes, places.pages, places.holders, places.place_of,
            places.last_used, places.scores, places.counts, places.buffered, places.totals, places.control,
            places.buffers, *outputs, places.log, *places.buffers.shape, n_tokens, top_k, layout.n_experts,
            layout.n_pages, places.page_bytes, places.slot, int(foretells),
        ),
    )  # fmt: skip


class Aside:
    """Copies of missed experts on a stream of their own, beside what the computing stream does meanwhile. Where that
    one is captured, the stream's work becomes a branch of the graph."""

    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._planned, self._brought = (cupy.cuda.Event(disable_timing=True) for _ in range(2))

    def fetch(self, ids: Array, positions: Array, places: LayerPlaces, stream: Any, foretells: bool = False) -> None:
        """See Ops.fetch_aside and fetch_ahead; `stream` is the computing one."""
        plan_fetch(ids, positions, places, foretells)
        self._planned.record(stream)
        self._stream.wait_event(self._planned)
        bring(places, self._stream)
        self._brought.record(self._stream)
        border_kernel((1,), (1,), (1,), stream=stream)

    def join(self, stream: Any) -> None:
        """See Ops.join_fetch. What follows is launched to start while its predecessor ends, of which it must have but
        one: moe_border, which waits for both."""
        stream.wait_event(self._brought)
        border_kernel((1,), (1,), (1,), stream=stream)


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
