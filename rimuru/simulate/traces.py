"""Request traces: arrival times and lengths, no text. What a file holds tells the formats apart, not its name."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.errors import BadInputError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """arrival_s counts from the first request. prefix: ids of the prompt's leading blocks that others may share."""

    arrival_s: float
    n_prompt: int
    n_output: int
    prefix: tuple[int, ...] = ()


PREFIX_BLOCK_TOKENS = 512
MAX_SPAN_S = 1e9
"""31 years: the simulator's clock, a float64, still tells a microsecond then."""
MAX_PREFIX_ID = 2**31 - 1
"""They become token ids, which are int32."""
TRACE_COLUMNS = (
    "a CSV with the columns prompt_tokens,output_tokens or TIMESTAMP,ContextTokens,GeneratedTokens, or JSON lines with "
    "timestamp (ms), input_length and output_length"
)
"""What a file may hold, for messages and help."""
_SHOWN_CHARACTERS = 40
_WHOLE = re.compile(r"\+?[0-9]{1,4000}(\.0*)?")  # Python reads no more than 4,300 digits


@dataclass(frozen=True, slots=True)
class _Row:
    time_s: float | None
    """None: the format has no times."""
    n_prompt: int
    n_output: int
    prefix: tuple[int, ...] = ()


def read_trace(
    path: str | Path, n_requests: int | None = None, stretch: float = 1.0, rate: float | None = None, seed: int = 0
) -> list[TraceRequest]:
    """The first n_requests of a trace by arrival, times multiplied by `stretch` and counted from the first.

    Known are `prompt_tokens,output_tokens` (no times: all at once, or Poisson at `rate` requests per second),
    `TIMESTAMP,ContextTokens,GeneratedTokens` (without a zone: UTC), and JSON lines with timestamp (ms), input_length,
    output_length, hash_ids. Raises BadInputError, with the line, where the file is none of these or a value is none.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(itertools.islice(_rows(file, path), n_requests))
    except OSError as error:
        raise BadInputError(f"cannot read the trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is no trace: it is not UTF-8 text; a trace is {TRACE_COLUMNS}") from None
    if not rows:
        raise BadInputError(f"the trace {path} has no requests")
    times = _arrivals([row.time_s for row in rows], stretch, rate, seed)
    if not times.max() <= MAX_SPAN_S:  # not finite is caught, too
        what = f"the arrival times of {path} reach further than {MAX_SPAN_S:.0e} s"
        raise BadInputError(f"{what}; give a smaller --stretch or a larger --rate, or correct the trace")
    found = [TraceRequest(float(t), r.n_prompt, r.n_output, r.prefix) for t, r in zip(times, rows, strict=True)]
    return sorted(found, key=lambda request: request.arrival_s)


def cut_to_context(trace: list[TraceRequest], context_tokens: int) -> tuple[list[TraceRequest], int]:
    """The trace with no request longer than the context, and how many were: of a long prompt what leaves room for its
    answer, but no less than half of the context; then the answer ends where the context does."""
    if context_tokens < 2:
        raise BadInputError("a context of 1 token has no room for a prompt and an answer; give a larger --ctx")
    found, n_cut = [], 0
    for request in trace:
        if request.n_prompt + request.n_output > context_tokens:
            n_cut += 1
            n_prompt = min(request.n_prompt, max(context_tokens - request.n_output, context_tokens // 2))
            n_output = min(request.n_output, context_tokens - n_prompt)
            request = replace(request, n_prompt=n_prompt, n_output=n_output)
        found.append(request)
    return found, n_cut


def _arrivals(times_s: list[float | None], stretch: float, rate: float | None, seed: int) -> np.ndarray:
    """float64 [n] from the first one; not finite where they overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        known = [time for time in times_s if time is not None]
        if known:
            times = np.array(known) * stretch
        elif rate is not None:
            times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(times_s)))
        else:
            times = np.zeros(len(times_s))
        times -= times.min()
    return times


