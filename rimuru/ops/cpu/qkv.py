"""What happens to queries, keys and values between their projections and attention, on the CPU: norms, rotation, and
writing keys and values into their pages."""

from __future__ import annotations

import numpy as np
from numba import njit

from rimuru.ops.base import Array, KvLayer, Step
from rimuru.ops.cpu.attention import geometry
from rimuru.ops.cpu.attention_tiles import narrow
from rimuru.ops.cpu.lanes import dot, take_number
from rimuru.ops.cpu.pointwise import inverse_rms, row_of
from rimuru.ops.cpu.simd_calls import i64_at
from rimuru.ops.cpu.simd_launch import threads
from rimuru.ops.cpu.work import FIELDS, NO_FLOATS, Worker, integers, matrix, real, run, vector

_PARALLEL_ELEMENTS = 1 << 17
_NORMS = {"none": 0, "head": 1, "vector": 2}


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _norm_heads(row, n_heads, stride, dim, weight, kind, eps):  # type: ignore[no-untyped-def]
    """RMS norm of a row in place: over the first elements of each stride, as many as the weight has, or over the first
    dim elements of all strides together."""
    if kind == 0 or weight.size == 0:
        return
    factor = np.float32(1.0)
    if kind == 2:
        total = np.float32(0.0)
        for head in range(n_heads):
            place = row.ctypes.data + head * stride * 4
            total += dot(place, place, dim)
        factor = np.float32(1.0) / np.sqrt(total / np.float32(n_heads * dim) + eps)
    for head in range(n_heads):
        scale = weight[head * dim : (head + 1) * dim] if kind == 2 else weight
        part = row[head * stride : head * stride + scale.size]
        if kind == 1:
            factor = inverse_rms(part.ctypes.data, scale.size, eps)
        for i in range(scale.size):
            part[i] = part[i] * factor * scale[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _rotate_heads(row, n_heads, stride, angles, adjacent, first):  # type: ignore[no-untyped-def]
    """Rotate n_rot elements of each stride of a row in place, from `first` on. angles: cosines, then sines."""
    half = angles.size // 2
    cosine, sine = angles[:half], angles[half:]  # an index with an offset would not become vector code
    for head in range(n_heads):
        part = row[head * stride + first : head * stride + first + 2 * half]
        if adjacent:
            for i in range(half):
                a, b = part[2 * i], part[2 * i + 1]
                part[2 * i] = a * cosine[i] - b * sine[i]
                part[2 * i + 1] = a * sine[i] + b * cosine[i]
        else:
            low, high = part[:half], part[half:]
            for i in range(half):
                a, b = low[i], high[i]
                low[i] = a * cosine[i] - b * sine[i]
                high[i] = a * sine[i] + b * cosine[i]


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _turn(row, n_heads, stride, dim, weight, kind, after, eps, angles, adjacent, first):  # type: ignore[no-untyped-def]
    if not after:
        _norm_heads(row, n_heads, stride, dim, weight, kind, eps)
    if angles.size > 0:
        _rotate_heads(row, n_heads, stride, angles, adjacent, first)
    if after:
        _norm_heads(row, n_heads, stride, dim, weight, kind, eps)


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _prepare_rows(  # type: ignore[no-untyped-def]
    start, stop, q, k, v, q_norm, k_norm, kind, after, eps, rope, adjacent, n_head, q_stride, positions, seqs, tables,
    pages, first,
):  # fmt: skip
    base, page_bytes, page_tokens, n_head_kv, key_dim, value_dim, element = pages
    size = 4 if element == 0 else 2
    for t in range(start, stop):
        queries, keys, values = row_of(q, t), row_of(k, t), row_of(v, t)
        position = positions[t, 0]
        angles = rope[position] if rope.size > 0 else rope.reshape(-1)
        _turn(queries, n_head, q_stride, key_dim, q_norm, kind, after, eps, angles, adjacent, first)
        _turn(keys, n_head_kv, key_dim, key_dim, k_norm, kind, after, eps, angles, adjacent, first)
        page = np.int64(tables[seqs[t, 0], position // page_tokens])
        slot = position % page_tokens
        key_place = base + page * page_bytes
        value_place = key_place + n_head_kv * page_tokens * key_dim * size
        for head in range(n_head_kv):
            row = head * page_tokens + slot
            narrow(keys.ctypes.data + head * key_dim * 4, key_place + row * key_dim * size, key_dim, element)
            if value_dim > 0:
                source = values.ctypes.data + head * value_dim * 4
                narrow(source, value_place + row * value_dim * size, value_dim, element)


@Worker
def _worker(context, index):  # type: ignore[no-untyped-def]
    """Take tokens, c[35] at a time, until none is left."""
    c = i64_at(context, FIELDS)
    q, k, v, q_norm, k_norm, rope = matrix(c, 0), matrix(c, 1), matrix(c, 2), vector(c, 3), vector(c, 4), matrix(c, 5)
    positions, seqs, tables = integers(c, 6), integers(c, 7), integers(c, 8)
    pages = (c[28], c[29], c[30], c[31], c[32], c[33], c[34])
    item = take_number(context)
    while item * c[35] < q.shape[0]:
        _prepare_rows(
            item * c[35], min(q.shape[0], (item + 1) * c[35]), q, k, v, q_norm, k_norm, c[36], c[37] != 0,
            real(context, 38), rope, c[39] != 0, c[40], c[41], positions, seqs, tables, pages, c[42],
        )  # fmt: skip
        item = take_number(context)


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
    """See `Ops.prepare_qkv`. v may have no columns where the group stores no values (MLA)."""
    n_tokens = q.shape[0]
    none = NO_FLOATS.reshape(-1)
    run(
        _worker,
        (
            q, k, v if v.size else k, none if q_norm is None else q_norm, none if k_norm is None else k_norm,
            NO_FLOATS if rope is None else rope, step.positions, step.seq_of_token, step.kv_pages[kv.group_index],
        ),
        (
            *geometry(kv), max(1, n_tokens // (4 * threads())), _NORMS[norm_kind], norm_after_rope, float(eps),
            rope_adjacent, n_head, q_stride, rope_first,
        ),
        n_tokens > 1 and q.size + k.size + v.size > _PARALLEL_ELEMENTS,
    )  # fmt: skip
