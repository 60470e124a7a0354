"""tools/bench/host_experts.py, which measures on a card, as far as it runs without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from device_twin import device_store

from rimuru.engine import build
from tools.bench import host_experts
from tools.make_random_gguf import write_random_model


def test_every_way_of_reading_experts_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the device's store on the CPU: what was noted is what was counted, and all ways give the same tokens."""
    monkeypatch.setattr(build._Builder, "_make_store", device_store)
    monkeypatch.setattr(host_experts, "MOST_OVER", 1e9)  # a CPU is not what the prediction is of
    shape = {"expert_count": 16, "expert_used_count": 4}
    path = write_random_model(tmp_path / "m.gguf", "qwen3moe", "q8_0", seed=3, context_length=1024, **shape)
    output = tmp_path / "rows.json"
    command = [str(path), "--device", "cpu", "--shares", "1.0,0.5,0.25", "--new", "12", "--requests", "2"]
    assert host_experts.main([*command, "--json", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    ways = ("in place", "buffers", "places")
    assert [(row["share"], row["way"]) for row in rows] == [
        (1.0, "in place"),
        *((s, w) for s in (0.5, 0.25) for w in ways),
    ]
    assert all(row["same_tokens"] for row in rows)
    assert rows[0]["missed_bytes_per_token"] == rows[0]["missed_experts_per_token"] == 0
    for row in rows[1:]:
        assert row["missed_bytes_per_token"] > 0 and row["predicted_ms"] > rows[0]["ms_per_token"]
        if row["way"] == "in place":
            assert row["missed_bytes_per_token"] == pytest.approx(row["counted_bytes_per_token"], rel=0.1)
    by_way = {(row["share"], row["way"]): row["missed_bytes_per_token"] for row in rows}
    for way in ways:
        assert by_way[0.25, way] > by_way[0.5, way], way
    assert "OTHER TOKENS" not in capsys.readouterr().out
