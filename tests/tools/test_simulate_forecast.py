"""tools/bench/simulate_forecast.py: a measured cell becomes a simulation of the same load; what differs is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import simulate_forecast

STARTED = {"tokens_per_s": 100.0, "hit_rate": 0.5, "bytes_over_link_per_token": 2e6, "resident_experts": 900}


def result_of(routing: str, policy: str, streams: list[int]) -> dict[str, object]:
    cells = [{**STARTED, "streams": n, "started": n, "first_token_ms": {"mean": 9.0}} for n in streams]
    row = {
        "memory": "5GB", "policy": policy, "residency": "auto", "off": "", "routing": routing, "cells": cells,
        "memory_report": {"scratch_bytes": 100_000_000},
    }  # fmt: skip
    static = {**row, "policy": "static", "cells": []}
    ran = {"streams": streams, "prompt": 40, "ctx": 512, "warm": 0.05, "seconds": 0.1, "start_seconds": 1.0, "seed": 1}
    return {"settings": ran, "rows": [row, static]}


def test_cells_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    files[0].write_text(json.dumps(result_of("synthetic qwen3-30b", "fixed", [6, 1])))
    files[1].write_text(json.dumps(result_of("model", "cost", [2])))
    output = tmp_path / "out.json"
    words = ["--shape", "qwen1.5-moe-a2.7b", "--output", str(output), "--card", "rtx4090"]
    assert simulate_forecast.main([*map(str, files), *words]) == 0
    cells = json.loads(output.read_text())
    assert [cell["streams"] for cell in cells] == [6, 1]  # random weights route like no simulated router
    many, one = (cell["foretold"] for cell in cells)
    assert cells[0]["measured"]["tokens_per_s"] == 100.0 and cells[0]["measured"]["link_mb_per_token"] == 2.0
    assert many["started"] == 6 and one["started"] == 1 and many["first_token_ms"] > one["first_token_ms"] > 0
    assert 0 < many["hit_rate"] < one["hit_rate"] < 1 and many["resident_experts"] == one["resident_experts"]
    for found, n_streams in ((many, 6), (one, 1)):  # the link cannot carry more than the card's rate
        assert found["link_mb_per_token"] * 1e6 * found["tokens_per_s"] < 25e9
        assert found["tokens_per_s"] > 10 * n_streams
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[-1].startswith("Off by ") and lines[-1].endswith("(2 cells).")
    off = many["tokens_per_s"] / 100 - 1
    assert f"| 5GB | fixed, auto | 6 | 100 | {many['tokens_per_s']:,.0f} | {off:+.0%} |" in lines[2]


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result_of("model", "cost", [2])))
    assert simulate_forecast.main([str(path), "--shape", "qwen1.5-moe-a2.7b"]) == 1
    assert "Off by" not in capsys.readouterr().out
