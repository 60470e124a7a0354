"""Cases of verbs that follow a norm which has waited for them: a router with its choice, matrices.

`waits` of the inputs: whether the norm may wait; without, it has a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cases.common import Case, Inputs, Outputs, normal
from cases.matmul import QUANTISED_TOLERANCE, TOLERANCES, random_rows
from cases.moe import QWEN3_30B
from rimuru.arch.spec import MoeSpec
from rimuru.formats.quants import BY_NAME
from rimuru.ops.base import Act, Ops

EPS = 1e-6


def waiting_norm(ops: Ops, i: Inputs) -> Act:
    """The activation of rms_norm(x)."""
    out = ops.act(*i["x"].shape)
    ops.rms_norm(ops.upload(i["x"]), ops.upload(i["norm"]), EPS, out, may_wait=i["waits"])
    return out


def choose_case(name: str, spec: MoeSpec, n_tokens: int, width: int, waits: bool = True, kind: Any = "edge") -> Case:
    def make(rng: np.random.Generator) -> Inputs:
        return {
            "x": normal(rng, n_tokens, width), "norm": rng.uniform(0.5, 1.5, width).astype(np.float32),
            "router": normal(rng, spec.n_experts, width, scale=2 * width**-0.5),
            "bias": normal(rng, spec.n_experts), "selection": normal(rng, spec.n_experts, scale=0.1), "waits": waits,
        }  # fmt: skip

    def run(ops: Ops, i: Inputs) -> Outputs:
        shape = (n_tokens, spec.top_k)
        logits = ops.empty((n_tokens, spec.n_experts), np.float32)
        ids, weights = ops.empty(shape, np.int32), ops.empty(shape, np.float32)
        router = ops.weight(i["router"].view(np.uint8), BY_NAME["f32"], width)
        bias, selection = (ops.upload(i[k]) if spec.n_groups > 1 else None for k in ("bias", "selection"))
        x = waiting_norm(ops, i)
        ops.choose_experts(x, router, bias, logits, spec, selection, ids, weights)
        found = {"ids": ids, "weights": weights, "logits": logits, "normed": x.f32}
        return {k: ops.download(v) for k, v in found.items()}

    return Case(
        f"choose_experts {name} T={n_tokens}", make, run, lambda i: i["router"].nbytes + i["x"].nbytes,
        lambda i: 2 * n_tokens * i["router"].size, 1e-5, kind,
    )  # fmt: skip


def normed_case(name: str, formats: Sequence[str], n_rows: Sequence[int], width: int, kind: Any = "edge") -> Case:
    """Matrices of one token's norm."""

    def make(rng: np.random.Generator) -> Inputs:
        rows = [random_rows(rng, BY_NAME[f], n, width) for f, n in zip(formats, n_rows, strict=True)]
        norm = rng.uniform(0.5, 1.5, width).astype(np.float32)
        return {"x": normal(rng, 1, width), "norm": norm, "rows": rows, "waits": True}

    def run(ops: Ops, i: Inputs) -> Outputs:
        weights = [ops.weight(rows, BY_NAME[f], width) for f, rows in zip(formats, i["rows"], strict=True)]
        outs = [ops.empty((1, n), np.float32) for n in n_rows]
        x = waiting_norm(ops, i)
        ops.linear(x, weights, outs)
        return {"normed": ops.download(x.f32)} | {f"out{k}": ops.download(out) for k, out in enumerate(outs)}

    worst = max(TOLERANCES.get(f, QUANTISED_TOLERANCE) for f in formats)
    return Case(
        f"linear normed {name}", make, run, lambda i: sum(rows.nbytes for rows in i["rows"]),
        lambda i: 2 * width * sum(n_rows), worst * (1 if max(n_rows) > 40 else 6), kind, {"normed": 2e-6},
    )  # fmt: skip


CASES: list[Case] = [
    choose_case("qwen3-30b", QWEN3_30B, 1, 2048, kind="model"),
    choose_case("qwen3-30b of a made norm", QWEN3_30B, 8, 2048, False, kind="model"),
    choose_case("qwen3-30b of a made norm", QWEN3_30B, 32, 2048, False, kind="model"),
    choose_case("60 experts", MoeSpec(60, 4, 32, renormalise=True), 3, 96),
    choose_case("in groups, biases", MoeSpec(40, 6, 32, "sigmoid", True, 2.5, 4, 2), 2, 736),
    choose_case("in groups, biases", MoeSpec(40, 6, 32, "sigmoid", True, 2.5, 4, 2), 13, 160, False),
    choose_case("wide", MoeSpec(9, 2, 32, "softmax_selected"), 1, 4096),
    choose_case("too wide to wait", MoeSpec(9, 2, 32), 1, 4128),
    normed_case("q, k, v", ["q4_k", "q4_k", "q6_k"], [96, 40, 33], 1024),
    normed_case("of 2880, f16 and f32", ["q8_0", "f16", "f32"], [50, 16, 7], 2880),
    normed_case("of 96", ["q8_0"], [130], 96),
    normed_case("qwen3-30b q k v", ["q4_k", "q4_k", "q6_k"], [4096, 512, 512], 2048, "model"),
]
