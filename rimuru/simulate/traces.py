"""Request traces: arrival times and lengths, no text. Columns tell the formats apart."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

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
TRACE_COLUMNS = (
    "a CSV with the columns prompt_tokens,output_tokens or TIMESTAMP,ContextTokens,GeneratedTokens, or .jsonl with "
    "timestamp (ms), input_length and output_length in each line"
)
"""What a file may hold, for messages and help."""


def read_trace(
    path: str | Path, n_requests: int | None = None, stretch: float = 1.0, rate: float | None = None, seed: int = 0
) -> list[TraceRequest]:
    """The first n_requests of a trace, arrival times multiplied by `stretch`.

    Known are `prompt_tokens,output_tokens` (no times: all at once, or Poisson at `rate` requests per second),
    `TIMESTAMP,ContextTokens,GeneratedTokens`, and JSON lines with timestamp (ms), input_length, output_length,
    hash_ids. Raises BadInputError where the file is none of these.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(_take(_json_rows(file) if path.suffix == ".jsonl" else _csv_rows(file), n_requests))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    except KeyError as error:
        raise BadInputError(f"{path} is no trace, it lacks {error.args[0]}; a trace is {TRACE_COLUMNS}") from None
    except (ValueError, TypeError, AttributeError, csv.Error) as error:
        raise BadInputError(f"{path} is no trace: {error}; a trace is {TRACE_COLUMNS}") from None
    if not rows:
        raise BadInputError(f"the trace {path} has no requests")
    if all(row.arrival_s < 0 for row in rows):
        times = np.zeros(len(rows))
        if rate is not None:
            times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(rows)))
    else:
        times = np.array([row.arrival_s for row in rows]) * stretch
    times -= times.min()
    found = [
        TraceRequest(float(t), max(1, r.n_prompt), max(1, r.n_output), r.prefix)
        for t, r in zip(times, rows, strict=True)
    ]
    return sorted(found, key=lambda request: request.arrival_s)


def _take(rows: Iterator[TraceRequest], n: int | None) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows):
        if n is not None and number >= n:
            return
        yield row


def _csv_rows(file: Iterator[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(file):
        if "prompt_tokens" in row:
            yield TraceRequest(-1.0, int(row["prompt_tokens"]), int(row["output_tokens"]))
        else:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the files give a digit more than can be read
            yield TraceRequest(moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _json_rows(file: Iterator[str]) -> Iterator[TraceRequest]:
    for line in file:
        row = json.loads(line)
        prefix = tuple(int(block) for block in row.get("hash_ids", ()))
        yield TraceRequest(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]), prefix)
