"""The sampler on the CPU: no sort of the vocabulary.

Every filter keeps a prefix of the tokens ordered by falling logit, then rising id. Such a prefix is one pair (lowest
logit, highest id among tokens of exactly that logit). It is found by a histogram over the distance to the largest
logit; only the bucket in which the prefix ends is sorted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from rimuru.ops.base import Array, SampleParams
from rimuru.ops.cpu.lanes import exp, largest

_BUCKETS_PER_NAT = 32
_N_BUCKETS = 64 * _BUCKETS_PER_NAT


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _argmax(values):  # type: ignore[no-untyped-def]
    """Id of the largest value, the lowest one among equals."""
    best = largest(values.ctypes.data, values.size)
    for i in range(values.size):
        if values[i] == best:
            return i
    return 0


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _penalise(  # type: ignore[no-untyped-def]
    values, bias_ids, bias_values, history, repetition, output_ids, output_counts, frequency, presence
):
    """Steps 1 to 3 of SampleParams, in place."""
    for i in range(bias_ids.size):
        values[bias_ids[i]] += bias_values[i]
    if repetition != np.float32(1.0):
        for i in range(history.size):
            value = values[history[i]]
            values[history[i]] = value / repetition if value > np.float32(0.0) else value * repetition
    if frequency != np.float32(0.0) or presence != np.float32(0.0):
        for i in range(output_ids.size):
            if output_counts[i] > 0:
                values[output_ids[i]] -= frequency * np.float32(output_counts[i]) + presence


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _bucket(value, top):  # type: ignore[no-untyped-def]
    distance = (np.float64(top) - np.float64(value)) * _BUCKETS_PER_NAT
    return np.int64(distance) if distance < _N_BUCKETS - 1 else _N_BUCKETS - 1


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _prefix(values, shares, top, limit, by_count, lowest, last_id):  # type: ignore[no-untyped-def]
    """Shorten the prefix (lowest, last_id): a token stays while the ones before it weigh less than `limit`.

    A token weighs 1 (by_count) or its share; `limit` is in tokens, or a part of all shares of the prefix.
    """
    weights = np.zeros(_N_BUCKETS, np.float64)
    total = 0.0
    for i in range(values.size):
        if values[i] > lowest or (values[i] == lowest and i <= last_id):
            weight = 1.0 if by_count else np.float64(shares[i])
            weights[_bucket(values[i], top)] += weight
            total += weight
    goal = limit if by_count else limit * total
    before, end = 0.0, 0
    while end < _N_BUCKETS and before + weights[end] < goal:
        before += weights[end]
        end += 1
    if end == _N_BUCKETS:
        return lowest, last_id
    ids = np.empty(values.size, np.int64)
    count = 0
    for i in range(values.size):
        if (values[i] > lowest or (values[i] == lowest and i <= last_id)) and _bucket(values[i], top) == end:
            ids[count] = i
            count += 1
    order = np.argsort(-values[ids[:count]], kind="mergesort")
    kept_value, kept_id = np.float64(top), np.int64(-1)
    for place in order:
        # The best token of all stays whatever the limit.
        if before >= goal and kept_id >= 0:
            break
        kept_value, kept_id = np.float64(values[ids[place]]), ids[place]
        before += 1.0 if by_count else np.float64(shares[kept_id])
    return kept_value, kept_id


@njit(cache=True, nogil=True, fastmath=False, error_model="numpy")
def _draw(values, temperature, top_k, top_p, min_p, uniform):  # type: ignore[no-untyped-def]
    """Steps 4 to 7 of SampleParams on penalised logits."""
    top = largest(values.ctypes.data, values.size)
    shares = np.empty(values.size, np.float32)
    lowest, last_id = np.float64(-np.inf), np.int64(values.size)
    if 0 < top_k < values.size:
        lowest, last_id = _prefix(values, shares, top, np.float64(top_k), True, lowest, last_id)
    if top_p < 1.0:
        for i in range(values.size):
            shares[i] = exp(values[i] - top)
        lowest, last_id = _prefix(values, shares, top, np.float64(top_p), False, lowest, last_id)
    if min_p > 0.0:
        least = min(np.float64(top), np.float64(top) + math.log(np.float64(min_p)))
        if least > lowest:
            lowest, last_id = least, np.int64(values.size)
    total = 0.0
    for i in range(values.size):
        shares[i] = exp((values[i] - top) / temperature)
    for i in range(values.size):
        if values[i] > lowest or (values[i] == lowest and i <= last_id):
            total += np.float64(shares[i])
    goal, passed, drawn = np.float64(uniform) * total, 0.0, 0
    for i in range(values.size):
        if values[i] > lowest or (values[i] == lowest and i <= last_id):
            passed += np.float64(shares[i])
            drawn = i
            if passed > goal:
                break
    return drawn


def sample(logits: Array, params: SampleParams, out_ids: Array) -> None:
    """See `Ops.sample` and `SampleParams`. `logits` keep their values."""
    for row in range(logits.shape[0]):
        values = logits[row]
        if _has_penalties(params, row):
            values = values.copy()
            _penalise(
                values, params.bias_ids[row], params.bias_values[row], params.history[row],
                params.repetition_penalty[row], params.output_ids[row], params.output_counts[row],
                params.frequency_penalty[row], params.presence_penalty[row],
            )  # fmt: skip
        if params.temperature[row] == 0.0:
            out_ids[row] = _argmax(values)
        else:
            out_ids[row] = _draw(
                values, params.temperature[row], params.top_k[row], params.top_p[row], params.min_p[row],
                params.uniform[row],
            )  # fmt: skip


def _has_penalties(params: SampleParams, row: int) -> bool:
    penalties: tuple[Any, ...] = (params.frequency_penalty[row], params.presence_penalty[row])
    return params.bias_ids[row].size > 0 or params.repetition_penalty[row] != 1.0 or any(penalties)
