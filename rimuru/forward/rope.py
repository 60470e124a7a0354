"""Rotation tables: cosines and sines per position, from a RopeSpec (facts section 3.2)."""

from __future__ import annotations

import math

import numpy as np

from rimuru.arch.spec import RopeSpec


def frequencies(spec: RopeSpec, factors: np.ndarray | None) -> tuple[np.ndarray, float]:
    """(float64 [n_rot / 2] angles per position, multiplier of cos and sin).

    `factors` [n_rot / 2] divide the frequencies (llama3 and longrope). YaRN: arXiv:2309.00071, with the ramp's ends
    rounded to whole pairs.
    """
    n_pairs = spec.n_rot // 2
    pair = np.arange(n_pairs, dtype=np.float64)
    theta = spec.freq_base ** (-2.0 * pair / spec.n_rot)
    if factors is not None:
        theta = theta / factors.astype(np.float64)
    if spec.yarn is None:
        return theta * spec.freq_scale, spec.magnitude
    yarn = spec.yarn

    def correction(rotations: float) -> float:
        return spec.n_rot * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(spec.freq_base))

    low = max(0.0, math.floor(correction(yarn.beta_fast)))
    high = min(spec.n_rot - 1.0, math.ceil(correction(yarn.beta_slow)))
    interpolated = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    return theta / yarn.factor * interpolated + theta * (1.0 - interpolated), spec.magnitude


def rope_table(spec: RopeSpec, factors: np.ndarray | None, n_positions: int) -> np.ndarray:
    """float32 [n_positions, n_rot]: n_rot/2 cosines, then n_rot/2 sines, of each position.

    Angles are formed in float64: at position 100,000 a float32 angle is already off by a hundredth of a turn.
    """
    theta, magnitude = frequencies(spec, factors)
    table = np.empty((n_positions, spec.n_rot), np.float32)
    half = spec.n_rot // 2
    for start in range(0, n_positions, 8192):
        angle = np.arange(start, min(start + 8192, n_positions), dtype=np.float64)[:, None] * theta
        table[start : start + len(angle), :half] = np.cos(angle) * magnitude
        table[start : start + len(angle), half:] = np.sin(angle) * magnitude
    return table
