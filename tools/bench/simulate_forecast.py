#!/usr/bin/env python3
"""The simulator's forecast beside what tools/bench/elastic.py measured: same shape, budget, policy, streams, routing.

    python tools/bench/simulate_forecast.py elastic.json --shape qwen3-30b-a3b --card h200 --output forecast.json

A measured cell becomes one simulation: as many requests come together with prompts of the same length, and are counted
over as many steps as there, after as many as were not counted there. The time model takes the card as this engine uses
it (simulate/cards.py), with what the engine does about absent experts: they are read while the others are computed.
Prints Markdown. Rows with the routing of a model's random weights are left out, since no simulated router is like it.
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
from rimuru.arch.shapes import shape_gguf
from rimuru.base.units import parse_bytes
from rimuru.simulate.cards import as_used, card_named
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from rimuru.simulate.traces import TraceRequest

IN_PLACE = Ways(in_place=True, prefetch=False, prediction=False)


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
    """So many streams, waited for, warmed up and counted for as long as the measured ones (`ran`: their settings)."""
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
    took_s, n_tokens, n_asked, n_hits, n_bytes = (b - a for a, b in zip(before, after, strict=True))
    return Rates(
        n_tokens / took_s, 1e3 * recorder.mean_first_s, n_hits / n_asked, n_bytes / n_tokens / 1e6,
        store.residency.n_resident, recorder.n_started,
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
        ways=IN_PLACE,
        fill_on_read=row["off"] != "fill_on_read",
        profile_tokens=0,
        seed=ran["seed"],
    )


def compare(result: dict[str, Any], shape: str, quant: str, card_name: str) -> Iterator[dict[str, Any]]:
    """Of every cell with a synthetic routing: what was measured and what the simulator says."""
    ran = result["settings"]
    gguf = shape_gguf(shape, quant)[0]
    for row in result["rows"]:
        if not row["cells"] or row["off"] not in ("", "fill_on_read") or not row["routing"].startswith("synthetic"):
            continue
        settings = settings_for(row, ran, card_name)
        for cell in row["cells"]:
            simulation = Simulation(gguf, settings)
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--quant", default="q4_k_m")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    cells: list[dict[str, Any]] = []
    for path in args.files:
        cells += compare(json.loads(path.read_text(encoding="utf-8")), args.shape, args.quant, args.card)
    if args.output:
        args.output.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    print("\n".join(markdown(cells)))
    return 0 if cells else 1


if __name__ == "__main__":
    raise SystemExit(main())
