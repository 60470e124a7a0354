"""tools/bench/control_loop.py: every step of both policies is timed, and the parts add up to the loop."""

from __future__ import annotations

import pytest

from tools.bench import control_loop


@pytest.mark.parametrize("policy", ["paper", "cost"])
def test_the_parts_add_up(policy: str) -> None:
    row = control_loop.measure(policy, 24)
    assert row["experts"] == 6144 and row["mean_concurrency"] > 30
    parts = [row[f"{name}_us"] for name in ("loop", "adjust", "residency", "schedule", "layers")]
    loop, adjust, residency, schedule, _ = parts
    assert loop["calls"] == adjust["calls"] == residency["calls"] == schedule["calls"] > 20
    assert loop["mean"] == pytest.approx(adjust["mean"] + residency["mean"], abs=0.2)
    assert schedule["mean"] > adjust["mean"] > 0
    device = row["device_us"]
    assert device["calls"] == 87 and device["p95"] > device["p50"] > 0  # 96 steps but the first tenth
    assert row["device_loop_us"]["mean"] == pytest.approx(adjust["mean"] + device["mean"], abs=0.2)
    assert all(0 < part["p50"] <= part["p95"] for part in parts)
