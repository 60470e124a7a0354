"""Rows whose end is no whole superblock: what lies behind them in memory, whatever it is, changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru.formats.quants import BY_NAME
from rimuru.ops.cpu import CpuOps
from rimuru.ops.cpu.dot import FORMATS
from rimuru.ops.cpu.quantize import quantize_act

OPS = CpuOps()
SHORT = sorted(name for name in FORMATS if BY_NAME[name].block_elements < 256)


def products(raw: np.ndarray, name: str, x: np.ndarray) -> np.ndarray:
    """float32 [T, n_out] of packed rows and activations."""
    act = OPS.act(*x.shape)
    act.f32[:] = x
    quantize_act(act, len(x))
    out = np.full((len(x), len(raw)), np.nan, np.float32)
    OPS.linear(act, (OPS.weight(raw, BY_NAME[name], x.shape[1]),), (out,))
    return out


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_neighbours_do_not_matter(name: str, n_tokens: int) -> None:
    fmt, rng = BY_NAME[name], np.random.default_rng(7)
    for n_blocks in (1, 2, 3, 9):
        n_in = n_blocks * fmt.block_elements
        if n_in % 256 == 0:
            continue
        raw = rng.integers(0, 256, (23, n_blocks * fmt.block_bytes), dtype=np.uint8)
        x = rng.normal(0, 1, (n_tokens, n_in)).astype(np.float32)
        alone = np.concatenate([products(raw[i : i + 1].copy(), name, x) for i in range(len(raw))], axis=1)
        together = products(raw, name, x)
        assert np.array_equal(together, alone, equal_nan=True)
        # Rows that are finite alone stay so between rows of the largest and strangest bytes.
        wild = np.full((3 * len(raw), raw.shape[1]), 0xFF, np.uint8)
        wild[::3] = raw
        assert np.array_equal(products(wild, name, x)[:, ::3], alone, equal_nan=True)
