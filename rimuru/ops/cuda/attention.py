"""Launchers of the KV append and of paged attention (cuda_src/attention)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rimuru.base.errors import UnsupportedModelError
from rimuru.base.units import align_up, ceil_div
from rimuru.memory.specs import KvGroupLayout
from rimuru.ops.base import Act, Array, KvLayer, Step
from rimuru.ops.cuda import latent
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.pointwise import ACT_SIGNATURE, act_arguments, blocks_wanted, quantise

ELEMENT_IDS = {"f16": 0, "bf16": 1, "f32": 2}
NORM_IDS = {"none": 0, "head": 1, "vector": 2}
MAX_SPLITS = 32
"""Splits of a context at most (cuda_src/attention/paged_decode.cu)."""

FEW_BLOCKS = 64
"""Up to this many (query, KV head) pairs a decode launch waits for latency: blocks of more warps are faster."""

BIG_SHARED_BYTES = 200 * 1024
MIDDLE_SHARED_BYTES = 160 * 1024
"""Shared memory of a block on data centre cards: compute capability 9.0 and 10.0, and 8.0."""

TARGET_BLOCKS = 264
"""Blocks that a decode launch aims at: two on each multiprocessor of the largest cards."""

_PREFILL_TABLE_BYTES = 2048
"""Static shared memory of a prefill block: the addresses of two blocks of keys."""

_DECODE_VECTOR_BYTES = 64 * 1024
"""Shared memory for the vectors of a decode block's warps, at most."""

_APPEND_WARPS = 4


def group_heads(n_head: int, group: KvGroupLayout, value_dim: int) -> int:
    """Query heads that one block of the decode kernel serves: as many of a KV head's as fit."""
    limit = 16 if group.key_dim <= 256 or latent.has_latent_kernel(group, value_dim) else 8
    heads = n_head // group.n_head_kv
    return max(count for count in range(1, min(heads, limit) + 1) if heads % count == 0)


def target_blocks(group: KvGroupLayout, value_dim: int) -> int:
    """Blocks that a decode launch aims at."""
    return latent.TARGET_BLOCKS if latent.has_latent_kernel(group, value_dim) else TARGET_BLOCKS


