"""Launchers of experts (cuda_src/moe).

Nothing here waits for the device: grids are sized for the worst case of the routing; blocks without work end at once.

Few assignments an expert, or always where `deterministic` is asked for: integer dot products on 8-bit activations.
More: tensor cores, up to some tens with weights decoded in registers, beyond with weights decoded into shared memory.
One (token, slot) pair is an assignment, a = token * top_k + slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.arch.spec import MoeSpec
from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.memory.specs import ProjectionLayout
from rimuru.ops.base import Act, Array, ExpertTable, MoeScratch
from rimuru.ops.cuda import sorting
from rimuru.ops.cuda.activations import settle
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.matmul import (
    ACT_BLOCK,
    MAX_GEMV_TOKENS,
    make_halves,
    row_lanes,
    scale_halves,
    token_tile,
)
from rimuru.ops.cuda.moe_kernels import (
    DOWN_RINGS,
    DOWN_WARPS,
    H200_SHARED_BYTES,
    LEAN_FORMATS,
    SPAN_FORMATS,
    UP_RINGS,
    Shape,
    down_kernel,
    down_matrix_kernel,
    down_matrix_shape,
    down_sum_kernel,
    up_kernel,
    up_matrix_kernel,
    up_matrix_shape,
    with_ring,
)
from rimuru.ops.cuda.pointwise import ACTIVATION_IDS
from rimuru.ops.cuda.routing import ITEM_WORDS, MAX_ITEM_PAGES

UNSORTED_TOKENS = 12
"""Up to this many tokens every assignment is an item by itself: few experts are met twice, and no sort is needed."""

SPARSE_UNSORTED_TOKENS = {"q4_k": 16, "q6_k": 16}
"""The same for down projections of these types where an expert has at most one assignment on average."""

MAX_DOT_LOAD = 1.5
"""Up to this many assignments an expert on average, integer dot products are used. (Both measured on an H200 with 128
experts of which 8 are chosen: tools/LOG.md.)"""

_MAX_SUM_SLOTS = 32  # experts of a token where down and the weighted sum are one kernel (moe/moe_decode.cu)
_combine = Kernel(
    "moe/combine.cu",
    "moe_combine",
    "y: f32*, weights: f32*, out: f32*, n_tokens: i32, top_k: i32, width: i32, add: i32, scale: f32",
)


COMMON_KERNELS = (*sorting.KERNELS, _combine)
"""Kernels that do not depend on a tensor type or a number of experts."""


@dataclass(slots=True)
class ExpertBuffers:
    """What the expert kernels keep between their launches; A = assignments."""

    hidden: Array  # float32 [A, n_hidden]
    values: Array | None  # int8 [A, n_hidden], the 8-bit form of hidden; None where 32 does not divide n_hidden
    scales: Array | None  # float32 [A, n_hidden / 32]
    sums: Array | None  # int32 [A, n_hidden / 32]
    halves: Array | None  # float16 [A, n_hidden]; None: the tensor-core kernels are not used
    half_scales: Array | None  # float32 [A]
    order: Array  # int32 [A], assignments by expert
    items: Array  # int64 [max items, 16], see cuda_src/common/items.cuh
    block_counts: Array  # int32 [ceil(A / 1024), n_experts]
    sm_shared_bytes: int  # shared memory of a multiprocessor
    lined: ExpertTable | None = None  # from which the router has made an item of every assignment
    left: _Left | None = None  # what `moe_experts` left to `moe_combine`


def moe_scratch(
    max_tokens: int,
    spec: MoeSpec,
    n_in: int,
    deterministic: bool = False,
    sm_shared_bytes: int = H200_SHARED_BYTES,
) -> MoeScratch:
    """See Ops.moe_scratch. deterministic: only the integer kernels, whatever the batch. sm_shared_bytes: shared memory
    of a multiprocessor."""
    import cupy

    n, hidden = max_tokens * spec.top_k, spec.width
    blocks = hidden % ACT_BLOCK == 0
    halves = _has_halves(max_tokens, spec, n_in, deterministic)
    private = ExpertBuffers(
        cupy.empty((n, hidden), np.float32),
        cupy.empty((n, hidden), np.int8) if blocks else None,
        cupy.empty((n, hidden // ACT_BLOCK), np.float32) if blocks else None,
        cupy.empty((n, hidden // ACT_BLOCK), np.int32) if blocks else None,
        cupy.empty((n, hidden), np.float16) if halves else None,
        cupy.empty(n, np.float32) if halves else None,
        cupy.empty(n, np.int32),
        cupy.empty((n, ITEM_WORDS), np.int64),
        cupy.empty((ceil_div(n, sorting.THREADS), spec.n_experts), np.int32),
        sm_shared_bytes,
    )
    return MoeScratch(cupy.empty((n, n_in), np.float32), private)


def moe_scratch_bytes(max_tokens: int, spec: MoeSpec, n_in: int, deterministic: bool = False) -> int:
    """Bytes that `moe_scratch` takes; for the ledger."""
    n, hidden = max_tokens * spec.top_k, spec.width
    total = n * (4 * hidden + 4 * n_in + 4 + 8 * ITEM_WORDS)
    total += 4 * ceil_div(n, sorting.THREADS) * spec.n_experts
    if hidden % ACT_BLOCK == 0:
        total += n * (hidden + 8 * (hidden // ACT_BLOCK))
        if _has_halves(max_tokens, spec, n_in, deterministic):
            total += n * (2 * hidden + 4)
    return total


def _has_halves(max_tokens: int, spec: MoeSpec, n_in: int, deterministic: bool) -> bool:
    """Whether the tensor-core kernels are used for batches of up to max_tokens."""
    whole_blocks = n_in % ACT_BLOCK == 0 and spec.width % ACT_BLOCK == 0
    return whole_blocks and not deterministic and on_tensor_cores(max_tokens, max_tokens * spec.top_k / spec.n_experts)


def on_tensor_cores(n_tokens: int, load: float) -> bool:
    """Whether a batch with `load` assignments an expert on average goes to the tensor cores."""
    return n_tokens > MAX_GEMV_TOKENS and load > MAX_DOT_LOAD


def dot_tile(n_tokens: int, load: float, down: str) -> int:
    """Assignments that the integer kernels handle for one reading of an expert's rows."""
    unsorted = SPARSE_UNSORTED_TOKENS.get(down, UNSORTED_TOKENS) if load <= 1 else UNSORTED_TOKENS
    return 1 if n_tokens <= unsorted else token_tile(max(2, int(2 * load)))


