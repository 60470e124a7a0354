"""Inner loop of the synthetic router: scores of every expert for some tokens of one stream, top k of each layer."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True, fastmath=False)
def route_stream(
    bias: np.ndarray,  # float32 [L, E]
    slow: np.ndarray,  # float32 [L, E]: the topic; moves on with the stream unless `shared`
    fast: np.ndarray,  # float32 [L, E]
    normals: np.ndarray,  # float32 [N], N a power of two: N(0, 1) samples to read windows of
    state: int,  # of the generator that places the windows
    n_tokens: int,
    rho_slow: float,
    rho_fast: float,
    step_slow: float,  # sqrt(1 - rho^2) * standard deviation
    step_fast: float,
    shared: bool,
    top_k: int,
    counts: np.ndarray,  # int32 [L, E]: + 1 for each choice
    chosen: np.ndarray,  # int16 [n_tokens, L, top_k] or [0, 0, 0]: the choices themselves
) -> int:
    """score = bias + slow + fast + noise per token; the top_k of each layer are counted. Returns the next state."""
    n_layers, n_experts = bias.shape
    room = normals.size - 3 * n_experts
    scores = np.empty(n_experts, np.float32)
    best = np.empty(top_k, np.int64)
    rs, rf = np.float32(rho_slow), np.float32(rho_fast)
    ss, sf = np.float32(step_slow), np.float32(step_fast)
    record = chosen.shape[0] > 0
    for token in range(n_tokens):
        for layer in range(n_layers):
            state = (state * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
            at = (state >> 20) % room
            slow_row, fast_row, bias_row = slow[layer], fast[layer], bias[layer]
            first, second = normals[at : at + n_experts], normals[at + n_experts : at + 2 * n_experts]
            third = normals[at + 2 * n_experts : at + 3 * n_experts]
            if not shared:
                for e in range(n_experts):
                    slow_row[e] = rs * slow_row[e] + ss * first[e]
            for e in range(n_experts):
                fast_row[e] = rf * fast_row[e] + sf * second[e]
            for e in range(n_experts):
                scores[e] = bias_row[e] + slow_row[e] + fast_row[e] + third[e]
            floor = np.float32(-np.inf)
            n_best = 0
            for e in range(n_experts):
                if scores[e] <= floor:
                    continue
                place = n_best if n_best < top_k else top_k - 1
                n_best = min(n_best + 1, top_k)
                while place > 0 and scores[best[place - 1]] < scores[e]:
                    best[place] = best[place - 1]
                    place -= 1
                best[place] = e
                if n_best == top_k:
                    floor = scores[best[top_k - 1]]
            for i in range(top_k):
                counts[layer, best[i]] += 1
                if record:
                    chosen[token, layer, i] = best[i]
    return state


@numba.njit(cache=True, nogil=True, fastmath=False)
def advance(values: np.ndarray, normals: np.ndarray, at: int, rho: float, step: float) -> None:
    """One AR(1) move of float32 [L, E] by a window of normals starting at `at` (read round the table)."""
    flat = values.reshape(-1)
    r, s = np.float32(rho), np.float32(step)
    for i in range(flat.size):
        flat[i] = r * flat[i] + s * normals[(at + i) % normals.size]
