"""`rimuru inspect` for a card, here or not: what fits and how fast it will be, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rimuru.ops as backends
from rimuru.arch.shapes import shape_gguf
from rimuru.base.errors import BadInputError
from rimuru.cli import main
from rimuru.commands.forecast import on_card, on_card_text
from rimuru.commands.inspect import planned_card
from rimuru.simulate.cards import CARDS, as_used, card_named
from tools.make_random_gguf import write_random_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("inspect") / "moe.gguf", context_length=512)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_probe_cuda", lambda: ("there is no NVIDIA GPU", 0))


@pytest.mark.parametrize("options", [["--device", "cuda"], ["--card", "rtx4090"], ["--pcie-gbps", "12.5"]])
@pytest.mark.usefixtures("no_card")
def test_a_card_that_is_not_here_is_planned(moe: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(moe), "--memory", "1GiB", "--json", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    forecast, fits = report["forecast"], report["fits"]
    assert forecast["card"] == ("rtx4090" if "rtx4090" in options else "rtx5090") and not forecast["is_measured"]
    assert forecast["link_bytes_per_s"] == {"cuda": 53e9, "rtx4090": 25e9, "12.5": 12.5e9}[options[1]]
    assert fits["resident_experts"] == fits["total_experts"] and fits["requests_by_context"]["512"] > 1
    rates = forecast["tokens_per_s"]
    assert forecast["hit_rate"] == 1.0 and 0 < rates["1"] < rates["8"] < forecast["prefill_tokens_per_s"]["512"]
    assert main(["inspect", str(moe), "--memory", "1GiB", *options]) == 0
    text = capsys.readouterr().out
    assert "not measured" in text and "8 at once" in text


@pytest.mark.usefixtures("no_card")
def test_what_cannot_be_planned_is_one_line(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in (
        (["--device", "cuda"], "--memory"),
        (["--card", "voodoo2", "--memory", "1GiB"], "voodoo2"),
        (["--memory-gbps", "0", "--memory", "1GiB"], "--memory-gbps"),
    ):
        assert main(["inspect", str(moe), *options]) == 2
        line = capsys.readouterr().err.strip()
        assert told in line and "\n" not in line
    assert main(["inspect", str(moe), "--card", "rtx4090", "--memory", "1MiB"]) == 0
    assert "the model does not fit" in capsys.readouterr().out


@pytest.mark.usefixtures("no_card")
def test_the_policy_decides_what_fits_on_a_card(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["inspect", "qwen3-30b-a3b", "--card", "rtx4090", "--memory", "14GB", "--json"]
    found = {}
    for policy in ("cost", "static", "fixed"):
        assert main([*options, "--policy", policy]) == 0
        found[policy] = json.loads(capsys.readouterr().out)
    assert not found["static"]["starts"] and found["static"]["forecast"]["tokens_per_s"] == {}
    assert found["cost"]["starts"] and found["fixed"]["starts"]
    assert 0 < found["fixed"]["fits"]["resident_experts"] < found["cost"]["fits"]["resident_experts"]
    assert found["fixed"]["forecast"]["hit_rate"] < found["cost"]["forecast"]["hit_rate"]


def test_a_published_model_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--card", "rtx4090", "--memory", "14GB", "--json"]
    resident = {}
    for quant in ("q4_k_m", "q8_0"):
        assert main(["inspect", "qwen3-30b-a3b", "--quant", quant, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        resident[quant] = report["fits"]["resident_experts"]
        assert report["fits"]["total_experts"] == 6144
    assert 0 < resident["q8_0"] < resident["q4_k_m"] < 6144
    assert main(["inspect", "qwen9-30b", *options]) == 2
    assert "qwen3-30b-a3b" in capsys.readouterr().err


def test_forecasts_follow_the_machine() -> None:
    """More memory, a faster link and a faster card each make it faster; what was measured is foretold to a third."""
    gguf, _ = shape_gguf("qwen3-30b-a3b", "q4_k_m")

    def rates(card: str, memory_gb: float, **more: float) -> dict[str, float]:
        forecast = on_card(gguf, card_named(card, more), int(memory_gb * 1e9), 400 << 20, 2)
        return forecast["tokens_per_s"] | {"prompt": forecast["prefill_tokens_per_s"]["512"]}

    little, slow_link, plenty = rates("rtx5090", 8), rates("rtx5090", 8, pcie_gbps=12.0), rates("rtx5090", 24)
    assert slow_link["1"] < little["1"] < plenty["1"] and rates("rtx4090", 24)["1"] < plenty["1"]
    measured = {"1": 623, "8": 1876, "prompt": 14630}  # tools/results/gpu_check.json
    for key, value in rates("h200", 110).items():
        assert 0.67 < value / measured[key] < 1.5, key


def test_a_model_without_experts_is_forecast() -> None:
    gguf, _ = shape_gguf("qwen3-14b", "q4_k_m")
    forecast = on_card(gguf, CARDS["rtx4090"], 12 * 10**9, 200 << 20, 2)
    assert 30 < forecast["tokens_per_s"]["1"] < 100 and forecast["hit_rate"] is None
    assert "resident" not in on_card_text(forecast | {"is_measured": False})
    assert on_card(gguf, CARDS["rtx4090"], 10**9, 0, 2)["tokens_per_s"] == {}


def test_a_card_that_is_here_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that are given go before measured ones; what cannot be measured comes from the card of that name."""
    monkeypatch.setattr(backends, "measured_rates", lambda: ("NVIDIA GeForce RTX 4090", 900e9, 24e9))
    card, is_measured = planned_card(None, {"pcie_gbps": 11.0, "memory_gbps": None}, is_here=True)
    assert is_measured and (card.name, card.memory_gbps, card.pcie_gbps) == ("NVIDIA GeForce RTX 4090", 900.0, 11.0)
    assert card.compute_tflops == CARDS["rtx4090"].compute_tflops > as_used(card).compute_tflops
    with pytest.raises(BadInputError, match="known"):
        planned_card("gtx", {}, is_here=False)


@pytest.mark.gpu
def test_rates_of_the_card_here() -> None:
    name, memory, link = backends.measured_rates()
    assert name and 1e9 < link < memory