def page_factor(rows_per_page: int, n_rows: int) -> int:
    """The factor f with which row n < n_rows lies in page 4 n f >> 32 (cuda_src/common/experts.cuh)."""
    if rows_per_page >= n_rows:
        return 0
    factor = ceil_div(1 << 30, rows_per_page)
    # n f / 2^30 = n / rows_per_page + n * excess / (rows_per_page * 2^30): whole below 1 / rows_per_page more.
    if n_rows > 1 << 30 or (n_rows - 1) * (factor * rows_per_page - (1 << 30)) >= 1 << 30:
        raise RimuruError(f"experts of {n_rows} rows, {rows_per_page} a page: too many for the CUDA kernels")
    return factor


def page_arguments(p: ProjectionLayout) -> tuple[int, int, int, int]:
    """Where a projection's rows lie, as the kernels take it."""
    return p.first_page, p.rows_per_page, page_factor(p.rows_per_page, p.n_rows), p.row_bytes


@dataclass(slots=True)
class _Call:
    """What the two launches of one moe_experts call share."""

    x: Act
    table: ExpertTable
    spec: MoeSpec
    buffers: ExpertBuffers
    out: Array
    item_arguments: tuple[Any, ...]
    max_items: int
    listed: bool
    """Whether items come with the pages of their experts."""

    def projection(self, name: str) -> ProjectionLayout | None:
        return self.table.layout.projection(name)

    def down_pages(self, down: ProjectionLayout) -> tuple[Any, ...]:
        return (self.table.addresses, self.table.layout.n_pages, *page_arguments(down))

    @property
    def scaled(self) -> bool:
        return bool(self.table.factors)

    def vectors(self, *names: str) -> tuple[Array | None, ...]:
        """The factors of these projections, then their biases."""
        return (*map(self.table.factors.get, names), *map(self.table.biases.get, names))

    def up_arguments(self) -> tuple[Any, ...]:
        up = self.projection("up")
        assert up is not None
        gate = self.projection("gate") or up
        pages = (*page_arguments(gate), *page_arguments(up))
        addresses = (self.table.addresses, self.table.layout.n_pages)
        return (*self.item_arguments, *addresses, *pages, *self.vectors("gate", "up"), self.buffers.hidden)

    def down_arguments(self, down: ProjectionLayout) -> tuple[Any, ...]:
        return (*self.item_arguments, *self.down_pages(down), *self.vectors("down"), self.out, down.n_rows)


