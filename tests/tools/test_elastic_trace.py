"""tools/bench/elastic_trace.py on a tiny model, and tools/bench/simulate_trace.py, which puts a forecast beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru import LLM
from rimuru.simulate.traces import TraceRequest
from tools.bench import elastic, elastic_trace, simulate_trace
from tools.make_random_gguf import write_random_model

LENGTHS = [(9, 6), (14, 3), (5, 12), (20, 8), (7, 1), (11, 5), (6, 30)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("trace") / "random.gguf", arch="qwen3moe", quant="q8_0", seed=3)


@pytest.fixture(scope="module")
def half(model: Path) -> int:
    """Bytes in which half of the experts fit."""
    with LLM(model, device="cpu", context=128, max_sequences=5, policy="static", prefix_cache=False) as llm:
        report = llm.memory()
        return int(report["total_bytes"] - report["views"]["expert"]["bytes"] // 2)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    rows = [f"{prompt},{output}" for prompt, output in LENGTHS]
    (folder / "lengths.csv").write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n")
    return folder


def words(model: Path, half: int, traces: Path, *more: str) -> list[str]:
    quick = ["--device", "cpu", "--threads", "2", "--ctx", "128", "--prompt", "16", "--requests", "5", "--warm", "2"]
    return [str(model), "--memory", str(half), "--trace", str(traces / "lengths.csv"), *quick, *more]


def test_every_variant_answers_the_trace(model: Path, half: int, traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    assert elastic_trace.main(words(model, half, traces, "--rate", "200", "--output", str(output))) == 0
    result = json.loads(output.read_text())
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == ["all on", "recency", "hot set", "not elastic", "no fill on read"]
    assert [line.split(":")[0] for line in result["left_out"]] == ["no prefetch", "no in place"]  # a device's only
    assert (rows["not elastic"]["policy"], rows["recency"]["residency"]) == ("fixed", "recency")
    for row in rows.values():
        found = row["measured"]
        assert found["answered"] == 5 and found["output_tokens"] == sum(n for _, n in LENGTHS[:5])  # 2 are warm-up
        assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] < found["makespan_s"]
        assert found["output_tokens_per_second"] == pytest.approx(found["output_tokens"] / found["makespan_s"])
        assert 1 <= found["peak_concurrency"] <= 5 and found["steps"] >= 12 and 0 < found["hit_rate"] < 1
        assert found["tpot_s"]["mean"] > 0 and found["bytes_moved"] > 0 and row["routing"] == "synthetic qwen3-30b"
    assert rows["not elastic"]["measured"]["resident_experts_at_end"] > 0
    assert result["settings"]["trace"] == "lengths.csv" and result["card"] == "CPU"


def test_requests_come_when_the_trace_says_and_end_when_time_is_up(model: Path) -> None:
    with LLM(model, device="cpu", context=128, max_sequences=5, prefix_cache=False) as llm:
        rng = np.random.default_rng(0)
        late = [TraceRequest(0.0, 5, 2), TraceRequest(0.3, 5, 2)]
        found = elastic_trace.replay(llm, late, rng, 60.0)
        assert 0.3 < found.took_s < 30 and found.peak == 1
        values = found.values()
        assert values["answered"] == 2 and values["ttft_s"]["p95"] < found.took_s  # counted from the arrival
        cut = elastic_trace.replay(llm, [TraceRequest(0.0, 5, 4), TraceRequest(1e6, 5, 4)], rng, 0.5)
        assert (cut.took_s, len(cut.lives), cut.values()["answered"]) == (0.5, 1, 1)
        assert not llm.loaded.engine.has_work
        none = elastic_trace.replay(llm, [TraceRequest(0.0, 5, 100)], rng, 1e-9).values()
        assert none["output_tokens"] == none["answered"] == 0 and none["tpot_s"]["p95"] == 0.0


def measured_file(path: Path, trace: str, variants: tuple[str, ...]) -> None:
    """As elastic_trace.py writes it."""
    given = ["m.gguf", "--memory", "14GB", "--trace", trace, "--requests", "4", "--warm", "1", "--most-seconds", "5"]
    args = elastic_trace.parse([*given, "--variants", ",".join(variants)])
    found = elastic_trace.Replayed([elastic_trace.Life(TraceRequest(0.0, 5, 9), 0.5, 2.5, 9)], 2.5, 12, 1).values()
    found |= {"hit_rate": 0.5, "bytes_moved": 10**9, "preemptions": 0, "resident_experts_at_end": 7}
    rows = [
        {
            "variant": name, "memory": "14GB", "policy": "cost", "residency": "auto", "off": "", "scratch_bytes": 10**8,
            "routing": "synthetic qwen3-30b", "measured": found, **elastic_trace.VARIANTS[name],
        }
        for name in variants
    ]  # fmt: skip
    about = {"model": "m.gguf", "card": "a card", "left_out": ["no prefetch: out of time"]}
    path.write_text(json.dumps({**about, "settings": vars(args), "rows": rows}))


def test_a_forecast_stands_beside_each_variant(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = traces / "long.csv"
    lengths.write_text("prompt_tokens,output_tokens\n" + "400,20\n" * 6)
    file, output = tmp_path / "trace.json", tmp_path / "both.json"
    measured_file(file, "elsewhere/long.csv", ("all on", "no fill on read", "no in place"))
    assert simulate_trace.main([str(file), "--traces", str(traces), "--output", str(output)]) == 0
    rows: dict[str, Any] = {row["variant"]: row["foretold"] for row in json.loads(output.read_text())["rows"]}
    measured = json.loads(file.read_text())["rows"][0]["measured"]
    for found in rows.values():
        assert found.keys() == measured.keys()
        assert found["answered"] == 4 and found["output_tokens"] == 80 and found["peak_concurrency"] == 4
        assert 0 < found["ttft_s"]["mean"] < found["makespan_s"] < 5
    # nobody brings experts in: kernels read them where they lie; without that the host brings them, layer by layer
    assert rows["no fill on read"]["hit_rate"] < rows["all on"]["hit_rate"]
    assert rows["no fill on read"]["ttft_s"]["mean"] > 1.2 * rows["all on"]["ttft_s"]["mean"]
    assert rows["no in place"]["tpot_s"]["mean"] > 1.2 * rows["all on"]["tpot_s"]["mean"]
    text = output.with_suffix(".md").read_text()
    assert "| all on | measured | 1 | 2.5 | 4 | 0.50 / 0.50 / 0.50 | 250 / 250 / 250 | 0.50 | 1 | 1 | 100% |" in text
    assert text.count("| foretold |") == 3 and "Left out: no prefetch: out of time." in text
    assert text.splitlines()[2:] == capsys.readouterr().out.splitlines()


def test_what_cannot_be_run_is_one_line(
    model: Path, half: int, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert elastic_trace.main(words(model, half, traces, "--requests", "9")) == 2
    assert "has 7 requests" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        elastic_trace.parse(words(model, half, traces, "--variants", "all on,nothing"))
    assert "no variant nothing" in capsys.readouterr().err
    (tmp_path / "a.json").write_text(json.dumps({"rows": [{"cells": []}]}))
    assert simulate_trace.main([str(tmp_path / "a.json"), "--traces", str(traces)]) == 2
    assert "elastic_trace.py" in capsys.readouterr().err
    assert set(elastic.SWITCHES) <= {change.get("off") for change in elastic_trace.VARIANTS.values()}
