"""The kernels of experts (cuda_src/moe): what they are compiled with, and which shape fits how many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rimuru.base.units import align_up, ceil_div
from rimuru.formats.quants import QuantFormat
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.matmul import (
    TILE_THREADS,
    ring_pitch,
    strip_chunk,
    strip_defines,
    strip_shared_bytes,
    tile_shared_bytes,
)

MAX_STRIP_LOAD = 32
"""Up to this many, tensor cores with weights decoded in registers. (Both measured on an H200: tools/LOG.md.)"""

STRIP_WARPS = 8
"""Warps of a block of the strip kernels, 16 weight rows each."""

_K_STRIPS, _K_WIDE_STRIPS = {"q4_k": (1, 768), "q6_k": (1, 768)}, {"q4_k": (1, 512), "q6_k": (1, 512)}
_DOWN_ONLY_STRIPS = {
    8: {"q5_0": (1, 768), "q8_0": (1, 512)},
    16: {"q5_0": (1, 512), "q8_0": (1, 512)},
    32: {"q5_0": (2, 512), "q8_0": (2, 512)},
}
UP_RINGS: dict[int, dict[str, tuple[int, int]]] = {8: _K_STRIPS, 16: _K_WIDE_STRIPS, 32: _K_WIDE_STRIPS}
"""Strips of gate_up with packed weights by way of shared memory, by tokens and type: most steps a warp has there at
a time, and threads that a multiprocessor must be able to hold. Other types have weights in registers: measured were
Qwen3-30B and, for Q5_0 and Q8_0 in down, DeepSeek-V2-Lite, on an H200 (tools/LOG.md). With 8 tokens more threads hide
more than more steps under way."""

DOWN_RINGS: dict[int, dict[str, tuple[int, int]]] = {n: rings | _DOWN_ONLY_STRIPS[n] for n, rings in UP_RINGS.items()}
"""The same of down: its rows may be no multiple of 256, which K types need; then they are Q5_0 and Q8_0 (V2-Lite)."""

MAX_SHARED_BYTES = 99 * 1024
"""Shared memory of a block on every supported card."""

H200_SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor of the card on which rings were measured."""

_RESERVED_SHARED_BYTES = 1024  # of every block, by the driver

DOWN_WARPS = 8
SPAN_FORMATS = ("q4_k", "q5_k", "q6_k")
"""Types of which the integer kernels take 64 elements of a row at a time."""

LEAN_FORMATS = ("q6_k", "q4_0")
"""Types whose down kernel of single assignments does with 64 registers, if it has to: a third more threads."""

_ITEMS = "items: i64*, order: i32*, ids: i32*, active: bool*, n_experts: i32, top_k: i32"
_PAGES = "addresses: i64*, n_pages: i32"
_UP_PAGES = (
    "gate_first_page: i32, gate_rows_per_page: i32, gate_page_factor: i32, gate_row_bytes: i32,"
    "up_first_page: i32, up_rows_per_page: i32, up_page_factor: i32, up_row_bytes: i32"
)
_DOWN_PAGES = "first_page: i32, rows_per_page: i32, page_factor: i32, row_bytes: i32"

_SCALED: tuple[dict[str, int | str], dict[str, int | str]] = ({}, {"EXPERT_FACTORS": 1})
_LISTED: tuple[dict[str, int | str], dict[str, int | str]] = ({}, {"ITEM_PAGES": 1})


@cache
def up_kernel(
    gate: str | None, up: str, tile: int, lanes: int, rows: int, resident: int = 512, scaled: bool = False,
    listed: bool = False,
) -> Kernel:  # fmt: skip
    """gate_up for few tokens; gate None = no gate. resident: threads that a multiprocessor must be able to hold.
    scaled: the experts have factors. listed: every item has a list of its expert's pages."""
    signature = (
        f"x_f32: f32*, x_values: i8*, x_scales: f32*, x_sums: i32*, width: i32, {_ITEMS}, {_PAGES}, {_UP_PAGES},"
        "gate_factors: f32*, up_factors: f32*, gate_bias: f32*, up_bias: f32*, hidden: f32*,"
        "act_values: i8*, act_scales: f32*, act_sums: i32*, n_hidden: i32, activation: i32"
    )
    defines: dict[str, int | str] = {
        "FORMAT_GATE": gate or up, "FORMAT_UP": up, "GATED": int(gate is not None), "TOKEN_TILE": tile,
        "ROW_LANES": lanes, "LANE_ROWS": rows, "RESIDENT_THREADS": resident,
    }  # fmt: skip
    defines |= _SCALED[scaled] | _LISTED[listed]
    return Kernel("moe/moe_decode.cu", "moe_gate_up", signature, defines)


