"""The results of tools/bench/elastic.py: several runs as one file, and as Markdown, one table for each routing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rimuru.base.errors import BadInputError
from rimuru.base.units import parse_bytes

Row = dict[str, Any]
RESIDENCIES = ("hotset", "recency")
ABOUT = ("model", "card", "commit")
"""What is said once in a merged file. Runs of different models or cards make no table together."""


def table_of_files(paths: Iterable[Path]) -> str:
    """Markdown of all that these files hold, the rows of the last file where several have the same."""
    return "\n".join(markdown([read(path) for path in paths]))


def read(path: Path) -> dict[str, Any]:
    """What elastic.py wrote, of one run or merged. Raises BadInputError for any other file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: {error}; name a file that elastic.py wrote") from None
    if not isinstance(result, dict) or "rows" not in result:
        raise BadInputError(f"{path} is not what elastic.py writes: it has no rows; name a file of --output or --merge")
    return result


def merged(paths: list[Path]) -> dict[str, Any]:
    """Runs of one model on one card as one result: rows of the last run where several measured the same, unless it came
    less far. Raises BadInputError where models or cards differ."""
    results = [read(path) for path in paths]
    about: dict[str, Any] = {}
    for name in ABOUT:
        told = dict.fromkeys(str(result[name]) for result in results if result.get(name))
        if len(told) > 1 and name != "commit":
            raise BadInputError(f"these files are of several {name}s: {', '.join(told)}; merge those of one")
        about[name] = ", ".join(told) or "unknown"
    rows: dict[tuple[str, ...], Row] = {}
    for result in results:
        for row in result["rows"]:
            key = (row.get("routing", ""), *_key(row))
            if len(row["cells"]) >= len(rows.get(key, {}).get("cells", ())):
                rows[key] = row
    return {
        **about,
        "date": max(str(result.get("date", "")) for result in results),
        "runs": [run for result in results for run in runs_of(result)],
        "rows": list(rows.values()),
        "left_out": list(dict.fromkeys(note for result in results for note in result.get("left_out", []))),
    }


def runs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How each of its runs was called, and what it took to load."""
    return result.get("runs") or [{name: result.get(name) for name in ("date", "commit", "settings", "loads")}]


def markdown(results: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of tables, and of what was left out, of results as elastic.py writes them."""
    by_routing: dict[str, dict[tuple[str, ...], Row]] = {}
    refused: dict[tuple[str, ...], Row] = {}
    for result in results:
        for row in result["rows"]:
            (by_routing.setdefault(row["routing"], {}) if "routing" in row else refused)[_key(row)] = row
    for routing, found in by_routing.items():
        rows = [*found.values(), *(row for key, row in refused.items() if key not in found)]
        yield from _table(routing, sorted(rows, key=lambda row: -parse_bytes(row["memory"])))
        yield from _best(rows)
    if not by_routing:
        yield from (f"{' '.join(key).strip()}: {row.get('error')}" for key, row in refused.items())
    notes = dict.fromkeys(note for result in results for note in result.get("left_out", []))
    yield from (f"Left out: {note}." for note in notes)


def _key(row: Row) -> tuple[str, ...]:
    return row["memory"], row["policy"], row["residency"], row["off"]


def sizes_of(rows: Iterable[Row]) -> list[int]:
    """Numbers of streams that occur, ascending."""
    return sorted({cell["streams"] for row in rows for cell in row["cells"]})


def _table(routing: str, rows: list[Row]) -> Iterator[str]:
    sizes = sizes_of(rows)
    yield f"Routing: {routing}. Of each number of streams: **tokens per second of all**, milliseconds per token,"
    yield "milliseconds to the first token when all come together (mean), share of experts found in the pool, MB over"
    yield "the link per token."
    yield ""
    yield "| memory | policy, residency | prompt alone, ms | long prompt, tok/s |" + "".join(f" {n} |" for n in sizes)
    yield "|" + " --- |" * (4 + len(sizes))
    yield from (row_line(row, sizes) for row in rows)
    yield ""


def row_line(row: Row, sizes: list[int]) -> str:
    """One row of the table, for these numbers of streams."""
    what = f"{row['policy']}, {row['residency']}" + (f", no {row['off']}" if row["off"] else "")
    if not row["cells"]:
        return f"| {row['memory']} | {what} | {_reason(row)} |" + " |" * (len(sizes) + 1)
    cells = {cell["streams"]: _cell(cell) for cell in row["cells"]}
    prompts = row.get("prompts", {})
    prefill = next((rate for name, rate in prompts.items() if name.startswith("prefill")), 0.0)
    note = f" {row['error']}" if "error" in row else ""
    return (
        f"| {row['memory']} | {what} | {prompts.get('first_token_alone_ms', 0.0):.0f} | {prefill:,.0f} | "
        + " | ".join(cells.get(n, "") for n in sizes)
        + f" |{note}"
    )


def _reason(row: Row) -> str:
    """Why a row has no figures, in few words where it is the usual reason."""
    error = str(row.get("error", "not measured"))
    return "refuses to start: the experts do not fit" if row["policy"] == "static" and "memory" in error else error


def _cell(cell: dict[str, Any]) -> str:
    hits = "all" if cell["hit_rate"] is None else f"{cell['hit_rate']:.2f}"
    waiting = "" if cell["started"] == cell["streams"] else f" ({cell['started']} let in)"
    return (
        f"**{cell['tokens_per_s']:,.0f}** {cell['per_token_ms']:.1f} {cell['first_token_ms']['mean']:.0f} {hits} "
        f"{cell['bytes_over_link_per_token'] / 1e6:.1f}{waiting}"
    )


def _best(rows: list[Row]) -> Iterator[str]:
    """What `auto` reaches of the better of the other two residencies, where all three were measured."""
    found = {_key(row): {cell["streams"]: cell["tokens_per_s"] for cell in row["cells"]} for row in rows}
    for (memory, policy, residency, off), auto in found.items():
        others = [found.get((memory, policy, other, off), {}) for other in RESIDENCIES]
        shares = []
        for n in sorted(auto if residency == "auto" else ()):
            rates = [rates.get(n) for rates in others]
            if all(rates):
                best = max(range(len(rates)), key=lambda i: rates[i] or 0.0)
                shares.append(f"{n} streams {auto[n] / (rates[best] or 1.0):.0%} of {RESIDENCIES[best]}")
        if shares:
            yield f"{memory}, {policy}: `auto` reaches, of the better one of hot set and recency, {', '.join(shares)}."
            yield ""