# ---- the formats
def _rows(file: Iterator[str], path: Path) -> Iterator[_Row]:
    lines = enumerate(file, 1)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        return
    number, line = first
    if line.lstrip().startswith(("{", "[")):
        yield from _json_rows(itertools.chain([first], lines), path)
    else:
        yield from _csv_rows(itertools.chain([line], (line for _, line in lines)), number - 1, path)


def _csv_rows(lines: Iterator[str], n_before: int, path: Path) -> Iterator[_Row]:
    reader = csv.reader(lines)
    columns: list[str] = []
    while True:
        try:
            values = next(reader, None)
        except csv.Error:
            raise _no_trace(f"line {n_before + reader.line_num} is no line of a CSV", path) from None
        if values is None:
            return
        where = f"{path}, line {n_before + reader.line_num}"
        if not any(value.strip() for value in values):
            continue
        if not columns:
            columns = [name.strip() for name in values]
            has_times = "prompt_tokens" not in columns
            prompt, output = ("ContextTokens", "GeneratedTokens") if has_times else ("prompt_tokens", "output_tokens")
            for name in [*(["TIMESTAMP"] if has_times else []), prompt, output]:
                if name not in columns:
                    raise _no_trace(f"it lacks {name}", path)
            continue
        row = dict(zip(columns, values, strict=False))
        time_s = _moment(row.get("TIMESTAMP", ""), where) if has_times else None
        yield _Row(time_s, _length(row, prompt, where), _length(row, output, where))


def _json_rows(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[_Row]:
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise _no_trace(f"line {number} is not JSON", path) from None
        if not isinstance(row, dict):
            raise _no_trace(f"line {number} is no JSON object", path)
        for name in ("timestamp", "input_length", "output_length"):
            if name not in row:
                raise _no_trace(f"line {number} lacks {name}", path)
        time_s = _seconds(row["timestamp"], where)
        n_prompt, n_output = _length(row, "input_length", where), _length(row, "output_length", where)
        yield _Row(time_s, n_prompt, n_output, _prefix(row.get("hash_ids", []), where))


def _no_trace(why: str, path: Path) -> BadInputError:
    return BadInputError(f"{path} is no trace: {why}; a trace is {TRACE_COLUMNS}")


# ---- single values
def _length(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    found = 0
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        found = int(value.split(".")[0])
    elif (isinstance(value, float) and value.is_integer()) or type(value) is int:
        found = int(value)
    if found < 1:
        raise BadInputError(f"{where}: {name} must be a whole number of at least 1{_got(value)}")
    return found


def _seconds(value: object, where: str) -> float:
    """Of a JSON timestamp. JSON as Python reads it has NaN and Infinity."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = value / 1e3
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise BadInputError(f"{where}: timestamp must be a number of milliseconds{_got(value)}")


def _moment(text: str, where: str) -> float:
    """Seconds since 1970. Fractions of any length; Python reads six digits, before 3.11 no other number and no Z."""
    plain = re.sub(r"\.([0-9]+)", lambda match: "." + match[1][:6].ljust(6, "0"), text.strip())
    try:
        moment = datetime.fromisoformat(plain[:-1] + "+00:00" if plain.endswith(("Z", "z")) else plain)
    except ValueError:
        example = "2023-11-16 18:17:03.9799600"
        raise BadInputError(f"{where}: TIMESTAMP must be a time such as {example}{_got(text)}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _prefix(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(block) is int and 0 <= block <= MAX_PREFIX_ID for block in value):
        what = f"a list of whole numbers from 0 to {MAX_PREFIX_ID}"
        raise BadInputError(f"{where}: hash_ids must be {what}{_got(value)}")
    return tuple(value)


def _got(value: object) -> str:
    """The end of a message: what stands there instead."""
    if value is None or value == "":
        return ", and there is none"
    text = repr(value)
    return f", got {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"