@dataclass(slots=True)
class _Left:
    """The down projection that `moe_combine` does together with the sum."""

    call: _Call
    down: ProjectionLayout
    ids: Array

    def finish(self, weights: Array, out: Array, add: bool, scale: float) -> None:
        call, down, buffers = self.call, self.down, self.call.buffers
        (n_tokens, top_k), n_experts = self.ids.shape, call.table.layout.n_experts
        lanes, rows, resident = down_shape(down.format.name, down.n_in, 1, n_tokens)
        kernel = down_sum_kernel(down.format.name, lanes, rows, resident, top_k, call.scaled, call.listed)
        kernel(
            (ceil_div(down.n_rows, 32 // lanes * rows), n_tokens),
            (32 * int(kernel.defines["BLOCK_WARPS"]),),
            (
                buffers.hidden, buffers.values, buffers.scales, buffers.sums, down.n_in, call.item_arguments[0],
                self.ids, n_experts, top_k,
                *call.down_pages(down), *call.vectors("down"), weights, out, down.n_rows, int(add), scale,
            ),
        )  # fmt: skip


def moe_experts(
    x: Act, ids: Array, table: ExpertTable, active: Array | None, spec: MoeSpec, scratch: MoeScratch
) -> None:
    """See Ops.moe_experts."""
    up, down = table.layout.projection("up"), table.layout.projection("down")
    if up is None or down is None:
        raise RimuruError(f"block {table.layout.layer}: experts need an up and a down projection")
    settle(x)
    n_tokens, top_k = ids.shape
    n_experts, buffers = table.layout.n_experts, scratch.private
    load = n_tokens * top_k / n_experts
    with_halves = buffers.halves is not None and x.quant is not None and x.quant.halves is not None
    on_matrices = with_halves and on_tensor_cores(n_tokens, load)
    tile = up_matrix_shape(load).tokens if on_matrices else dot_tile(n_tokens, load, down.format.name)
    lined, buffers.lined = buffers.lined is table, None
    items, order, max_items = buffers.items if lined else None, None, ids.size
    listed = table.layout.n_pages <= MAX_ITEM_PAGES if tile > 1 else lined
    if tile > 1:
        max_items = sorting.sort_assignments(ids, active, table, tile, listed, buffers)
        items, order = buffers.items, buffers.order
    arguments = (items, order, ids, active, n_experts, top_k)
    call = _Call(x, table, spec, buffers, scratch.out, arguments, max_items, listed)
    # Where every expert can be read now, this call is the only one before the sum.
    leaves_down = tile == 1 and scratch.only_summed and active is None and top_k <= _MAX_SUM_SLOTS
    buffers.left = _Left(call, down, ids) if leaves_down else None
    if on_matrices:
        _experts_on_tensor_cores(call, up, down, load, ids.size)
    else:
        _experts_by_integer_dots(call, up, down, tile)


def _experts_by_integer_dots(call: _Call, up: ProjectionLayout, down: ProjectionLayout, tile: int) -> None:
    """gate_up, and down where it is not left to the sum."""
    buffers, quant, gate = call.buffers, call.x.quant, call.projection("gate")
    gate_name = None if gate is None else gate.format.name
    n_tokens = call.item_arguments[2].shape[0]
    lanes, rows, resident = up_shape(tile, n_tokens, (gate_name, up.format.name))
    x_forms = (None, None, None) if quant is None else (quant.values, quant.scales, quant.sums)
    hidden_forms = (buffers.values, buffers.scales, buffers.sums)
    up_kernel(gate_name, up.format.name, tile, lanes, rows, resident, call.scaled, call.listed)(
        (ceil_div(up.n_rows, ACT_BLOCK), call.max_items),
        (32 * lanes // rows,),
        (
            call.x.f32, *x_forms, up.n_in, *call.up_arguments(), *hidden_forms, up.n_rows,
            ACTIVATION_IDS[call.spec.activation],
        ),
    )  # fmt: skip
    if buffers.left is not None:
        return
    lanes, rows, resident = down_shape(down.format.name, down.n_in, tile, n_tokens)
    down_kernel(down.format.name, tile, lanes, rows, resident, call.scaled, call.listed)(
        (ceil_div(down.n_rows, DOWN_WARPS * (32 // lanes) * rows), call.max_items),
        (DOWN_WARPS * 32,),
        (buffers.hidden, *hidden_forms, down.n_in, *call.down_arguments(down)),
    )


def up_shape(tile: int, n_tokens: int, formats: tuple[str | None, ...] = ()) -> tuple[int, int, int]:
    """(lanes a row, hidden rows a lane, resident threads) of gate_up; the lanes are always as many (order of sums)."""
    if tile > 1:  # two rows of Q6_K, of which a lane holds 64 weights each, and 4 tokens: more than there are registers
        return 8, 1 if tile == 2 or "q6_k" in formats else 2, 512
    return (8, 1, 512 if n_tokens == 1 else 768) if n_tokens <= 4 else (8, 2, 512)


def down_shape(format_name: str, n_in: int, tile: int, n_tokens: int) -> tuple[int, int, int]:
    """(lanes a row, rows a lane, resident threads) of the down kernel; the lanes depend on the width only (order of
    sums)."""
    if n_in <= 1024 and format_name in SPAN_FORMATS and 0 < n_in // 64 % 8 <= 4:
        # Eight lanes would have nothing for half of them in the last round.
        return 4, 1 if n_tokens == 1 else 2, 768 if tile == 1 and n_tokens > 1 else 512
    resident = 1024 if format_name in LEAN_FORMATS else 768
    return row_lanes(n_in), 2, resident if tile == 1 and n_tokens > 1 else 512


def _experts_on_tensor_cores(
    call: _Call, up: ProjectionLayout, down: ProjectionLayout, load: float, n_assignments: int
) -> None:
    buffers, x, gate = call.buffers, call.x, call.projection("gate")
    make_halves(x, n_assignments // call.spec.top_k)
    shape, after = _matrix_shapes(load, gate, up, down, buffers.sm_shared_bytes)
    up_matrix_kernel(None if gate is None else gate.format.name, up.format.name, shape, call.scaled, call.listed)(
        (ceil_div(up.n_rows, shape.rows if gate is None else shape.rows // 2), call.max_items),
        (shape.threads,),
        (
            x.quant.halves, x.quant.half_scales, up.n_in, *call.up_arguments(), up.n_rows,
            ACTIVATION_IDS[call.spec.activation],
        ),
        shared_bytes=shape.shared_bytes,
    )  # fmt: skip
    scale_halves(buffers.hidden, buffers.halves, buffers.half_scales, n_assignments)
    down_matrix_kernel(down.format.name, after, call.scaled, call.listed)(
        (ceil_div(down.n_rows, after.rows), call.max_items),
        (after.threads,),
        (buffers.halves, buffers.half_scales, down.n_in, *call.down_arguments(down)),
        shared_bytes=after.shared_bytes,
    )


def _matrix_shapes(
    load: float, gate: ProjectionLayout | None, up: ProjectionLayout, down: ProjectionLayout, sm_shared_bytes: int
) -> tuple[Shape, Shape]:
    """Of gate_up and of down, on tensor cores."""
    up_formats = [p.format for p in (gate, up) if p is not None]
    shape = with_ring(up_matrix_shape(load), up_formats, up.n_in, UP_RINGS, sm_shared_bytes)
    return shape, with_ring(down_matrix_shape(load), [down.format], down.n_in, DOWN_RINGS, sm_shared_bytes)


def moe_combine(scratch: MoeScratch, weights: Array, out: Array, add: bool, scale: float) -> None:
    """See Ops.moe_combine."""
    n_tokens, top_k = weights.shape
    width = out.shape[1]
    left, scratch.private.left = scratch.private.left, None
    if left is not None:
        left.finish(weights, out, add, scale)
        return
    if width % 4:
        raise RimuruError(f"experts of output width {width}: the CUDA kernels need a multiple of 4")
    threads = min(256, 32 * ceil_div(width // 4, 32)) if n_tokens > 16 else 64
    _combine(
        (ceil_div(width // 4, threads), min(n_tokens, 65535)),
        (threads,),
        (scratch.out, weights, out, n_tokens, top_k, width, int(add), scale),
    )
