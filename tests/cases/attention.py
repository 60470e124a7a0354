"""Cases of the attention verbs: batches over shuffled, NaN-filled pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cases.common import Case, Inputs, Outputs, address_of, make_batch, normal, poisoned, write_kv
from rimuru.memory.specs import KvGroupLayout
from rimuru.ops.base import KvLayer, Ops
from rimuru.ops.host import decode

Element = Literal["f32", "f16", "bf16"]
OUTPUT_TOLERANCE = 1e-5
"""Of attention's output: sums of thousands of float32 terms. The stored type matters not: all read the same bits."""
STORED_TOLERANCE: dict[str, float] = {"f32": 5e-6, "f16": 4e-3, "bf16": 3e-2}
"""Of stored keys and values: half a unit in the last place of the largest ones, where the roundings differ."""


@dataclass(frozen=True)
class AttentionShape:
    """n_new and context_len per sequence; value_dim 0 = MLA (value_width then says how much of a key is its value)."""

    n_new: Sequence[int]
    context_len: Sequence[int]
    n_head: int = 8
    n_head_kv: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page_tokens: int = 16
    element: Element = "f32"
    window: int | None = None
    sinks: bool = False
    gated: bool = False
    value_width: int = 0

    @property
    def group(self) -> KvGroupLayout:
        size = 4 if self.element == "f32" else 2
        return KvGroupLayout(
            (0, 1), self.n_head_kv, self.key_dim, self.value_dim, self.page_tokens, self.window, size,
            self.element == "bf16",
        )  # fmt: skip

    @property
    def page_bytes(self) -> int:
        return self.group.useful_bytes + 256

    @property
    def layer_offset_bytes(self) -> int:
        """The cases work in the second of the two layers of a page."""
        return self.group.layer_bytes

    @property
    def width(self) -> int:
        return self.value_dim or self.value_width

    @property
    def q_stride(self) -> int:
        return self.key_dim + (self.width if self.gated else 0)

    @property
    def n_pages(self) -> int:
        return sum(-(-c // self.page_tokens) for c in self.context_len)


def attention_inputs(shape: AttentionShape, rng: np.random.Generator) -> Inputs:
    """Batch, pool image with the keys and values of all positions, queries, sinks."""
    batch = make_batch(rng, shape.n_new, shape.context_len, [shape.page_tokens])
    pool = poisoned(shape.n_pages * shape.page_bytes)
    for seq, length in enumerate(shape.context_len):
        keys = normal(rng, length, shape.n_head_kv, shape.key_dim)
        values = normal(rng, length, shape.n_head_kv, shape.value_dim)
        pages = batch.kv_pages[0, seq]
        write_kv(pool, shape.page_bytes, shape.group, shape.layer_offset_bytes, pages, keys, values)
    return {
        "batch": batch,
        "pool": pool,
        "q": normal(rng, batch.n_tokens, shape.n_head * shape.q_stride, scale=1.5),
        "sinks": normal(rng, shape.n_head, scale=2.0) if shape.sinks else None,
    }


def run_attention(shape: AttentionShape, ops: Ops, i: Inputs) -> Outputs:
    """Call `attention` on such inputs."""
    pool = ops.upload(i["pool"])
    kv = KvLayer(address_of(pool), shape.page_bytes, shape.group, 0, shape.layer_offset_bytes)
    out = ops.act(i["batch"].n_tokens, shape.n_head * shape.width)
    sinks = None if i["sinks"] is None else ops.upload(i["sinks"])
    ops.attention(
        ops.upload(i["q"]), shape.n_head, shape.q_stride, shape.gated, ops.stage(i["batch"]), kv,
        shape.key_dim**-0.5, shape.window, sinks, out,
    )  # fmt: skip
    return {"out": ops.download(out.f32)}


def attention_case(name: str, shape: AttentionShape, kind: Any = "edge") -> Case:
    sizes = list(zip(shape.n_new, shape.context_len, strict=True))
    # A query sees what lies before it in its window; keys are read once, also where several queries see them.
    pairs = sum(int(np.minimum(np.arange(c - n, c) + 1, shape.window or c).sum()) for n, c in sizes)
    n_rows = sum(min(c, n - 1 + (shape.window or c)) for n, c in sizes)
    row_bytes = (shape.key_dim + shape.value_dim) * shape.n_head_kv * shape.group.element_bytes
    query_bytes = sum(shape.n_new) * shape.n_head * (shape.key_dim + shape.width) * 4
    return Case(
        f"attention {name}",
        lambda rng: attention_inputs(shape, rng),
        lambda ops, i: run_attention(shape, ops, i),
        lambda _: n_rows * row_bytes + query_bytes,
        lambda _: 2 * pairs * shape.n_head * (shape.key_dim + shape.width),
        OUTPUT_TOLERANCE,
        kind,
        flops_on="float32" if shape.element == "f32" else "products",
    )


ATTENTION_CASES: tuple[Case, ...] = (
    *[
        attention_case(
            f"decode, {tokens} tokens a page, context {context}", AttentionShape([1], [context], page_tokens=tokens)
        )
        for tokens in (9, 16, 27, 72)
        for context in (1, tokens - 1, tokens, tokens + 1, 3 * tokens + 1)
    ],
    *[
        attention_case(f"{n_head} heads over {n_kv}", AttentionShape([1, 3], [70, 65], n_head=n_head, n_head_kv=n_kv))
        for n_head, n_kv in ((1, 1), (3, 3), (6, 2), (16, 1), (32, 2))
    ],
    *[
        attention_case(
            f"{element} keys of {dim}", AttentionShape([2, 1], [40, 67], key_dim=dim, value_dim=dim, element=element)
        )
        for element, dim in (
            ("f16", 64),
            ("bf16", 128),
            ("f16", 96),
            ("f32", 256),
            ("bf16", 24),
            ("f16", 80),
            ("f32", 40),
        )
    ],
    attention_case(
        "keys wider than values", AttentionShape([5, 1], [33, 130], key_dim=192, value_dim=128, element="f16")
    ),
    attention_case("values wider than keys", AttentionShape([5], [33], key_dim=24, value_dim=72)),
    attention_case("prefill", AttentionShape([150], [150], element="f16", page_tokens=27)),
    attention_case(
        "prefill after a context", AttentionShape([70, 1, 30], [200, 64, 31], element="bf16", page_tokens=9)
    ),
    *[
        attention_case(f"window {window}", AttentionShape([1, 40], [200, 150], window=window, page_tokens=27))
        for window in (1, 16, 64, 100, 500)
    ],
    attention_case("sinks", AttentionShape([1, 20], [100, 60], sinks=True, element="f16")),
    attention_case("sinks and window", AttentionShape([1, 20], [300, 60], sinks=True, window=33)),
    attention_case("gated", AttentionShape([1, 20], [100, 60], gated=True, key_dim=256, value_dim=256, element="f16")),
    attention_case(
        "latent", AttentionShape([1, 9], [100, 60], n_head=16, n_head_kv=1, key_dim=96, value_dim=0, value_width=64)
    ),
    attention_case(
        "several spans", AttentionShape([1, 2], [2200, 1025], n_head=4, n_head_kv=1, page_tokens=72, element="f16")
    ),
    attention_case("several spans, window", AttentionShape([1], [2200], window=1500, sinks=True, page_tokens=72)),
)

BENCH_SHAPES: dict[str, AttentionShape] = {
    f"decode {n_seqs} x {context} {element}": AttentionShape(
        [1] * n_seqs,
        [context] * n_seqs,
        32,
        4,
        128,
        128,
        64,
        element,  # type: ignore[arg-type]
    )
    for element in ("f32", "f16")
    for n_seqs, context in ((1, 1024), (1, 4096), (8, 1024))
} | {
    f"prefill {n} {element}": AttentionShape([n], [n], 32, 4, 128, 128, 64, element)  # type: ignore[arg-type]
    for element in ("f32", "f16")
    for n in (256, 2048)
}


# ---- prepare_qkv


@dataclass(frozen=True)
class QkvShape:
    n_new: Sequence[int]
    context_len: Sequence[int]
    n_head: int = 4
    n_head_kv: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page_tokens: int = 9
    element: Element = "f32"
    norm_kind: str = "none"
    norm_after_rope: bool = False
    n_rot: int = 0
    adjacent: bool = False
    gate: int = 0
    """Elements after a query in its stride."""

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(
            self.n_new, self.context_len, self.n_head, self.n_head_kv, self.key_dim, self.value_dim, self.page_tokens,
            self.element,
        )  # fmt: skip


def qkv_inputs(shape: QkvShape, rng: np.random.Generator) -> Inputs:
    """Batch, NaN-filled pool, projections, norm weights, rotation table."""
    batch = make_batch(rng, shape.n_new, shape.context_len, [shape.page_tokens])
    stride, n_tokens = shape.key_dim + shape.gate, batch.n_tokens
    q_weight = {"none": 0, "head": shape.key_dim, "vector": shape.n_head * shape.key_dim}[shape.norm_kind]
    k_weight = {"none": 0, "head": shape.key_dim, "vector": shape.n_head_kv * shape.key_dim}[shape.norm_kind]
    angle = rng.uniform(0, 2 * np.pi, (max(shape.context_len), shape.n_rot // 2))
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    return {
        "batch": batch,
        "pool": poisoned(shape.attention.n_pages * shape.attention.page_bytes),
        "q": normal(rng, n_tokens, shape.n_head * stride),
        "k": normal(rng, n_tokens, shape.n_head_kv * shape.key_dim),
        "v": normal(rng, n_tokens, shape.n_head_kv * shape.value_dim),
        "q_norm": normal(rng, q_weight) if q_weight else None,
        "k_norm": normal(rng, k_weight) if k_weight else None,
        "rope": table if shape.n_rot else None,
    }


def run_qkv(shape: QkvShape, ops: Ops, i: Inputs) -> Outputs:
    """Call `prepare_qkv`; returns q, k and what lies in the pages for the new tokens."""
    pool, batch = ops.upload(i["pool"]), i["batch"]
    paged = shape.attention
    kv = KvLayer(address_of(pool), paged.page_bytes, paged.group, 0, paged.layer_offset_bytes)
    q, k, v = ops.upload(i["q"]), ops.upload(i["k"]), ops.upload(i["v"])

    def given(name: str) -> Any:
        return None if i[name] is None else ops.upload(i[name])

    ops.prepare_qkv(
        q, k, v, given("q_norm"), given("k_norm"), shape.norm_kind, shape.norm_after_rope, 1e-6, given("rope"),
        shape.adjacent, shape.n_head, shape.key_dim + shape.gate, ops.stage(batch), kv,
    )  # fmt: skip
    image = ops.download(pool)
    stored = [stored_rows(image, paged, batch, token) for token in range(batch.n_tokens)]
    written = np.count_nonzero(image != 0xFF) > 0
    return {
        "q": ops.download(q),
        "k": ops.download(k),
        "stored_k": np.stack([row[0] for row in stored]),
        "stored_v": np.stack([row[1] for row in stored]),
        "written": np.array([written]),
    }


def stored_rows(image: np.ndarray, shape: AttentionShape, batch: Any, token: int) -> tuple[np.ndarray, np.ndarray]:
    """(keys [n_head_kv, key_dim], values [n_head_kv, value_dim]) of one token in a pool image."""
    group, size = shape.group, shape.group.element_bytes
    block, slot = divmod(int(batch.positions[token]), shape.page_tokens)
    page = int(batch.kv_pages[0, batch.seq_of_token[token], block])
    start = page * shape.page_bytes + shape.layer_offset_bytes
    dtype = np.float32 if size == 4 else (np.uint16 if shape.element == "bf16" else np.float16)
    n_keys = group.n_head_kv * shape.page_tokens * shape.key_dim
    elements = image[start : start + group.layer_bytes].view(dtype)
    keys = elements[:n_keys].reshape(group.n_head_kv, shape.page_tokens, shape.key_dim)[:, slot]
    values = elements[n_keys:].reshape(group.n_head_kv, shape.page_tokens, shape.value_dim)[:, slot]
    return decode(keys, shape.element), decode(values, shape.element)


def qkv_case(name: str, shape: QkvShape, kind: Any = "edge") -> Case:
    row = shape.n_head * (shape.key_dim + shape.gate) + shape.n_head_kv * (shape.key_dim + shape.value_dim)
    kv_row = shape.n_head_kv * (shape.key_dim + shape.value_dim) * shape.attention.group.element_bytes
    n_tokens = sum(shape.n_new)
    stored = STORED_TOLERANCE[shape.element]
    return Case(
        f"prepare_qkv {name}",
        lambda rng: qkv_inputs(shape, rng),
        lambda ops, i: run_qkv(shape, ops, i),
        lambda _: n_tokens * (row * 8 + kv_row),
        lambda _: n_tokens * row * 8,
        5e-6,
        kind,
        {"stored_k": stored, "stored_v": stored},
    )


QKV_CASES: tuple[Case, ...] = (
    qkv_case("plain", QkvShape([3, 1], [20, 10])),
    *[
        qkv_case(
            f"{kind} norm {'after' if after else 'before'} {'adjacent' if adjacent else 'half'} rope {element}",
            QkvShape(
                [3, 1, 12],
                [20, 10, 12],
                norm_kind=kind,
                norm_after_rope=after,
                n_rot=64,
                adjacent=adjacent,
                element=element,
            ),
        )
        for kind, after, adjacent, element in (
            ("head", False, False, "f32"),
            ("head", False, True, "f16"),
            ("head", True, False, "bf16"),
            ("vector", False, False, "f16"),
            ("vector", True, True, "f32"),
            ("none", False, True, "bf16"),
        )
    ],
    qkv_case(
        "partial rope, gate",
        QkvShape([5, 1], [30, 28], key_dim=256, value_dim=256, n_rot=64, norm_kind="head", gate=256, element="f16"),
    ),
    qkv_case("wider values", QkvShape([5], [30], key_dim=24, value_dim=40, n_rot=8, page_tokens=27)),
    qkv_case("latent keys", QkvShape([5], [30], n_head_kv=1, key_dim=96, value_dim=0)),
    qkv_case("many tokens", QkvShape([80, 40], [80, 90], 32, 4, 128, 128, 72, "f16", "head", n_rot=128), "model"),
)
