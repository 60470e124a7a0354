#!/usr/bin/env python3
"""The simulator's forecast beside what tools/bench/elastic.py measured: same shape, budget, policy, streams, routing.

    python tools/bench/simulate_forecast.py tools/results/h200_elastic.json --shape qwen3-30b-a3b --card h200 \
        --output tools/results/simulate_forecast.json

A file is of one run, or of several merged. A row becomes one simulated engine, whose cells follow each other as they
did when they were measured: as many requests come together with prompts of the same length, and are counted for as long
as there, after as long as was not counted there. The time model takes the card as this engine uses it
(simulate/cards.py), with what the engine does about absent experts: the device brings them into places and loading
buffers while the others are computed. Prints Markdown. Rows with the routing of a model's random weights are left out,
since no simulated router is like it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.arch.common import Gguf
from rimuru.arch.shapes import shape_gguf
from rimuru.base.errors import RimuruError
from rimuru.base.units import parse_bytes
from rimuru.simulate.cards import as_used, card_named
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from rimuru.simulate.traces import TraceRequest
from tools.bench.elastic_table import read, runs_of

SWITCHES = ("", "fill_on_read", "prefetch")
"""What may be turned off in a row that is compared: without reading in place another store serves the card."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What both sides say of a cell."""

    tokens_per_s: float
    first_token_ms: float
    """Mean of those that come together."""
    hit_rate: float
    link_mb_per_token: float
    resident_experts: int
    started: int


def measured(cell: dict[str, Any]) -> Rates:
    hits = 1.0 if cell["hit_rate"] is None else cell["hit_rate"]
    return Rates(
        cell["tokens_per_s"], cell["first_token_ms"]["mean"], hits, cell["bytes_over_link_per_token"] / 1e6,
        cell["resident_experts"], cell["started"],
    )  # fmt: skip


def foretold(simulation: Simulation, n_streams: int, ran: dict[str, Any]) -> Rates:
    """So many streams, waited for, warmed up and counted for as long as the measured ones (`ran`: their settings); then
    they end."""
    simulation.start([TraceRequest(0.0, ran["prompt"], ran["ctx"] - ran["prompt"] - 1)] * n_streams)
    store, recorder = simulation.store, simulation.recorder
    while recorder.n_started < n_streams and simulation.now_s < ran["start_seconds"]:
        simulation.step()
    limit_s = simulation.now_s + ran["warm"]
    while simulation.now_s < limit_s:
        simulation.step()
    before = simulation.now_s, recorder.n_tokens, store.n_asked, store.n_hits, recorder.used_bytes
    while simulation.now_s < before[0] + ran["seconds"]:
        simulation.step()
    after = simulation.now_s, recorder.n_tokens, store.n_asked, store.n_hits, recorder.used_bytes
    n_resident, n_started = store.residency.n_resident, recorder.n_started
    simulation.stop()
    took_s, n_tokens, n_asked, n_hits, n_bytes = (b - a for a, b in zip(before, after, strict=True))
    return Rates(
        n_tokens / took_s, 1e3 * recorder.mean_first_s, n_hits / n_asked, n_bytes / n_tokens / 1e6, n_resident,
        n_started,
    )  # fmt: skip


def settings_for(row: dict[str, Any], ran: dict[str, Any], card_name: str) -> Settings:
    """The simulator's settings for a measured row."""
    return Settings(
        memory_bytes=parse_bytes(row["memory"]),
        card=as_used(card_named(card_name)),
        policy=row["policy"],
        residency=row["residency"],
        scratch_bytes=row["memory_report"]["scratch_bytes"],
        max_sequences=max(ran["streams"]),
        ways=Ways(in_place=True, prefetch=False, prediction=False),
        fill_on_read=row["off"] != "fill_on_read",
        by_device=True,
        has_buffers=row["off"] != "prefetch",
        prefix_cache=False,
        profile_tokens=0,
        seed=ran["seed"],
    )


def is_comparable(row: dict[str, Any]) -> bool:
    """Whether a simulation can be like this row."""
    return bool(row["cells"]) and row["off"] in SWITCHES and row["routing"].startswith("synthetic")


def settings_of_run(result: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """How the run was called that a row is of: the last one that measured such rows."""
    for run in reversed(runs_of(result)):
        ran: dict[str, Any] = run["settings"]
        is_alike = row["routing"].startswith(ran["routing"]) and row["memory"] in ran["memory"]
        if is_alike and bool(ran["ablate"]) >= bool(row["off"]) and _streams(row) <= set(ran["streams"]):
            return ran
    raise RimuruError(f"no run of this file can have measured the row {row['memory']}, {row['policy']}")


def _streams(row: dict[str, Any]) -> set[int]:
    return {cell["streams"] for cell in row["cells"]}


def compare(result: dict[str, Any], gguf: Gguf, card_name: str) -> Iterator[dict[str, Any]]:
    """Of every cell that a simulation can be like: what was measured and what the simulator says."""
    for row in filter(is_comparable, result["rows"]):
        ran = settings_of_run(result, row)
        simulation = Simulation(gguf, settings_for(row, ran, card_name))
        for cell in row["cells"]:
            found = foretold(simulation, cell["streams"], ran)
            print(".", end="", file=sys.stderr, flush=True)
            what = {key: row[key] for key in ("memory", "policy", "residency", "off")} | {"streams": cell["streams"]}
            yield what | {"measured": as_dict(measured(cell)), "foretold": as_dict(found)}
    print(file=sys.stderr)


def as_dict(rates: Rates) -> dict[str, float]:
    return {name: round(getattr(rates, name), 4) for name in Rates.__slots__}


def markdown(cells: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each cell, and the mean difference of the rates."""
    yield "| memory | policy, residency | streams | tok/s | foretold | | hits | foretold | MB a token | foretold |"
    yield "|" + " --- |" * 10
    offs = []
    for cell in cells:
        real, said = cell["measured"], cell["foretold"]
        off = said["tokens_per_s"] / real["tokens_per_s"] - 1.0
        offs.append(abs(off))
        what = f"{cell['policy']}, {cell['residency']}" + (f", no {cell['off']}" if cell["off"] else "")
        yield (
            f"| {cell['memory']} | {what} | {cell['streams']} | {real['tokens_per_s']:,.0f} | "
            f"{said['tokens_per_s']:,.0f} | {off:+.0%} | {real['hit_rate']:.2f} | {said['hit_rate']:.2f} | "
            f"{real['link_mb_per_token']:.1f} | {said['link_mb_per_token']:.1f} |"
        )
    if offs:
        yield ""
        yield f"Off by {sum(offs) / len(offs):.0%} in the mean, by {max(offs):.0%} at most ({len(offs)} cells)."


def publish(title: str, data: Any, lines: list[str], output: Path | None) -> None:
    """Print the lines of a table; with an output also write them beside data, as .md and .json."""
    text = "\n".join(lines)
    if output:
        output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        output.with_suffix(".md").write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
    print(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--quant", default="q4_k_m")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--output", type=Path, help="JSON; the table goes beside it as .md")
    args = parser.parse_args(arguments)
    gguf = shape_gguf(args.shape, args.quant)[0]
    cells: list[dict[str, Any]] = []
    try:
        for path in args.files:
            cells += compare(read(path), gguf, args.card)
    except RimuruError as error:
        print(f"simulate_forecast.py: {error}", file=sys.stderr)
        return 2
    publish("Foretold and measured", cells, markdown(cells), args.output)
    return 0 if cells else 1


if __name__ == "__main__":
    raise SystemExit(main())
