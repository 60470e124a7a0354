"""Cases of what latent attention needs beside the other families: a matrix per head, and norm and rotation of parts of
a cache row. Attention over latent keys is among the cases of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from cases.attention import AttentionShape, stored_rows
from cases.common import Case, Inputs, Outputs, address_of, make_batch, normal, poisoned
from cases.matmul import QUANTISED_TOLERANCE, TOLERANCES, random_rows
from rimuru.formats.quants import BY_NAME, ENGINE_FORMATS
from rimuru.ops.base import KvLayer, Ops


def head_linear_case(
    name: str, n_tokens: int, n_head: int, n_out: int, n_in: int, rest: int = 0, kind: Any = "edge"
) -> Case:
    """Heads of n_in + rest elements through matrices [n_out, n_in] of format `name`."""
    fmt = BY_NAME[name]

    def make_inputs(rng: np.random.Generator) -> Inputs:
        return {
            "x": normal(rng, n_tokens, n_head * (n_in + rest)),
            "raw": random_rows(rng, fmt, n_head * n_out, n_in, 0.1),
        }

    def run(ops: Ops, inputs: Inputs) -> Outputs:
        out = ops.act(n_tokens, n_head * (n_out + rest))
        heads = ops.act(n_tokens * n_head, n_in)
        ops.head_linear(ops.upload(inputs["x"]), ops.weight(inputs["raw"], fmt, n_in), n_head, heads, out)
        # A product with the identity shows whether the output's form for matrices is there too.
        width = n_head * (n_out + rest)
        copy = ops.empty((n_tokens, width), np.float32)
        identity = np.eye(width, dtype=np.float16)
        kind = "q8_0" if width % 32 == 0 else "f16"
        ops.linear(out, [ops.weight(_identity_rows(identity, kind), BY_NAME[kind], width)], [copy])
        return {"out": ops.download(out.f32), "copy": ops.download(copy)}

    tolerance = TOLERANCES.get(name, 1.5 * QUANTISED_TOLERANCE)
    return Case(
        f"head_linear {name} T={n_tokens} {n_head} heads {n_out}x{n_in}+{rest}",
        make_inputs,
        run,
        lambda i: i["raw"].nbytes + i["x"].nbytes,
        lambda _: 2 * n_tokens * n_head * n_out * n_in,
        tolerance,
        kind,
        {"copy": max(tolerance, 0.05)},
    )


def _identity_rows(identity: np.ndarray, kind: str) -> np.ndarray:
    """Rows of the identity in a format: Q8_0 blocks are a half and 32 bytes."""
    if kind == "f16":
        return identity.view(np.uint8)
    n = len(identity)
    blocks = np.zeros((n, n // 32, 34), np.uint8)
    blocks[:, :, :2] = np.array([1 / 64], np.float16).view(np.uint8)
    blocks[np.arange(n), np.arange(n) // 32, 2 + np.arange(n) % 32] = 64
    return blocks.reshape(n, -1)


def latent_row_case(
    element: Any, n_new: list[int], context_len: list[int], rank: int, n_rot: int, n_head: int = 4, kind: Any = "edge"
) -> Case:
    """prepare_qkv of cache rows [latent | rope key]: norm of the first part, rotation of the last."""
    dim = rank + n_rot
    shape = AttentionShape(n_new, context_len, n_head, 1, dim, 0, 9, element, value_width=rank)

    def make_inputs(rng: np.random.Generator) -> Inputs:
        batch = make_batch(rng, n_new, context_len, [shape.page_tokens])
        angle = rng.uniform(0, 2 * np.pi, (max(context_len), n_rot // 2))
        return {
            "batch": batch,
            "pool": poisoned(shape.n_pages * shape.page_bytes),
            "q": normal(rng, batch.n_tokens, n_head * dim),
            "k": normal(rng, batch.n_tokens, dim, scale=3.0),
            "norm": normal(rng, rank),
            "rope": np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32),
        }

    def run(ops: Ops, i: Inputs) -> Outputs:
        pool, batch = ops.upload(i["pool"]), i["batch"]
        kv = KvLayer(address_of(pool), shape.page_bytes, shape.group, 0, shape.layer_offset_bytes)
        q, k = ops.upload(i["q"]), ops.upload(i["k"])
        ops.prepare_qkv(
            q, k, k, None, ops.upload(i["norm"]), "head", False, 1e-6, ops.upload(i["rope"]), True, n_head, dim,
            ops.stage(batch), kv, rope_first=rank,
        )  # fmt: skip
        image = ops.download(pool)
        stored = np.stack([stored_rows(image, shape, batch, token)[0] for token in range(batch.n_tokens)])
        return {"q": ops.download(q), "k": ops.download(k), "stored": stored}

    return Case(
        f"latent rows of {rank}+{n_rot} {element}",
        make_inputs,
        run,
        lambda i: 2 * (i["q"].nbytes + i["k"].nbytes),
        lambda i: 6 * i["q"].size,
        5e-6,
        kind,
        {"stored": {"f32": 5e-6, "f16": 4e-3, "bf16": 3e-2}[element]},
    )


HEAD_LINEAR_CASES: tuple[Case, ...] = (
    *[
        head_linear_case(fmt.name, n_tokens, 3, 24, 256 if fmt.block_elements == 256 else 64, 32)
        for fmt in ENGINE_FORMATS
        for n_tokens in (1, 9)
    ],
    head_linear_case("q8_0", 1, 1, 8, 32),
    head_linear_case("q8_0", 70, 2, 36, 96, 8),
    head_linear_case("bf16", 2, 40, 16, 64, 64),
    head_linear_case("q4_0", 3, 57, 8, 32),
    head_linear_case("q5_k", 5, 2, 600, 256),
    *[
        head_linear_case("q8_0", n_tokens, 16, *shape, kind="model")
        for n_tokens in (1, 64)
        for shape in ((512, 128, 64), (128, 512))
    ],
)

LATENT_ROW_CASES: tuple[Case, ...] = (
    latent_row_case("f32", [3, 1, 12], [20, 10, 12], 64, 16),
    latent_row_case("f16", [5, 1], [30, 28], 32, 32),
    latent_row_case("bf16", [2], [11], 512, 64, 16),
)
