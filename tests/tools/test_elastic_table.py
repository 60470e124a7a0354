"""tools/bench/elastic.py on a tiny model: every kind of row, what does not fit, and an engine left consistent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rimuru import LLM
from tools.bench import elastic
from tools.make_random_gguf import write_random_model

QUICK = ["--device", "cpu", "--prompt", "12", "--ctx", "128", "--warm", "0.02", "--seconds", "0.05", "--threads", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("elastic") / "random.gguf", arch="qwen3moe", quant="q8_0", seed=3)


@pytest.fixture(scope="module")
def budgets(model: Path) -> tuple[int, int]:
    """(bytes in which everything fits, bytes in which half of the experts do)."""
    with LLM(model, device="cpu", context=128, max_sequences=3, policy="static", prefix_cache=False) as llm:
        report = llm.memory()
        experts = report["views"]["expert"]["bytes"]
        return report["total_bytes"], report["total_bytes"] - experts // 2


def test_the_table(model: Path, budgets: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "table.json"
    sizes = ",".join(str(n) for n in budgets)
    command = [str(model), *QUICK, "--memory", sizes, "--streams", "3,1", "--output", str(output)]
    assert elastic.main([*command, "--routing", "synthetic"]) == 0
    values = json.loads(output.read_text())
    rows = {(row["memory"], row["policy"], row["residency"]): row for row in values["rows"]}
    whole, half = (str(n) for n in budgets)
    others = {("paper", "auto"), ("fixed", "auto"), ("static", "auto")}
    assert {key[1:] for key in rows if key[0] == half} == {("cost", r) for r in ("auto", "hotset", "recency")} | others
    left_out = [line for line in values["left_out"] if line.startswith(whole)]
    assert all("cost, " in line and "stay in the pool" in line for line in left_out)
    assert len([key for key in rows if key[0] == whole]) + len(left_out) == 6
    for (memory, policy, _), row in rows.items():
        if (memory, policy) == (half, "static"):
            assert not row["cells"] and "memory" in row["error"]
            continue
        assert "error" not in row and row["routing"] == "synthetic qwen3-30b"
        assert [cell["streams"] for cell in row["cells"]] == [3, 1]
        for cell in row["cells"]:
            assert cell["tokens_per_s"] > 0 and cell["started"] == cell["streams"]
            assert cell["first_token_ms"]["max"] >= cell["first_token_ms"]["mean"] > 0
            assert 0 <= cell["hit_rate"] <= 1
    assert all(cell["hit_rate"] == 1 for cell in rows[whole, "static", "auto"]["cells"])
    # a cell is a few steps: some may find all that they want
    assert any(
        cell["bytes_over_link_per_token"] > 0 for key, row in rows.items() if key[0] == half for cell in row["cells"]
    )
    assert len(values["loads"]) == 5  # elastic and fixed twice, static once
    assert values["model"] == model.name and values["card"] == "CPU" and values["date"].endswith("UTC")
    printed = capsys.readouterr().out
    assert printed.count("| cost, ") == 6 - len(left_out) and "refuses to start" in printed
    assert "Routing: synthetic qwen3-30b" in printed and f"{half}, cost: `auto` reaches" in printed
    assert elastic.main(["--table", str(output)]) == 0
    assert capsys.readouterr().out == printed


def test_rows_of_several_files_make_one_table_for_each_routing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cell(streams: int, rate: float, hits: float | None = 0.5, started: int | None = None) -> dict[str, object]:
        return {
            "streams": streams, "started": streams if started is None else started, "tokens_per_s": rate,
            "per_token_ms": 1e3 * streams / rate, "first_token_ms": {"mean": 80.0}, "hit_rate": hits,
            "bytes_over_link_per_token": 2.5e6,
        }  # fmt: skip

    def row(memory: str, residency: str, cells: list[object], **more: object) -> dict[str, object]:
        prompts = {"first_token_alone_ms": 44.4, "prefill_2048_tokens_per_s": 9876.0}
        base = {"memory": memory, "policy": "cost", "residency": residency, "off": "", "cells": cells}
        return {**base, "routing": "synthetic", "prompts": prompts, **more}

    static = {"memory": "8GB", "policy": "static", "residency": "auto", "off": "", "cells": [], "error": "--memory is"}
    first = {"rows": [row("8GB", "auto", [cell(8, 90, started=2), cell(1, 100)]), static], "left_out": ["a: b"]}
    rows = [row("14GB", r, [cell(1, rate)]) for r, rate in (("auto", 200), ("hotset", 100), ("recency", 250))]
    second = {"rows": [*rows, row("14GB", "auto", [cell(1, 300, None)], routing="model")], "left_out": ["a: b"]}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, result in zip(files, (first, second), strict=True):
        path.write_text(json.dumps(result))
    assert elastic.main(["--table", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [number for number, line in enumerate(lines) if line.startswith("Routing: ")]
    assert [lines[number].split(".")[0] for number in tables] == ["Routing: synthetic", "Routing: model"]
    assert "| 14GB | cost, auto | 44 | 9,876 | **200** 5.0 80 0.50 2.5 |  |" in lines[: tables[1]]
    assert "| 8GB | cost, auto | 44 | 9,876 | **100** 10.0 80 0.50 2.5 | **90** 88.9 80 0.50 2.5 (2 let in) |" in lines
    assert "| 8GB | static, auto | refuses to start: the experts do not fit | | | |" in lines
    assert "14GB, cost: `auto` reaches, of the better one of hot set and recency, 1 streams 80% of recency." in lines
    assert "| 14GB | cost, auto | 44 | 9,876 | **300** 3.3 80 all 2.5 |" in lines[tables[1] :]
    assert lines.count("Left out: a: b.") == 1


def run_of(routing: str, rate: float, **about: object) -> dict[str, object]:
    """What a run of one row wrote."""
    cell = {
        "streams": 8, "started": 8, "tokens_per_s": rate, "per_token_ms": 9.0, "first_token_ms": {"mean": 80.0},
        "hit_rate": 0.5, "bytes_over_link_per_token": 2.5e6,
    }  # fmt: skip
    row = {"memory": "8GB", "policy": "cost", "residency": "auto", "off": "", "routing": routing, "cells": [cell]}
    told = {"model": "m.gguf", "card": "A card", "date": "2026-11-30 07:00 UTC", "commit": "abc"}
    return {**told, "settings": {"seed": 0}, "loads": [], "rows": [row], "left_out": [], **about}


def test_runs_become_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last run counts where two measured the same; one that came less far takes nothing away."""
    failed = run_of("model", 0.0, commit="def")
    failed["rows"] = [{**failed["rows"][0], "cells": [], "error": "out of time"}]  # type: ignore[index]
    runs = [
        run_of("model", 100.0), run_of("synthetic", 300.0, date="2026-11-30 08:00 UTC"), run_of("model", 200.0), failed,
    ]  # fmt: skip
    paths = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(json.dumps(run))
    output, again = tmp_path / "all.json", tmp_path / "again.json"
    assert elastic.main(["--merge", str(output), *map(str, paths)]) == 0
    printed = capsys.readouterr().out
    assert "**200**" in printed and "**300**" in printed and "**100**" not in printed and "out of time" not in printed
    assert [line for line in printed.splitlines() if line.startswith("Routing: ")] == [
        "Routing: model. Of each number of streams: **tokens per second of all**, milliseconds per token,",
        "Routing: synthetic. Of each number of streams: **tokens per second of all**, milliseconds per token,",
    ]
    values = json.loads(output.read_text())
    assert (values["model"], values["card"], values["commit"]) == ("m.gguf", "A card", "abc, def")
    assert values["date"] == "2026-11-30 08:00 UTC" and len(values["runs"]) == 4 and len(values["rows"]) == 2
    assert elastic.main(["--merge", str(again), str(output)]) == 0  # a merged file is as good as a run
    assert json.loads(again.read_text()) == values