def decode_splits(n_queries: int, grid_x: int, target: int = TARGET_BLOCKS) -> int:
    """Blocks that share one context (Z of the decode kernels)."""
    return max(1, min(MAX_SPLITS, target // (n_queries * grid_x)))


def partial_floats(n_queries: int, n_head: int, grid_x: int, value_dim: int, target: int = TARGET_BLOCKS) -> int:
    """float32 values of scratch that a decode launch needs; 0 where one block does a whole context."""
    if decode_splits(n_queries, grid_x, target) == 1:
        return 0
    return n_queries * n_head * MAX_SPLITS * (value_dim + 2)


def workspace_floats(n_head: int, group: KvGroupLayout, value_dim: int, max_queries: int) -> int:
    """The most that `partial_floats` gives for up to max_queries queries."""
    grid_x, target = n_head // group_heads(n_head, group, value_dim), target_blocks(group, value_dim)
    most = min(max_queries, target // (2 * grid_x))
    return partial_floats(max(1, most), n_head, grid_x, value_dim, target)


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """A decode kernel, the threads of its block, and its dynamic shared memory."""

    kernel: Kernel
    n_threads: int
    shared_bytes: int


@cache
def append_kernel(norm_kind: str, norm_last: bool, adjacent: bool, element: str, max_dim: int) -> Kernel:
    return Kernel(
        "attention/kv_append.cu",
        "prepare_qkv",
        "q: f32*, k: f32*, v: f32*, q_norm: f32*, k_norm: f32*, rope: f32*, positions: i32*, seq_of_token: i32*,"
        "kv_base: *, pages: i32*, page_bytes: i64, n_blocks: i32, page_tokens: i32, n_head: i32, n_head_kv: i32,"
        "q_stride: i32, key_dim: i32, value_dim: i32, q_norm_dim: i32, k_norm_dim: i32, n_rot: i32, rope_first: i32,"
        "eps: f32",
        {
            "NORM_KIND": NORM_IDS[norm_kind],
            "NORM_LAST": int(norm_last),
            "ADJACENT": int(adjacent),
            "ELEMENT": ELEMENT_IDS[element],
            "MAX_DIM": max_dim,
        },
    )


_DECODE_SIGNATURE = (
    "q: f32*, positions: i32*, seq_of_token: i32*, query_start: i32*, kv_base: *, pages: i32*, sinks: f32*,"
    f"partials: f32*, arrivals: *, out: f32*, {ACT_SIGNATURE}, page_bytes: i64, n_blocks: i32, page_tokens: i32,"
    "n_head: i32, n_head_kv: i32, q_stride: i32, window: i32, gated: i32, by_sequence: i32, scale: f32"
)
_PREPARE_SIGNATURE = (
    ", k: f32*, v: f32*, q_norm: f32*, k_norm: f32*, rope: f32*, q_norm_dim: i32, k_norm_dim: i32, n_rot: i32,"
    "rope_first: i32, eps: f32"
)
_PREPARED = (None, None, None, None, None, 0, 0, 0, 0, 0.0)
"""Those arguments where prepare_qkv has had its launch."""


def unit_keys(n_head_kv: int) -> int:
    """Keys of the smallest split of a context: fewer where few KV heads leave the device empty."""
    return 256 if n_head_kv >= 4 else 128


def has_fast_kernel(key_dim: int, value_dim: int, element: str, values_are_keys: bool) -> bool:
    """Whether cuda_src/attention/paged_decode.cu can do the shape."""
    return element != "f32" and not values_are_keys and max(key_dim, value_dim) <= 256


@cache
def decode_kernel(
    key_dim: int, value_dim: int, heads: int, element: str, values_are_keys: bool, unit: int = 256, wide: bool = False,
    prepare: tuple[str, bool, bool] | None = None, as_wide: bool = False,
) -> DecodeKernel:  # fmt: skip
    """A decode kernel: on tensor cores where that can do the shape, else the one for everything. wide: eight
    warps a block; as_wide: in any case the bits that these would give; prepare: (kind of norm, whether it comes last,
    adjacent pairs) of what has not been prepared.
    """
    defines = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "GROUP": heads, "ELEMENT": ELEMENT_IDS[element]}
    size = 4 if element == "f32" else 2
    if has_fast_kernel(key_dim, value_dim, element, values_are_keys):
        warps, min_blocks = (4, 3) if max(key_dim, value_dim) <= 128 and heads <= 8 and not wide else (8, 1)
        parts = 2 if as_wide and warps == 4 else 1
        if warps * heads * value_dim * 4 > _DECODE_VECTOR_BYTES:
            warps = 4
        kind, last, adjacent = prepare or ("none", False, False)
        defines |= {
            "WARPS": warps, "MIN_BLOCKS": min_blocks, "UNIT": unit, "PARTS": parts,
            "PREPARE": int(prepare is not None), "NORM_KIND": NORM_IDS[kind],
            "NORM_LAST": int(last), "ADJACENT": int(adjacent),
        }  # fmt: skip
        kernel = Kernel("attention/paged_decode.cu", "paged_decode", _DECODE_SIGNATURE + _PREPARE_SIGNATURE, defines)
        return DecodeKernel(kernel, 32 * warps, 4 * warps * parts * heads * value_dim)
    row_bytes = (key_dim + value_dim) * size
    tile = 64 if row_bytes <= 512 else 32 if row_bytes <= 1024 else 16
    defines["VALUES_ARE_KEYS"] = int(values_are_keys)
    kernel = Kernel("attention/paged_decode_wide.cu", "paged_decode_wide", _DECODE_SIGNATURE, defines)
    stored = key_dim * size + 16 + (0 if values_are_keys else value_dim * size)
    return DecodeKernel(kernel, 256 if value_dim > 256 else 128, 2 * tile * stored)


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How the prefill kernel cuts its work: keys of a block, 16-row tiles of a warp, blocks on a multiprocessor, warps
    that share the value dims of their rows."""

    n_keys: int
    warp_tiles: int
    min_blocks: int
    value_parts: int = 1

    @property
    def n_rows(self) -> int:
        return 4 * 16 * self.warp_tiles

    @property
    def n_threads(self) -> int:
        return 128 * self.value_parts


LATENT_TILE = PrefillTile(32, 1, 1, 2)
"""For latent keys, whose values are wide."""


def prefill_tile(key_dim: int, value_dim: int, shared_bytes: int = 0, n_rows: int = 0) -> PrefillTile:
    """The tile for these head dims, a device's shared memory per block, and the query rows of a launch.

    The number of keys sets the order of sums, so it depends on the model and the device only.
    """
    if max(key_dim, value_dim) > 128 or shared_bytes < MIDDLE_SHARED_BYTES:
        return PrefillTile(32, 1, 2)
    if shared_bytes >= BIG_SHARED_BYTES and n_rows >= 800 * 128:
        return PrefillTile(64, 2, 2)
    return PrefillTile(64, 1, 2)


@cache
def prefill_kernel(
    key_dim: int, value_dim: int, element: str, tile: PrefillTile, values_are_keys: bool = False
) -> Kernel:
    return Kernel(
        "attention/paged_prefill.cu",
        "paged_prefill",
        "q: f32*, positions: i32*, query_start: i32*, kv_base: *, pages: i32*, sinks: f32*, out: f32*,"
        f"{ACT_SIGNATURE}, page_bytes: i64, n_seqs: i32, n_blocks: i32, page_tokens: i32, n_head: i32, n_head_kv: i32,"
        "q_stride: i32, window: i32, gated: i32, skip_tokens: i32, scale: f32",
        {
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "ELEMENT": ELEMENT_IDS[element],
            "KEYS": tile.n_keys,
            "WARP_TILES": tile.warp_tiles,
            "MIN_BLOCKS": tile.min_blocks,
            "VALUE_PARTS": tile.value_parts,
            "VALUES_ARE_KEYS": int(values_are_keys),
        },
    )


def has_prefill_kernel(
    key_dim: int, value_dim: int, element: str, values_are_keys: bool, shared_bytes: int = 0
) -> bool:
    """Tensor cores need 16-bit elements, and heads in sixteens (latent values: each part of them) for which a block has
    registers and shared memory; else every query is its own decode."""
    if element == "f32" or key_dim % 16:
        return False
    if not values_are_keys:
        return value_dim % 16 == 0 and max(key_dim, value_dim) <= 256
    parts = LATENT_TILE.value_parts
    needed = _prefill_shared_bytes(key_dim, value_dim, LATENT_TILE, True) + _PREFILL_TABLE_BYTES
    return value_dim % (16 * parts) == 0 and value_dim <= 256 * parts and needed <= shared_bytes


def check_layout(group: KvGroupLayout, page_bytes: int, layer_offset_bytes: int) -> None:
    """Rows are copied 16 bytes at a time, so everything must lie on multiples of 16."""
    rows = (group.key_dim * group.element_bytes, group.value_dim * group.element_bytes)
    if any(n % 16 for n in (*rows, page_bytes, layer_offset_bytes)):
        raise UnsupportedModelError(
            f"the CUDA kernels cannot read KV rows of {rows} bytes in pages of {page_bytes} with a layer at"
            f" {layer_offset_bytes}: all must be multiples of 16; choose another --kv-type"
        )


def page_table(step: Step, kv: KvLayer) -> int:
    """Address of the page ids of a layer's group, int32 [S, B]; cheaper than a view, which every layer would make."""
    return int(step.kv_pages.data.ptr) + kv.group_index * step.kv_pages.strides[0]


def prepare_qkv(
    q: Array,
    k: Array,
    v: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    norm_kind: str,
    norm_after_rope: bool,
    eps: float,
    rope: Array | None,
    rope_adjacent: bool,
    n_head: int,
    q_stride: int,
    step: Step,
    kv: KvLayer,
    rope_first: int = 0,
    may_wait: bool = False,
) -> None:
    """See Ops.prepare_qkv; `Attention.prepare_qkv` is where it may wait."""
    group = kv.group
    check_layout(group, kv.page_bytes, kv.layer_offset_bytes)
    kernel = append_kernel(
        norm_kind, norm_after_rope, rope_adjacent, group.element, align_up(max(group.key_dim, group.value_dim), 32)
    )
    slots = n_head + (2 if group.value_dim else 1) * group.n_head_kv
    parts = (3 if group.value_dim else 2) if norm_kind == "vector" else ceil_div(slots, _APPEND_WARPS)
    kernel(
        (q.shape[0], parts),
        (_APPEND_WARPS * 32,),
        (
            q, k, v, q_norm, k_norm, rope, step.positions, step.seq_of_token, kv.pool_base + kv.layer_offset_bytes,
            page_table(step, kv), kv.page_bytes, step.kv_pages.shape[2], group.page_tokens, n_head, group.n_head_kv,
            q_stride, group.key_dim, group.value_dim, _norm_dim(q_norm, norm_kind, group),
            _norm_dim(k_norm, norm_kind, group),
            0 if rope is None else rope.shape[1], rope_first, eps,
        ),
    )  # fmt: skip


def _norm_dim(weight: Array | None, norm_kind: str, group: KvGroupLayout) -> int:
    """Dims of a head that a norm covers."""
    return int(weight.size) if weight is not None and norm_kind == "head" else group.key_dim


class Attention:
    """The verb `attention`: decode kernel, prefill kernel, or both for a mixed step; owns the split scratch.

    `deterministic`: every query goes through a decode kernel, whose sums depend on its position only, so that a
    result does not depend on how a prompt was cut or what ran beside it. `shared_bytes`: what a block may have.
    """

    def __init__(self, deterministic: bool, shared_bytes: int = 0) -> None:
        self.deterministic, self.shared_bytes = deterministic, shared_bytes
        self.tile: PrefillTile | None = None
        """Overrides `prefill_tile`; for measurements."""
        self._waiting: tuple[Any, ...] | None = None
        """Arguments of a prepare_qkv that the next call does itself."""
        self._partials: Any = None
        self._outgrown: list[Any] = []
        self._arrivals: Any = None

    def reserve(self, n_floats: int) -> None:
        """Scratch for the largest decode launch; before the first step and before any capture."""
        import cupy

        if self._partials is None or self._partials.size < n_floats:
            self._outgrown.append(self._partials)  # captured graphs may still point at it
            self._partials = cupy.empty(max(1, n_floats), cupy.float32)
        if self._arrivals is None:
            self._arrivals = cupy.zeros(2 * TARGET_BLOCKS, cupy.uint32)

    def prepare_qkv(self, *arguments: Any, may_wait: bool = False, rope_first: int = 0) -> None:
        """See Ops.prepare_qkv: with may_wait, steps of single tokens leave it to the decode kernel."""
        norm_kind, step, kv = arguments[5], arguments[12], arguments[13]
        group, alone = kv.group, step.host.n_tokens == step.host.n_seqs
        fast = has_fast_kernel(group.key_dim, group.value_dim, group.element, group.value_dim == 0)
        if may_wait and alone and fast and norm_kind != "vector":
            check_layout(group, kv.page_bytes, kv.layer_offset_bytes)
            self._waiting = (*arguments, rope_first)
        else:
            self._waiting = None
            launch: Any = prepare_qkv
            launch(*arguments, rope_first)

    def __call__(
        self,
        q: Array,
        n_head: int,
        q_stride: int,
        gated: bool,
        step: Step,
        kv: KvLayer,
        scale: float,
        window: int | None,
        sinks: Array | None,
        out: Act,
    ) -> None:
        group = kv.group
        check_layout(group, kv.page_bytes, kv.layer_offset_bytes)
        value_dim = out.f32.shape[1] // n_head
        n_tokens, n_seqs = step.host.n_tokens, step.host.n_seqs
        wanted = blocks_wanted(out, n_tokens)
        act = act_arguments(out) if wanted and value_dim % 32 == 0 else (None, None, None)
        where = (kv.pool_base + kv.layer_offset_bytes, page_table(step, kv), sinks)
        shape = (step.kv_pages.shape[2], group.page_tokens, n_head, group.n_head_kv, q_stride, window or 0, gated)
        latent = group.value_dim == 0
        tiled = not self.deterministic and has_prefill_kernel(
            group.key_dim, value_dim, group.element, latent, self.shared_bytes
        )
        if n_tokens == n_seqs or not tiled:
            self._decode(q, step, where, shape, group, value_dim, kv.page_bytes, n_tokens, False, scale, act, out)
        else:
            if bool((step.host.query_start[1:] - step.host.query_start[:-1] == 1).any()):
                self._decode(q, step, where, shape, group, value_dim, kv.page_bytes, n_seqs, True, scale, act, out)
            tile = prefill_tile(group.key_dim, value_dim, self.shared_bytes, n_tokens * n_head)
            tile = self.tile or (LATENT_TILE if latent else tile)
            n_tiles = n_tokens * (n_head // group.n_head_kv) // tile.n_rows + n_seqs
            shared = _prefill_shared_bytes(group.key_dim, value_dim, tile, latent)
            prefill_kernel(group.key_dim, value_dim, group.element, tile, latent)(
                (n_tiles, group.n_head_kv),
                (tile.n_threads,),
                (q, step.positions, step.query_start, *where, out.f32, *act, kv.page_bytes, n_seqs, *shape, 1, scale),
                shared_bytes=shared,
            )
        if wanted and act[0] is None:
            quantise(out, n_tokens)

    def _decode(
        self,
        q: Array,
        step: Step,
        where: tuple[Any, ...],
        shape: tuple[Any, ...],
        group: KvGroupLayout,
        value_dim: int,
        page_bytes: int,
        n_queries: int,
        by_sequence: bool,
        scale: float,
        act: tuple[Any, Any, Any],
        out: Act,
    ) -> None:
        n_head = shape[2]
        heads, target = group_heads(n_head, group, value_dim), target_blocks(group, value_dim)
        grid_x = n_head // heads
        splits = decode_splits(n_queries, grid_x, target)
        n_floats = partial_floats(n_queries, n_head, grid_x, value_dim, target)
        self.reserve(n_floats)
        tokens = (q, step.positions, step.seq_of_token, step.query_start)
        if latent.has_latent_kernel(group, value_dim):
            latent.launch_latent(
                group, value_dim, (grid_x, n_queries, splits), tokens, where, self._partials, (out.f32, *act),
                (page_bytes, *shape), by_sequence, scale,
            )  # fmt: skip
            return
        wide = n_queries * grid_x <= FEW_BLOCKS
        prepare, extra = None, _PREPARED
        if self._waiting is not None:
            _, k, v, q_norm, k_norm, kind, last, eps, rope, adjacent, *_, rope_first = self._waiting
            self._waiting, prepare, n_rot = None, (kind, last, adjacent), 0 if rope is None else rope.shape[1]
            dims = (_norm_dim(q_norm, kind, group), _norm_dim(k_norm, kind, group))
            extra = (k, v, q_norm, k_norm, rope, *dims, n_rot, rope_first, eps)
        fast = has_fast_kernel(group.key_dim, value_dim, group.element, group.value_dim == 0)
        chosen = decode_kernel(
            group.key_dim, value_dim, heads, group.element, group.value_dim == 0, unit_keys(group.n_head_kv), wide,
            prepare, self.deterministic,
        )  # fmt: skip
        chosen.kernel(
            (grid_x, n_queries, splits),
            (chosen.n_threads,),
            (
                *tokens, *where, self._partials, self._arrivals, out.f32, *act, page_bytes, *shape, by_sequence, scale,
                *(extra if fast else ()),
            ),
            shared_bytes=chosen.shared_bytes,
        )  # fmt: skip


def _prefill_shared_bytes(key_dim: int, value_dim: int, tile: PrefillTile, values_are_keys: bool) -> int:
    """Two stages of K and V, rows padded by 8 elements, and the queries where they do not fit in registers."""
    stages = 2 * tile.n_keys * (key_dim + 8 + (0 if values_are_keys else value_dim + 8)) * 2
    queries = tile.n_rows * (key_dim + 8) * 2
    in_registers = key_dim <= 128 and tile.warp_tiles == 1
    return max(stages, queries) if in_registers else stages + queries
