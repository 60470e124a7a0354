"""Reference of the sampler: every filter is a sort."""

from __future__ import annotations

import numpy as np

from rimuru.ops.base import Array, SampleParams


def penalised(logits: np.ndarray, params: SampleParams, row: int) -> np.ndarray:
    """Steps 1 to 3 of SampleParams on one row; float64 [n_vocab]."""
    values = logits.astype(np.float64)
    values[params.bias_ids[row]] += params.bias_values[row]
    seen = params.history[row]
    penalty = float(params.repetition_penalty[row])
    values[seen] = np.where(values[seen] > 0, values[seen] / penalty, values[seen] * penalty)
    counts = params.output_counts[row]
    drop = params.frequency_penalty[row] * counts + params.presence_penalty[row] * (counts > 0)
    values[params.output_ids[row]] -= drop
    return values


def _softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.exp(values - values.max())
    return shifted / shifted.sum()


def kept_tokens(values: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Token ids that pass steps 4 to 6, likeliest first (equal logits: lowest id first). Never empty."""
    order = np.argsort(-values, kind="stable")
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1.0:
        before = np.cumsum(_softmax(values[order])) - _softmax(values[order])
        order = order[: max(1, int(np.count_nonzero(before < top_p)))]
    if min_p > 0.0:
        shares = np.exp(values[order] - values[order[0]])
        order = order[: max(1, int(np.count_nonzero(shares >= min_p)))]
    return order


def sample(logits: Array, params: SampleParams, out_ids: Array) -> None:
    for row in range(len(logits)):
        values = penalised(logits[row], params, row)
        temperature = float(params.temperature[row])
        if temperature == 0.0:
            out_ids[row] = np.argmax(values)
            continue
        kept = kept_tokens(values, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]))
        kept = np.sort(kept)
        shares = np.cumsum(_softmax((values[kept] - values[kept].max()) / temperature))
        drawn = np.searchsorted(shares, float(params.uniform[row]) * shares[-1], side="right")
        out_ids[row] = kept[min(int(drawn), len(kept) - 1)]
