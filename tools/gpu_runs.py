"""Running the parts of the GPU check: commands with a time limit whose output is never lost, many side by side, and one
JSON file that holds whatever is known at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [
    sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-rfE",
    "-o", "addopts=--import-mode=importlib", "-o", "timeout=240",
]  # fmt: skip
SAVE_EVERY_S = 10.0
_OUTCOMES = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
_PLAIN_LINE = re.compile(rf"^(\S+\.py::.+?) ({_OUTCOMES})(?: \(.*\))?(?: +\[ *\d+%\])?$", re.M)
_WORKER_LINE = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({_OUTCOMES}) (\S+\.py::.+?) *$", re.M)
_SELECTED = re.compile(r"/ (\d+) selected|collected (\d+) items?$|workers? \[(\d+) items?\]", re.M)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.+)$", re.M)
_SECTION = re.compile(r"^_{2,} (?:ERROR at (?:setup|teardown) of )?(\S.*?) _{2,}$", re.M)
_RAISED = re.compile(r"^E   +(.*)$", re.M)
_RAISED_LINES = 3
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_FINDING = re.compile(
    r"^=+ +((?:Invalid|Misaligned|Error:|Warning:|Race|Potential|Program hit|Barrier).*(?:\n=+ +and .*)*)$", re.M
)

OnOutput = Callable[[str], None]


def run(command: Sequence[str], limit_s: float, on_output: OnOutput | None = None) -> tuple[int, str, float]:
    """(exit status, output, seconds) of a command in the root folder; status 124 where it ran out of time.

    The output so far goes to on_output every SAVE_EVERY_S seconds. The command's whole group ends with it.
    """
    started = told = time.monotonic()
    print("$", " ".join(command)[:300], flush=True)
    with tempfile.TemporaryFile() as log:
        wide = ["env", "COLUMNS=300", *command]  # pytest cuts what it says of a failure at the width of a terminal
        process = subprocess.Popen(wide, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        _running.add(process)
        try:
            while (status := process.poll()) is None and time.monotonic() - started < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, limit_s))
                if on_output is not None and time.monotonic() - told > SAVE_EVERY_S:
                    told = time.monotonic()
                    on_output(_text(log))
        finally:
            _end(process)
        status = 124 if status is None else status
        output = _text(log)
    seconds = round(time.monotonic() - started, 1)
    print("\n".join(output.splitlines()[-3:]), f"\n[{status}] {seconds} s", flush=True)
    return status, output, seconds


_running: set[subprocess.Popen[bytes]] = set()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    _running.discard(process)


def end_all() -> None:
    """End every command that runs, with what it started."""
    for process in list(_running):
        _end(process)


def _text(log: Any) -> str:
    """All that was written so far. The command has a descriptor of its own, but the position in the file is shared."""
    with open(f"/proc/self/fd/{log.fileno()}", "rb") as again:
        return again.read().decode(errors="replace")


def side_by_side(
    commands: Sequence[Sequence[str]], limit_s: float, on_output: Callable[[list[str]], None] | None = None
) -> list[tuple[int, str, float]]:
    """`run` for several commands at once; on_output gets the outputs of all so far."""
    outputs = [""] * len(commands)

    def one(i: int) -> tuple[int, str, float]:
        def note(text: str) -> None:
            outputs[i] = text
            if on_output is not None:
                on_output(list(outputs))

        result = run(commands[i], limit_s, note)
        outputs[i] = result[1]
        return result

    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        return list(pool.map(one, range(len(commands))))


def shares(items: Sequence[Any], n: int, together: int = 1) -> list[list[Any]]:
    """At most n lists of about equal length; `together` neighbours stay in one list (they need the same kernels)."""
    blocks = [items[i : i + together] for i in range(0, len(items), together)]
    parts: list[list[Any]] = [[] for _ in range(min(n, len(blocks)))]
    for i, block in enumerate(blocks):
        parts[i % len(parts)].extend(block)
    return parts


def pytest_outcomes(output: str) -> dict[str, str]:
    """Outcome of each test that has ended, whatever became of the run; a failure is not taken back."""
    found = [(name, outcome) for name, outcome in _PLAIN_LINE.findall(output)]
    found += [(name, outcome) for outcome, name in _WORKER_LINE.findall(output)]
    outcomes: dict[str, str] = {}
    for name, outcome in found:
        if outcomes.get(name) not in ("FAILED", "ERROR"):
            outcomes[name] = outcome
    return outcomes


def failure_sections(output: str) -> list[tuple[str, str]]:
    """(name of the test, what pytest shows of its failure) of each."""
    found = list(_SECTION.finditer(output))
    ends = [section.start() for section in found[1:]] + [len(output)]
    return [(section[1], output[section.end() : end]) for section, end in zip(found, ends, strict=False)]


def what_failed(name: str, sections: Sequence[tuple[str, str]]) -> str | None:
    """A test's name and the first lines of what was raised, which pytest's summary leaves out where a message begins
    with an empty line; None where pytest did not get to show it."""
    file, _, test = name.partition("::")
    for title, text in sections:
        if title == test.replace("::", ".") and f"{file}:" in text:
            lines = [line.strip() for line in _RAISED.findall(text)]
            return " - ".join([name, *[line for line in lines if line][:_RAISED_LINES]])
    return None


def pytest_row(results: Sequence[tuple[int, str, float]]) -> dict[str, Any]:
    """What one or more runs of pytest -v found. Counts are of the tests that ended; the others are `not_run`."""
    outcomes: dict[str, str] = {}
    n_selected, notes = 0, []
    for status, output, _ in results:
        ended = pytest_outcomes(output)
        outcomes |= ended
        counts = [int(number) for groups in _SELECTED.findall(output) for number in groups if number]
        n_selected += max([*counts, len(ended)])
        if status == 124:
            notes.append("ran out of time")
        elif status not in (0, 1, 5, 9):
            notes.append(f"pytest ended with status {status}: {output.strip()[-400:]}")
    values = list(outcomes.values())
    row: dict[str, Any] = {
        "ok": all(status in (0, 5) for status, _, _ in results),
        "seconds": round(max((seconds for _, _, seconds in results), default=0.0), 1),
        "passed": values.count("PASSED"),
        "failed": values.count("FAILED") + values.count("ERROR"),
        "skipped": values.count("SKIPPED"),
        "not_run": n_selected - len(outcomes),
    }
    if row["failed"]:
        said = {line.split(" - ")[0]: line for _, output, _ in results for line in _FAILURE.findall(output)}
        sections = [section for _, output, _ in results for section in failure_sections(output)]
        names = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        row["failures"] = [(what_failed(name, sections) or said.get(name, name))[:400] for name in names]
    if notes:
        row["notes"] = notes
    return row


def sanitizer_row(results: Sequence[tuple[int, str, float]]) -> dict[str, Any]:
    """pytest_row, with what compute-sanitizer found: its own totals, or its messages where it did not end."""
    row = pytest_row(results)
    messages: list[str] = []
    n_errors = 0
    for status, output, _ in results:
        found = _FINDING.findall(output)
        messages += [re.sub(r"\s*\n=+\s*", " ", message) for message in found]  # a race has a line for each access
        summary = _SUMMARY.search(output)
        n_errors += int(summary[1] or summary[2]) if summary else len(found)
        if summary is None and status != 124:
            row.setdefault("notes", []).append(f"compute-sanitizer gave no summary: {output.strip()[-300:]}")
            row["ok"] = False
    row["errors_found"] = n_errors
    row["ok"] = row["ok"] and n_errors == 0
    if messages:
        row["messages"] = sorted(set(messages))[:40]
    return row


class Results:
    """The JSON file. Every change is written at once; checks that run side by side may share one file."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        path.parent.mkdir(parents=True, exist_ok=True)

    def save(self, part: str, row: dict[str, Any]) -> None:
        """Put a part's row in the place of what was there."""
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = json.loads(self.path.read_text()) if self.path.exists() else {"parts": {}}
            content.update(self.about)
            dated = {**row, "date": self.about["date"], "commit": self.about["commit"]}
            content["parts"][part] = dated
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps(content, indent=1) + "\n")
            fresh.replace(self.path)
