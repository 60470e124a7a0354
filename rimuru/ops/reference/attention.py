"""Reference of the attention verbs: one token and one head at a time, keys gathered through the page table."""

from __future__ import annotations

import numpy as np

from rimuru.ops.base import Act, Array, KvLayer, Step
from rimuru.ops.host import decode, elements_at, encode
from rimuru.ops.reference.pointwise import normalise, sigmoid


def _row_address(step: Step, kv: KvLayer, seq: int, position: int, head: int, values: bool) -> int:
    """Address of the key or value row of one token and head."""
    group = kv.group
    block, slot = divmod(position, group.page_tokens)
    page = int(step.kv_pages[kv.group_index, seq, block])
    if page < 0:
        raise ValueError(f"sequence {seq} has no page for position {position}")
    row = head * group.page_tokens + slot
    elements = row * (group.value_dim if values else group.key_dim)
    if values:
        elements += group.n_head_kv * group.page_tokens * group.key_dim
    return kv.pool_base + page * kv.page_bytes + kv.layer_offset_bytes + elements * group.element_bytes


def _rotate(heads: np.ndarray, rope_row: np.ndarray, adjacent: bool, start: int) -> np.ndarray:
    """Copy of heads [n, dim], rotated from dim `start` on; rope_row is n_rot/2 cosines, then n_rot/2 sines."""
    n_rot = len(rope_row)
    cosine, sine = rope_row[: n_rot // 2].astype(np.float64), rope_row[n_rot // 2 :].astype(np.float64)
    stop, half = start + n_rot, start + n_rot // 2
    first = slice(start, stop, 2) if adjacent else slice(start, half)
    second = slice(start + 1, stop, 2) if adjacent else slice(half, stop)
    turned = heads.copy()
    turned[:, first] = heads[:, first] * cosine - heads[:, second] * sine
    turned[:, second] = heads[:, first] * sine + heads[:, second] * cosine
    return turned


def _norm_heads(heads: np.ndarray, weight: np.ndarray | None, kind: str, eps: float) -> np.ndarray:
    if kind == "none" or weight is None:
        return heads
    if kind == "head":
        return np.concatenate([normalise(heads[:, : len(weight)], weight, eps), heads[:, len(weight) :]], axis=1)
    return normalise(heads.reshape(-1), weight, eps).reshape(heads.shape)


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
    group = kv.group
    for token in range(len(q)):
        seq, position = int(step.seq_of_token[token]), int(step.positions[token])
        queries = q[token].reshape(n_head, q_stride)[:, : group.key_dim]
        keys = k[token].reshape(group.n_head_kv, group.key_dim)
        for heads, weight in ((queries, q_norm), (keys, k_norm)):
            values = heads.astype(np.float64)
            if not norm_after_rope:
                values = _norm_heads(values, weight, norm_kind, eps)
            if rope is not None:
                values = _rotate(values, rope[position], rope_adjacent, rope_first)
            if norm_after_rope:
                values = _norm_heads(values, weight, norm_kind, eps)
            heads[...] = values
        for head in range(group.n_head_kv):
            target = _row_address(step, kv, seq, position, head, values=False)
            elements_at(target, group.key_dim, group.element)[...] = encode(keys[head], group.element)
            if group.value_dim:
                value = v[token].reshape(group.n_head_kv, group.value_dim)[head]
                target = _row_address(step, kv, seq, position, head, values=True)
                elements_at(target, group.value_dim, group.element)[...] = encode(value, group.element)


def attention(
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
    value_dim = out.f32.shape[1] // n_head
    for token in range(len(q)):
        seq, position = int(step.seq_of_token[token]), int(step.positions[token])
        visible = range(max(0, position - window + 1) if window is not None else 0, position + 1)
        for kv_head in range(group.n_head_kv):
            keys = _gather(step, kv, seq, visible, kv_head, values=False)
            # Without stored values (MLA) the first elements of a key are its value.
            values = _gather(step, kv, seq, visible, kv_head, values=True) if group.value_dim else keys[:, :value_dim]
            for head in range(kv_head * (n_head // group.n_head_kv), (kv_head + 1) * (n_head // group.n_head_kv)):
                row = q[token, head * q_stride : (head + 1) * q_stride].astype(np.float64)
                scores = keys @ row[: group.key_dim] * scale
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                shares = np.exp(scores - top)
                result = shares @ values / (shares.sum() + np.exp(sink - top))
                if gated:
                    result *= sigmoid(row[group.key_dim : group.key_dim + value_dim])
                out.f32[token, head * value_dim : (head + 1) * value_dim] = result


def _gather(step: Step, kv: KvLayer, seq: int, visible: range, head: int, values: bool) -> np.ndarray:
    """float64 [n visible, dim]: keys or values of one head."""
    dim = kv.group.value_dim if values else kv.group.key_dim
    rows = [
        decode(elements_at(_row_address(step, kv, seq, p, head, values), dim, kv.group.element), kv.group.element)
        for p in visible
    ]
    return np.stack(rows).astype(np.float64)