@cache
def down_kernel(
    down: str, tile: int, lanes: int, rows: int, resident: int = 512, scaled: bool = False, listed: bool = False
) -> Kernel:
    """down for few tokens; the rest as in up_kernel."""
    signature = (
        f"h_f32: f32*, h_values: i8*, h_scales: f32*, h_sums: i32*, n_hidden: i32, {_ITEMS}, {_PAGES}, {_DOWN_PAGES},"
        "factors: f32*, bias: f32*, out: f32*, n_out: i32"
    )
    defines: dict[str, int | str] = {
        "FORMAT_DOWN": down, "TOKEN_TILE": tile, "ROW_LANES": lanes, "LANE_ROWS": rows, "BLOCK_WARPS": DOWN_WARPS,
        "RESIDENT_THREADS": resident,
    }  # fmt: skip
    defines |= _SCALED[scaled] | _LISTED[listed]
    return Kernel("moe/moe_decode.cu", "moe_down", signature, defines)


@cache
def down_sum_kernel(
    down: str, lanes: int, rows: int, resident: int, top_k: int, scaled: bool = False, listed: bool = False
) -> Kernel:
    """down and the weighted sum for few tokens, each assignment by itself; as many warps as have equally many slots."""
    warps = ceil_div(top_k, ceil_div(top_k, DOWN_WARPS))
    signature = (
        "h_f32: f32*, h_values: i8*, h_scales: f32*, h_sums: i32*, n_hidden: i32, items: i64*, ids: i32*,"
        f"n_experts: i32, top_k: i32, {_PAGES}, {_DOWN_PAGES}, factors: f32*, bias: f32*,"
        "weights: f32*, out: f32*, n_out: i32, add: i32, scale: f32"
    )
    defines: dict[str, int | str] = {
        "FORMAT_DOWN": down, "TOKEN_TILE": 1, "ROW_LANES": lanes, "LANE_ROWS": rows, "BLOCK_WARPS": warps,
        "RESIDENT_THREADS": resident,
    }  # fmt: skip
    defines |= _SCALED[scaled] | _LISTED[listed]
    return Kernel("moe/moe_decode.cu", "moe_down_sum", signature, defines)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor-core kernel's block: its source, weight rows and tokens, and what it is compiled and launched with."""

    family: str  # "strip" or "tile": moe/moe_<family>.cu
    rows: int
    tokens: int
    warps_k: int = 1
    """Strips: warps that share 16 rows."""

    staged: bool = False
    """Strips: activations go through shared memory."""

    ahead: bool = False
    """Strips: packed weights are loaded a step ahead."""

    resident: int = 512
    """Strips: threads that a multiprocessor must be able to hold."""

    ring: int = 0
    """Strips: steps of packed weights that a warp has under way in shared memory; 0: in registers."""

    chunk: int = 0
    """Strips with a ring: pieces of K whose activations are in shared memory at a time."""

    pitch: int = 0
    """Strips with a ring: bytes from row to row."""

    def defines(self) -> dict[str, int | str]:
        if self.family == "strip":
            defines = strip_defines(self.tokens, self.rows // 16, self.warps_k, self.staged, self.ahead)
            defines |= {"STRIP_RESIDENT": self.resident}
            return defines | {"STRIP_RING": self.ring, "CHUNK_PIECES": self.chunk} if self.ring else defines
        return {"TILE_N": self.rows, "TILE_M": self.tokens}

    @property
    def threads(self) -> int:
        return 2 * self.rows * self.warps_k if self.family == "strip" else TILE_THREADS

    @property
    def shared_bytes(self) -> int:
        if self.ring:
            return ring_chunk_bytes(self.tokens, self.chunk) + self.ring * self.rows * self.pitch
        if self.family == "strip":
            return strip_shared_bytes(self.tokens, self.rows // 16, self.warps_k, self.staged)
        return tile_shared_bytes(self.rows, self.tokens)


def up_matrix_shape(load: float) -> Shape:
    """The tensor-core kernel of gate_up for an average number of assignments an expert."""
    return _matrix_shape(load, ahead=True)


def down_matrix_shape(load: float) -> Shape:
    """The tensor-core kernel of down, with the tokens of up_matrix_shape: both go through one list of items."""
    return _matrix_shape(load, ahead=False)  # short rows: fewer registers, so fewer spills, are worth more


def _matrix_shape(load: float, ahead: bool) -> Shape:
    if load <= MAX_STRIP_LOAD:
        tokens = 8 if load <= 6 else 16 if load <= 12 else 32
        return Shape("strip", 16 * STRIP_WARPS, tokens, staged=True, ahead=ahead)
    return Shape("tile", 128, 64 if load <= 80 else 128)


def ring_chunk_bytes(tokens: int, chunk: int) -> int:
    """Shared memory of a strip's activations (STRIP_TOKENS * TOKEN_HALVES of cuda_src/matmul/strip.cuh)."""
    return 2 * tokens * (chunk // 2 * 72 + 32)


def with_ring(
    shape: Shape,
    formats: Sequence[QuantFormat],
    n_in: int,
    rings: Mapping[int, Mapping[str, tuple[int, int]]],
    shared_bytes: int = H200_SHARED_BYTES,
) -> Shape:
    """The shape with packed weights by way of shared memory, where UP_RINGS or DOWN_RINGS say so and a multiprocessor
    with `shared_bytes` holds as many threads with them. (Cards with 100 KiB would hold one block instead of two.)"""
    wanted = [rings[shape.tokens].get(fmt.name, (0, 0)) for fmt in formats] if shape.family == "strip" else []
    most, resident = min(wanted, default=(0, 0))
    if most == 0:
        return shape
    n_pieces, pitch = ceil_div(n_in, 32), max(map(ring_pitch, formats))
    whole = min(strip_chunk(shape.tokens), align_up(n_pieces, 16))
    slots = {
        chunk: (MAX_SHARED_BYTES - ring_chunk_bytes(shape.tokens, chunk)) // (shape.rows * pitch)
        for chunk in (whole, min(whole, 32))
    }
    # Between pieces of K the copies of weights come to a stop, which costs less than one slot in place of several.
    chunk = next((chunk for chunk, n in slots.items() if n >= min(most, 2)), whole)
    ring = min(most, ceil_div(n_pieces, 8), slots[chunk])
    found = replace(shape, ring=ring, chunk=chunk, pitch=pitch, ahead=False, resident=resident)
    n_blocks = resident // shape.threads
    fits = ring > 0 and n_blocks * (found.shared_bytes + _RESERVED_SHARED_BYTES) <= shared_bytes
    return found if fits else shape


@cache
def up_matrix_kernel(gate: str | None, up: str, shape: Shape, scaled: bool = False, listed: bool = False) -> Kernel:
    """gate_up on tensor cores; gate None = no gate."""
    signature = (
        f"x: f16*, x_scales: f32*, width: i32, {_ITEMS}, {_PAGES}, {_UP_PAGES},"
        "gate_factors: f32*, up_factors: f32*, gate_bias: f32*, up_bias: f32*, hidden: f32*,"
        "n_hidden: i32, activation: i32"
    )
    formats: dict[str, int | str] = {"FORMAT_GATE": gate or up, "FORMAT_UP": up, "GATED": int(gate is not None)}
    family, defines = shape.family, formats | shape.defines() | _SCALED[scaled] | _LISTED[listed]
    return Kernel(f"moe/moe_{family}.cu", f"moe_gate_up_{family}", signature, defines)


@cache
def down_matrix_kernel(down: str, shape: Shape, scaled: bool = False, listed: bool = False) -> Kernel:
    """down on tensor cores."""
    signature = (
        f"hidden: f16*, h_scales: f32*, n_hidden: i32, {_ITEMS}, {_PAGES}, {_DOWN_PAGES},"
        "factors: f32*, bias: f32*, out: f32*, n_out: i32"
    )
    family, defines = shape.family, {"FORMAT_DOWN": down} | shape.defines() | _SCALED[scaled] | _LISTED[listed]
    return Kernel(f"moe/moe_{family}.cu", f"moe_down_{family}", signature, defines)