def test_what_makes_no_table_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, output = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "all.json"
    first.write_text(json.dumps(run_of("model", 1.0)))
    for name in ("model", "card"):
        second.write_text(json.dumps(run_of("model", 1.0, **{name: "another"})))
        assert elastic.main(["--merge", str(output), str(first), str(second)]) == 2
        assert f"several {name}s" in capsys.readouterr().err and not output.exists()
    second.write_text('{"card": "x"}')
    assert elastic.main(["--table", str(second)]) == 2
    assert "no rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        elastic.parse(["--merge", str(output)])


def test_one_change_at_a_time(model: Path, budgets: tuple[int, int], tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    command = [str(model), *QUICK, "--memory", str(budgets[1]), "--streams", "2", "--ablate", "--output", str(output)]
    assert elastic.main(command) == 0
    values = json.loads(output.read_text())
    rows = values["rows"]
    base = rows[0]
    assert base["policy"] == "cost" and base["residency"] == "auto" and base["off"] == ""
    for row in rows[1:]:
        assert sum(row[name] != base[name] for name in ("policy", "residency", "off")) == 1
        assert "error" not in row and row["cells"]
    assert {row["residency"] for row in rows} == {"auto", "hotset", "recency"}
    assert {row["policy"] for row in rows} == {"cost", "fixed"}
    assert {row["off"] for row in rows} == {"", "fill_on_read"}  # on the CPU the others change nothing
    left_out = [line.split(":")[0] for line in values["left_out"]]
    assert left_out == [f"{budgets[1]}, no prefetch", f"{budgets[1]}, no in_place"]


def test_a_row_that_fails_says_so_and_the_next_one_runs(
    model: Path, budgets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = elastic.measure_streams, []

    def fails_once(*args: object) -> dict[str, object]:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a broken step")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(elastic, "measure_streams", fails_once)
    args = [str(model), *QUICK, "--memory", str(budgets[1]), "--streams", "1", "--policies", "cost"]
    rows = elastic.run(elastic.parse(args)).values["rows"]
    assert "a broken step" in rows[0]["error"] and not rows[0]["cells"]
    assert "error" not in rows[1] and rows[1]["cells"]


def test_the_end_of_the_time(model: Path, budgets: tuple[int, int]) -> None:
    args = [str(model), *QUICK, "--memory", str(budgets[1]), "--streams", "1", "--limit-seconds", "0"]
    values = elastic.run(elastic.parse(args)).values
    assert values["rows"] == [] and all(line.endswith("out of time") for line in values["left_out"])
    assert len(values["left_out"]) == 6


def test_residencies_are_compared_where_they_are_wanted() -> None:
    words = ["m.gguf", "--memory", "8GB,14GB", "--policies", "cost,fixed", "--residency", "auto,hotset"]
    for more, compared in (([], ["8GB", "14GB"]), (["--compare-at", "14GB"], ["14GB"])):
        found = [(s.memory, s.policy, s.residency) for s in elastic.settings_of(elastic.parse([*words, *more]))]
        assert [memory for memory, _, residency in found if residency == "hotset"] == compared
        assert len(found) == 4 + len(compared)


def test_a_model_or_files() -> None:
    for words in ([], ["model.gguf", "--table", "a.json"]):
        with pytest.raises(SystemExit):
            elastic.parse(words)
