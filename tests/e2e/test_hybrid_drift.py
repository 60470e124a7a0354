"""Float32 states over a long answer stay those of the float64 oracle (tools/bench/state_drift.py: 2,000 tokens)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.state_drift import measure


@pytest.mark.parametrize("arch", ["qwen35moe", "granitehybrid", "jamba"])
def test_states_do_not_drift(arch: str, tmp_path: Path) -> None:
    """Rounding is forgotten as the states fade: errors stay near the square of float32's rounding, 6e-8."""
    result = measure(arch, 300, tmp_path)
    assert len(result["state_error_by_layer"]) == 3
    assert result["state_error_max"] < 1e-11 and result["logit_error_max"] < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["qwen35moe", "granitehybrid", "jamba"])
def test_states_do_not_drift_on_a_gpu(arch: str, tmp_path: Path) -> None:
    """Larger errors than the CPU's, from 16-bit keys and values, but as level."""
    result = measure(arch, 300, tmp_path, "cuda")
    windows = result["logit_error_per_window"]
    assert len(result["state_error_by_layer"]) == 3
    assert result["state_error_max"] < 1e-6 and result["logit_error_max"] < 1e-4
    assert max(windows[-2:]) < 10 * max(windows[:2])
