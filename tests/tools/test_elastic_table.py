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
    assert len(rows) == 2 * (3 * 2 + 1)
    whole, half = (str(n) for n in budgets)
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
    assert capsys.readouterr().out.count("| cost |") == 4


def test_one_change_at_a_time(model: Path, budgets: tuple[int, int], tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    command = [str(model), *QUICK, "--memory", str(budgets[1]), "--streams", "2", "--ablate", "--output", str(output)]
    assert elastic.main(command) == 0
    values = json.loads(output.read_text())
    rows = values["rows"]
    base = rows[0]
    assert base["policy"] == "cost" and base["residency"] == "recency" and base["off"] == ""
    for row in rows[1:]:
        assert sum(row[name] != base[name] for name in ("policy", "residency", "off")) == 1
        assert "error" not in row and row["cells"]
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
    assert elastic.run(elastic.parse(args)).values["rows"] == []
