"""Cases of attention that does for its own queries, keys and values what `prepare_qkv` would do: both verbs in turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from cases.attention import AttentionShape, QkvShape, attention_inputs, qkv_inputs, stored_rows
from cases.common import Case, Inputs, Outputs, address_of
from rimuru.ops.base import KvLayer, Ops


def waiting_case(
    name: str, shape: QkvShape, sinks: bool = False, window: int | None = None, kind: Any = "edge"
) -> Case:
    """Single new tokens; `waits` of the inputs: whether prepare_qkv may wait."""
    row = shape.n_head_kv * (shape.key_dim + shape.value_dim) * shape.attention.group.element_bytes
    keys = sum(min(context, window or context) for context in shape.context_len)
    paged = AttentionShape(
        shape.n_new, shape.context_len, shape.n_head, shape.n_head_kv, shape.key_dim, shape.value_dim,
        shape.page_tokens, shape.element, window, sinks, shape.gate > 0,
    )  # fmt: skip

    def make(rng: np.random.Generator) -> Inputs:
        return qkv_inputs(shape, rng) | {
            name: value for name, value in attention_inputs(paged, rng).items() if name in ("batch", "pool", "sinks")
        } | {"waits": True}  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        given = {key: None if i[key] is None else ops.upload(i[key]) for key in ("q_norm", "k_norm", "rope", "sinks")}
        q, k, v = (ops.upload(i[key].copy()) for key in "qkv")
        pool, batch = ops.upload(i["pool"].copy()), i["batch"]
        step, kv = (
            ops.stage(batch),
            KvLayer(address_of(pool), paged.page_bytes, paged.group, 0, paged.layer_offset_bytes),
        )
        ops.prepare_qkv(
            q, k, v, given["q_norm"], given["k_norm"], shape.norm_kind, shape.norm_after_rope, 1e-6, given["rope"],
            shape.adjacent, shape.n_head, paged.q_stride, step, kv, may_wait=i["waits"],
        )  # fmt: skip
        out = ops.act(batch.n_tokens, shape.n_head * shape.value_dim)
        ops.attention(
            q, shape.n_head, paged.q_stride, paged.gated, step, kv, shape.key_dim**-0.5, window, given["sinks"], out
        )
        stored = [stored_rows(ops.download(pool), paged, batch, token) for token in range(batch.n_tokens)]
        return {
            "out": ops.download(out.f32), "stored_k": np.stack([row[0] for row in stored]),
            "stored_v": np.stack([row[1] for row in stored]),
        }  # fmt: skip

    return Case(
        f"attention prepares {name}", make, run, lambda _: keys * row,
        lambda _: 4 * keys * shape.n_head * shape.key_dim, 1e-2, kind, {"stored_k": 4e-3, "stored_v": 4e-3},
    )  # fmt: skip


CASES = [
    waiting_case("its token", QkvShape([1], [300], 8, 1, 128, 128, 72, "f16", "head", n_rot=128)),
    waiting_case("several", QkvShape([1] * 3, [1, 17, 66], 12, 2, 64, 64, 16, "f16", "head", True, 32, True), True, 50),
    waiting_case("with a gate", QkvShape([1], [40], 16, 1, 64, 64, 9, "f16", "head", n_rot=16, gate=64)),
    waiting_case("no norm, wide heads", QkvShape([1, 1], [35, 260], 4, 2, 256, 256, 16, "f16", n_rot=64)),
    waiting_case("no rotation, 40 heads a key", QkvShape([1], [70], 40, 1, 96, 80, 27, "f16")),
    waiting_case("long and short", QkvShape([1] * 3, [700, 9, 1300], 8, 2, 64, 64, 48, "f16", "head", n_rot=64)),
    waiting_case("float32, in a launch of its own", QkvShape([1], [40], 4, 2, 64, 64, 9, "f32", "head", n_rot=64)),
    waiting_case(
        "qwen3-30b 1 x 576", QkvShape([1], [576], 32, 4, 128, 128, 72, "f16", "head", n_rot=128), kind="model"
    ),
    waiting_case(
        "qwen3-30b 32 x 576",
        QkvShape([1] * 32, [576] * 32, 32, 4, 128, 128, 72, "f16", "head", n_rot=128),
        kind="model",
    ),
]
