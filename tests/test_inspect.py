"""What `rimuru inspect` reports, from shapes and from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rimuru import LLM
from rimuru.arch.shapes import shape_gguf, shape_names
from rimuru.base.units import parse_bytes
from rimuru.cli import main
from rimuru.commands.forecast import before_loading_text
from rimuru.formats.gguf import open_gguf
from rimuru.inspect import (
    dense_weight_bytes,
    format_report,
    huge_pages_for,
    inspect_model,
    request_pages,
    requests_that_fit,
)
from rimuru.memory.planner import plan_layout
from tools.make_random_gguf import write_random_model


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_planned(name: str) -> None:
    gguf, config = shape_gguf(name)
    report = inspect_model(gguf, 2, 24 * 10**9)
    text = json.dumps(report)
    assert json.loads(text) == report
    assert report["architecture"] == config.architecture
    assert report["layout"]["waste_fraction"] < 0.05
    assert set(report["layout"]["page_bytes"]) == {"huge", "expert", "ssm", "kv", "conv"}
    assert name in format_report(report)


def test_what_fits_grows_with_memory_and_shrinks_with_context() -> None:
    gguf, _ = shape_gguf("qwen3.5-35b-a3b")
    small, large = inspect_model(gguf, 2, 8 * 10**9), inspect_model(gguf, 2, 24 * 10**9)
    assert small["fits"]["total_experts"] == 10240 == large["fits"]["total_experts"]
    assert 0 < small["fits"]["resident_experts"] < large["fits"]["resident_experts"] <= 10240
    by_context = list(large["fits"]["requests_by_context"].values())
    assert by_context == sorted(by_context, reverse=True) and by_context[0] > 10
    for context, n in small["fits"]["requests_by_context"].items():
        assert n <= large["fits"]["requests_by_context"][context]


def test_residents_fill_the_pool_and_no_more() -> None:
    gguf, config = shape_gguf("qwen3-30b-a3b")
    memory = 12 * 10**9
    report = inspect_model(gguf, 2, memory, scratch_bytes=0)
    layout = plan_layout(config, gguf, 2)
    assert layout.expert is not None
    pool = memory - dense_weight_bytes(config, gguf.tensors)
    mean_bytes = layout.expert.n_pages * layout.expert.page_bytes / layout.expert.n_experts
    assert report["fits"]["resident_experts"] == pytest.approx(pool / mean_bytes, abs=1)
    assert report["bytes"]["dense"] + report["bytes"]["experts"] == report["bytes"]["file"]


def test_too_little_memory_is_said() -> None:
    gguf, _ = shape_gguf("qwen3-30b-a3b")
    report = inspect_model(gguf, 2, 10**8)
    assert report["fits"]["resident_experts"] == 0
    assert any("raise --memory" in note for note in report["notes"])


def test_requests_fit_exactly() -> None:
    """One more request than reported would need more huge pages than there are."""
    gguf, config = shape_gguf("qwen3.5-35b-a3b")
    layout = plan_layout(config, gguf, 2)
    one = request_pages(layout, 4096)
    assert one["ssm"] == 30 and one["conv"] == 90
    for n_huge in (1, 5, 40, 400):
        n = requests_that_fit(layout, n_huge, 4096, expert_pages=100)
        fits = huge_pages_for(layout, {kind: n * count for kind, count in one.items()} | {"expert": 100})
        more = huge_pages_for(layout, {kind: (n + 1) * count for kind, count in one.items()} | {"expert": 100})
        assert (n == 0 or fits <= n_huge) and more > n_huge


def test_a_window_bounds_a_request() -> None:
    gguf, config = shape_gguf("gpt-oss-20b")
    layout = plan_layout(config, gguf, 2)
    short, long = request_pages(layout, 8192), request_pages(layout, 16384)
    assert layout.kv is not None
    full = [group for group in layout.kv.groups if group.window is None]
    assert long["kv"] - short["kv"] == pytest.approx(sum(8192 / group.page_tokens for group in full), abs=len(full))


def plan(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["inspect", "demo", "--device", "cpu", "--json", *options]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_experts_that_stay_are_counted_and_what_does_not_start_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    free = plan(capsys, "--memory", "14MB")
    assert free["starts"] and free["forecast"]["tokens_per_s"] > 0
    total = free["fits"]["total_experts"]
    for options, word in (
        (["--policy", "static"], "--policy static"),
        (["--resident-experts", "1.0"], f"the {total} experts"),
        (["--resident-experts", str(total)], "--resident-experts"),
        (["--expert-offload-limit", "1"], "a higher --expert-offload-limit"),
        (["--memory", "9MB", "--ctx", "2000"], "2000 tokens; give more --memory or a smaller --ctx"),
    ):
        report = plan(capsys, "--memory", "14MB", *options)
        assert not report["starts"] and report["forecast"]["tokens_per_s"] is None
        assert [note for note in report["notes"] if "would not start" in note and word in note], report["notes"]
        assert main(["inspect", "demo", "--device", "cpu", "--memory", "14MB", *options]) == 0
        told = capsys.readouterr().out
        assert "would not start" in told and "requests " not in told.split("note")[0] and "residents" not in told
        arguments = ["run", "demo", "--device", "cpu", "-q", "-p", "x", "-n", "1", "--memory", "14MB", *options]
        assert main(arguments) == 2
        assert "--memory" in capsys.readouterr().err
    few = plan(capsys, "--memory", "14MB", "--resident-experts", "5")
    assert few["starts"] and few["fits"]["resident_experts"] == 5
    assert few["fits"]["requests_by_context"]["1024"] >= free["fits"]["requests_by_context"]["1024"] - 1
    fixed = plan(capsys, "--memory", "14MB", "--policy", "fixed")
    with LLM("demo", memory="14MB", device="cpu", policy="fixed") as llm:
        resident = sum(llm.memory()["resident_experts"])
    assert fixed["fits"]["resident_experts"] == pytest.approx(resident, rel=0.25) and fixed["starts"]
    assert plan(capsys, "--memory", "40MB", "--policy", "static")["starts"]


def test_a_context_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(plan(capsys, "--memory", "60MB", "--ctx", "1500")["fits"]["requests_by_context"]) == ["1024", "1500"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--resident-experts", "2.0"], "resident experts"),
        (["--resident-experts", "99999"], "99999"),
        (["--expert-offload-limit", "-1"], "expert_offload_limit"),
        (["--ctx", "999999999"], "999999999"),
        (["--ctx", "0"], "context"),
        (["--threads", "-3"], "threads"),
        (["--policy", "static", "--resident-experts", "0.5"], "static"),
        (["--policy", "static", "--resident-experts", "1"], "static"),
    ],
)
@pytest.mark.parametrize("command", [["inspect"], ["run", "-p", "x"]])
def test_the_plan_refuses_what_a_start_would(
    command: list[str], options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "demo", *command[1:], "--device", "cpu", "-q", "--memory", "60MB", *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert word in line and "internal error" not in line


def test_a_file(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m.gguf", "qwen3moe", "mixed")
    with open_gguf(path) as gguf:
        report = inspect_model(gguf, 4, None)
    assert report["runnable"] is True
    assert report["fits"] == {
        "resident_experts": 32, "total_experts": 32, "requests_by_context": {}, "huge_pages": None,
    }  # fmt: skip
    assert sum(report["tensor_types"].values()) == report["bytes"]["file"]


def test_speeds_are_plain_numbers() -> None:
    for rate, shown in ((5_770.3, "5,770"), (123_456.0, "123,000"), (57.7, "57.7"), (0.0123, "0.0123")):
        forecast = {"bytes_per_token": 1 << 20, "memory_bytes_per_s": 1e10, "tokens_per_s": rate}
        assert f"at most {shown} tokens per second" in before_loading_text(forecast)


@pytest.mark.parametrize("memory", ["9MB", "10MB", "14MB", "18MB", "26MB", "60MB"])
def test_what_fits_is_what_runs(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With little memory prompts run in shorter pieces; the plan takes as much scratch as the engine does."""
    assert main(["inspect", "demo", "--device", "cpu", "--memory", memory, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    with LLM("demo", memory=memory, device="cpu") as llm:
        report = llm.memory()
    assert plan["bytes"]["scratch"] == pytest.approx(report["scratch_bytes"], rel=0.3)
    assert plan["bytes"]["pool"] == pytest.approx(report["pool_bytes"], abs=0.12 * parse_bytes(memory))
