"""tools/bench/simulate_forecast.py: a measured cell becomes a simulation of the same load; what differs is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import simulate_forecast
from tools.bench.elastic_table import merged

STARTED = {"tokens_per_s": 100.0, "hit_rate": 0.5, "bytes_over_link_per_token": 2e6, "resident_experts": 900}


def result_of(routing: str, policy: str, streams: list[int]) -> dict[str, object]:
    cells = [{**STARTED, "streams": n, "started": n, "first_token_ms": {"mean": 9.0}} for n in streams]
    row = {
        "memory": "5GB", "policy": policy, "residency": "auto", "off": "", "routing": routing, "cells": cells,
        "memory_report": {"scratch_bytes": 100_000_000},
    }  # fmt: skip
    static = {**row, "policy": "static", "cells": []}
    ran = {
        "streams": streams, "prompt": 40, "ctx": 512, "warm": 0.05, "seconds": 0.1, "start_seconds": 1.0, "seed": 1,
        "memory": ["5GB"], "routing": routing.split()[0], "ablate": False,
    }  # fmt: skip
    return {"model": "m.gguf", "card": "a card", "settings": ran, "rows": [row, static]}


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


def test_rows_of_merged_runs_are_foretold_as_each_was_measured(tmp_path: Path) -> None:
    """An ablation of one stream and the table of several: each row with the times of its own run."""
    table, ablation = result_of("synthetic qwen3-30b", "cost", [6, 1]), result_of("synthetic qwen3-30b", "cost", [1])
    ablation["settings"] |= {"ablate": True, "warm": 0.2}  # type: ignore[operator]
    ablation["rows"] = [{**ablation["rows"][0], "off": off} for off in ("fill_on_read", "prefetch", "in_place")]  # type: ignore[index]
    paths = [tmp_path / name for name in ("table.json", "ablation.json")]
    for path, result in zip(paths, (table, ablation), strict=True):
        path.write_text(json.dumps(result))
    (tmp_path / "all.json").write_text(json.dumps(merged(paths)))
    output = tmp_path / "out.json"
    words = ["--shape", "qwen1.5-moe-a2.7b", "--output", str(output), "--card", "rtx4090"]
    assert simulate_forecast.main([str(tmp_path / "all.json"), *words]) == 0
    cells = {(cell["off"], cell["streams"]): cell["foretold"] for cell in json.loads(output.read_text())}
    assert list(cells) == [("", 6), ("", 1), ("fill_on_read", 1), ("prefetch", 1)]
    assert cells["fill_on_read", 1]["hit_rate"] < cells["", 1]["hit_rate"]
    assert cells["prefetch", 1]["resident_experts"] > cells["", 1]["resident_experts"]  # loading buffers are pages too
    assert output.with_suffix(".md").read_text().count("| 5GB | cost, auto") == 4
    rows = json.loads((tmp_path / "all.json").read_text())
    for row, warm in zip(rows["rows"], (0.05, None, 0.2, 0.2), strict=False):
        assert warm is None or simulate_forecast.settings_of_run(rows, row)["warm"] == warm


def test_what_elastic_py_did_not_write_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[]")
    assert simulate_forecast.main([str(tmp_path / "a.json")]) == 2
    assert "a.json" in capsys.readouterr().err


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(result_of("model", "cost", [2])))
    assert simulate_forecast.main([str(path), "--shape", "qwen1.5-moe-a2.7b"]) == 1
    assert "Off by" not in capsys.readouterr().out
