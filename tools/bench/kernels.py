"""Times the verbs of a backend on the kernel cases of tests/cases: microseconds, GB/s and Gflop/s of each call.

    python tools/bench/kernels.py [--device cpu|cuda] [--filter TEXT] [--threads N] [--seconds 0.5] [--json FILE]

Only the verb itself is timed: uploads, staging and downloads of a case are left out. The best call counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import attention, matmul, moe, pointwise, recurrent, sampling  # noqa: E402
from cases.common import Case  # noqa: E402

from rimuru.ops import create  # noqa: E402
from rimuru.ops.base import Ops  # noqa: E402

UNTIMED = {
    "empty", "upload", "download", "weight", "act", "act_bytes", "reserve_pool", "copier", "stage", "synchronize",
    "moe_scratch",
}  # fmt: skip


class Timed:
    """A backend whose verbs are called again and again; `best_s` is the fastest call of the last verb.

    What a case calls before only makes its inputs.
    """

    def __init__(self, ops: Ops, seconds: float) -> None:
        self._ops, self._seconds, self.best_s = ops, seconds, float("inf")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name in UNTIMED or not callable(found):
            return found
        return lambda *args, **named: self._time(lambda: found(*args, **named))

    def _time(self, call: Callable[[], None]) -> None:
        call()
        self._ops.synchronize()
        self.best_s = float("inf")
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            call()
            self._ops.synchronize()
            self.best_s = min(self.best_s, time.perf_counter() - start)


def all_cases() -> list[Case]:
    """The cases of model shapes, and attention at the shapes of Qwen3-30B-A3B."""
    listed: list[Any] = [
        *pointwise.CASES, *matmul.CASES, *moe.CASES, *attention.QKV_CASES, *recurrent.CASES, *sampling.CASES,
    ]  # fmt: skip
    shapes = attention.BENCH_SHAPES.items()
    return [c for c in listed if c.kind == "model"] + [attention.attention_case(n, s, "model") for n, s in shapes]


def measure(case: Case, ops: Ops, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    inputs, timed = case.inputs(), Timed(ops, seconds)
    case.run(timed, inputs)  # type: ignore[arg-type]
    best = timed.best_s
    return {
        "case": case.name,
        "us": best * 1e6,
        "gb_per_s": case.bytes_moved(inputs) / best / 1e9,
        "gflop_per_s": case.flops(inputs) / best / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--filter", default="", help="only cases whose name holds this text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    ops = create(options.device, options.threads)
    rows = []
    for case in all_cases():
        if options.filter in case.name:
            row = measure(case, ops, options.seconds)
            rows.append(row)
            print(
                f"{row['case']:60s} {row['us']:11.1f} us {row['gb_per_s']:8.1f} GB/s {row['gflop_per_s']:9.1f} Gflop/s"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
