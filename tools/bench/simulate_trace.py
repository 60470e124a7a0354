#!/usr/bin/env python3
"""What the simulator says of a trace, variant by variant, beside what tools/bench/elastic_trace.py measured.

    python tools/bench/simulate_trace.py trace.json --traces ../shared/traces --shape qwen3-30b-a3b --card h200 \
        --output tools/results/simulate_trace.json

The file says which requests of which trace, which settings and which variants; each becomes a simulated engine that
answers the same requests before and while it is counted, and is stopped after as long. The time model takes the card as
this engine uses it (simulate/cards.py). Writes both sides as one JSON, and Markdown beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.arch.common import Gguf
from rimuru.arch.shapes import shape_gguf
from rimuru.base.errors import BadInputError, RimuruError
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from tools.bench.elastic_table import read
from tools.bench.elastic_trace import traces_of
from tools.bench.simulate_forecast import publish, settings_for

COLUMNS = (
    ("answered", lambda v: f"{v['answered']}"),
    ("time s", lambda v: f"{v['makespan_s']:.1f}"),
    ("tok/s", lambda v: f"{v['output_tokens_per_second']:,.0f}"),
    ("first token s: mean, p50, p95", lambda v: _three(v["ttft_s"], 1.0, 2)),
    ("per token ms: mean, p50, p95", lambda v: _three(v["tpot_s"], 1e3, 0)),
    ("hits", lambda v: f"{v['hit_rate']:.2f}"),
    ("GB moved", lambda v: f"{v['bytes_moved'] / 1e9:,.0f}"),
    ("peak", lambda v: f"{v['peak_concurrency']}"),
)


def _three(values: dict[str, float], factor: float, digits: int) -> str:
    return " / ".join(f"{factor * values[key]:.{digits}f}" for key in ("mean", "p50", "p95"))


def variant_settings(row: dict[str, Any], ran: dict[str, Any], card_name: str) -> Settings:
    """The simulator's settings for a measured variant. Without reading in place another store serves the card: the host
    brings experts when a layer's router has chosen."""
    in_place = row["off"] != "in_place"
    like_the_table = settings_for({**row, "memory_report": {"scratch_bytes": row["scratch_bytes"]}}, ran, card_name)
    return replace(
        like_the_table, ways=Ways(in_place=in_place, prefetch=False, prediction=False), by_device=in_place,
        router=ran["router"], n_topics=ran["topics"],
    )  # fmt: skip


def foretold(row: dict[str, Any], ran: dict[str, Any], gguf: Gguf, card_name: str, traces: Path) -> dict[str, Any]:
    """The same values as measured ones."""
    simulation = Simulation(gguf, variant_settings(row, ran, card_name))
    scheduler, store = simulation.scheduler, simulation.store
    before = 0, 0, 0
    for requests in traces_of(ran, traces):
        before = store.n_asked, store.n_hits, scheduler.n_preemptions
        simulation.start(requests)
        while simulation.now_s < ran["most_seconds"] and simulation.step():
            pass
        found, n_answered = simulation.recorder.result(simulation.now_s, None).values, simulation.recorder.n_answered
        simulation.stop()
    n_asked = store.n_asked - before[0]
    kept = ("makespan_s", "output_tokens", "output_tokens_per_second", "ttft_s", "tpot_s", "peak_concurrency", "steps")
    return {
        "answered": n_answered,
        **{key: found[key] for key in kept},
        "hit_rate": (store.n_hits - before[1]) / n_asked if n_asked else 1.0,
        "bytes_moved": found["bytes_moved"],
        "preemptions": scheduler.n_preemptions - before[2],
        "resident_experts_at_end": found["resident_experts_at_end"],
    }


def markdown(result: dict[str, Any]) -> Iterator[str]:
    """Two lines for each variant, and what each change costs on either side."""
    ran = result["settings"]
    pace = f"times x{ran['stretch']:g}" if ran["rate"] is None else f"{ran['rate']:g} a second"
    yield f"{result['model']} on {result['card']}, {ran['memory']}, {ran['policy']}: {ran['requests']} requests of"
    yield f"{ran['trace']} ({pace}), routing {result['rows'][0]['routing']}, stopped after {ran['most_seconds']:g} s."
    yield ""
    yield "| | | " + " | ".join(title for title, _ in COLUMNS) + " | tok/s of all on |"
    yield "|" + " --- |" * (len(COLUMNS) + 3)
    base = result["rows"][0]
    for row in result["rows"]:
        for side in ("measured", "foretold"):
            values = row[side]
            share = values["output_tokens_per_second"] / base[side]["output_tokens_per_second"]
            name = row["variant"] if side == "measured" else ""
            yield f"| {name} | {side} | " + " | ".join(text(values) for _, text in COLUMNS) + f" | {share:.0%} |"
    yield ""
    yield from (f"Left out: {note}." for note in result["left_out"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--quant", default="q4_k_m")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--output", type=Path, help="JSON; the table goes beside it as .md")
    args = parser.parse_args(arguments)
    try:
        result = read(args.file)
        if not result["rows"] or any("variant" not in row for row in result["rows"]):
            raise BadInputError(f"{args.file} is not what elastic_trace.py writes; name a file of its --output")
        gguf = shape_gguf(args.shape, args.quant)[0]
        for row in result["rows"]:
            row["foretold"] = foretold(row, result["settings"], gguf, args.card, args.traces)
    except RimuruError as error:
        print(f"simulate_trace.py: {error}", file=sys.stderr)
        return 2
    publish("A trace, foretold and measured", result, markdown(result), args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
