"""Reference of the expert verbs: one (token, slot) pair after the other."""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import MoeSpec
from rimuru.formats.quants_ref import dequantize
from rimuru.memory.specs import ProjectionLayout
from rimuru.ops.base import Act, Array, ExpertTable, MoeScratch
from rimuru.ops.host import bytes_at
from rimuru.ops.reference.pointwise import activate, sigmoid, softplus


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


def _probabilities(logits: np.ndarray, spec: MoeSpec) -> np.ndarray:
    if spec.gating == "softmax":
        return _softmax(logits)
    if spec.gating == "sigmoid":
        return sigmoid(logits)
    if spec.gating == "sqrt_softplus":
        return np.sqrt(softplus(logits))
    return logits


def _drop_groups(scores: np.ndarray, spec: MoeSpec) -> np.ndarray:
    """Scores with -inf in all but the best groups; a group counts the sum of its two largest scores."""
    if spec.n_groups <= 1:
        return scores
    groups = scores.reshape(spec.n_groups, -1)
    totals = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    keep = np.argsort(-totals, kind="stable")[: spec.n_groups_used]
    kept = np.full_like(groups, -np.inf)
    kept[keep] = groups[keep]
    return kept.reshape(-1)


def route(logits: Array, spec: MoeSpec, bias: Array | None, ids: Array, weights: Array) -> None:
    for row, logit_row in enumerate(logits.astype(np.float64)):
        probabilities = _probabilities(logit_row, spec)
        scores = _drop_groups(probabilities if bias is None else probabilities + bias, spec)
        chosen = np.argsort(-scores, kind="stable")[: spec.top_k]
        picked = _softmax(logit_row[chosen]) if spec.gating == "softmax_selected" else probabilities[chosen]
        if spec.renormalise:
            picked = picked / max(picked.sum(), 6.103515625e-5)
        ids[row] = chosen
        weights[row] = picked * (spec.weights_scale or 1.0)


def _matrix(table: ExpertTable, expert: int, projection: ProjectionLayout) -> np.ndarray:
    """float64 [n_rows, n_in] of one projection, read through its page addresses."""
    raw = np.empty((projection.n_rows, projection.row_bytes), np.uint8)
    for start in range(0, projection.n_rows, projection.rows_per_page):
        page = projection.first_page + start // projection.rows_per_page
        count = min(projection.rows_per_page, projection.n_rows - start)
        stored = bytes_at(int(table.addresses[expert, page]), count * projection.row_bytes)
        raw[start : start + count] = stored.reshape(count, -1)
    return dequantize(raw, projection.format).astype(np.float64)


def _expert(x: np.ndarray, table: ExpertTable, expert: int, spec: MoeSpec) -> np.ndarray:
    """What one expert makes of one row x [n_in]: float64 [n_out]."""

    def apply(name: str, values: np.ndarray) -> np.ndarray | None:
        projection = table.layout.projection(name)
        if projection is None:
            return None
        product = _matrix(table, expert, projection) @ values
        if name in table.factors:
            product = product * table.factors[name][expert]
        return product + table.biases[name][expert] if name in table.biases else product

    up = apply("up", x)
    if up is None:
        raise ValueError(f"block {table.layout.layer}: experts without an up projection")
    down = apply("down", activate(apply("gate", x), up, spec.activation))
    if down is None:
        raise ValueError(f"block {table.layout.layer}: experts without a down projection")
    return down


def moe_experts(
    x: Act, ids: Array, table: ExpertTable, active: Array | None, spec: MoeSpec, scratch: MoeScratch
) -> None:
    n_tokens, top_k = ids.shape
    for token in range(n_tokens):
        for slot in range(top_k):
            expert = int(ids[token, slot])
            if active is None or active[expert]:
                row = x.f32[token].astype(np.float64)
                scratch.out[token * top_k + slot] = _expert(row, table, expert, spec)


def moe_combine(scratch: MoeScratch, weights: Array, out: Array, add: bool, scale: float) -> None:
    n_tokens, top_k = weights.shape
    slots = scratch.out[: n_tokens * top_k].reshape(n_tokens, top_k, -1).astype(np.float64)
    total = scale * np.einsum("tk,tkw->tw", weights.astype(np.float64), slots)
    out[...] = out + total if add else total
