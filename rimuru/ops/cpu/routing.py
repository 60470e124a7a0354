"""The router's choice of experts on the CPU, in float64: choosing is discontinuous, and it costs next to nothing."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from rimuru.arch.spec import Gating, MoeSpec
from rimuru.ops.base import Array

_GATINGS: dict[Gating, int] = {"softmax": 0, "sigmoid": 1, "softmax_selected": 2, "sqrt_softplus": 3}
_NO_BIAS = np.empty(0, np.float32)
_LEAST_SUM = 6.103515625e-5


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _probability(logit, gating, largest):  # type: ignore[no-untyped-def]
    """The gate's value of one logit; for softmax still to be divided by its sum."""
    if gating == 0:
        return math.exp(logit - largest)
    if gating == 1:
        return 1.0 / (1.0 + math.exp(-logit))
    if gating == 3:
        return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))
    return logit


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _drop_groups(scores, n_groups, n_used, totals):  # type: ignore[no-untyped-def]
    """Set the scores outside the n_used best groups to -inf; a group counts the sum of its two largest scores."""
    size = scores.size // n_groups
    for group in range(n_groups):
        first = second = -np.inf
        for i in range(group * size, (group + 1) * size):
            if scores[i] > first:
                first, second = scores[i], first
            elif scores[i] > second:
                second = scores[i]
        totals[group] = first if size == 1 else first + second
    for _ in range(n_groups - n_used):
        worst = 0
        for group in range(n_groups):
            if totals[group] <= totals[worst]:
                worst = group
        totals[worst] = np.inf
        scores[worst * size : (worst + 1) * size] = -np.inf


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _choose(scores, taken, chosen):  # type: ignore[no-untyped-def]
    """Ids of the largest scores, largest first, lowest id first among equals; also when they are -inf."""
    taken[:] = False
    for slot in range(chosen.size):
        best = -1
        for i in range(scores.size):
            if not taken[i] and (best < 0 or scores[i] > scores[best]):
                best = i
        taken[best] = True
        chosen[slot] = best


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _route(logits, gating, n_groups, n_used, bias, renormalise, scale, ids, weights):  # type: ignore[no-untyped-def]
    n_experts, top_k = logits.shape[1], ids.shape[1]
    probabilities, scores = np.empty(n_experts, np.float64), np.empty(n_experts, np.float64)
    picked, totals = np.empty(top_k, np.float64), np.empty(n_groups, np.float64)
    taken = np.empty(n_experts, np.bool_)
    for t in range(logits.shape[0]):
        largest = np.float64(logits[t].max())
        total = 0.0
        for i in range(n_experts):
            probabilities[i] = _probability(np.float64(logits[t, i]), gating, largest)
            total += probabilities[i]
        for i in range(n_experts):
            if gating == 0:
                probabilities[i] /= total
            scores[i] = probabilities[i] + bias[i] if bias.size > 0 else probabilities[i]
        if n_groups > 1:
            _drop_groups(scores, n_groups, n_used, totals)
        _choose(scores, taken, ids[t])
        peak = np.float64(-np.inf)
        for slot in range(top_k):
            peak = max(peak, np.float64(logits[t, ids[t, slot]]))
        total = 0.0
        for slot in range(top_k):
            expert = ids[t, slot]
            picked[slot] = math.exp(logits[t, expert] - peak) if gating == 2 else probabilities[expert]
            total += picked[slot]
        factor = scale / total if gating == 2 else scale
        if renormalise:
            factor = scale / max(1.0 if gating == 2 else total, _LEAST_SUM) / (total if gating == 2 else 1.0)
        for slot in range(top_k):
            weights[t, slot] = picked[slot] * factor


def route(logits: Array, spec: MoeSpec, bias: Array | None, ids: Array, weights: Array) -> None:
    """See `Ops.route`."""
    _route(
        logits, _GATINGS[spec.gating], spec.n_groups, spec.n_groups_used, _NO_BIAS if bias is None else bias,
        spec.renormalise, spec.weights_scale or 1.0, ids, weights,
    )  # fmt: skip
