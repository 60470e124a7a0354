#!/usr/bin/env python3
"""Everything that has to hold on a machine with a GPU, as one JSON file with card, driver, date and figures.

    tools/gpu_check.sh [--only tests,memcheck,racecheck,logits,kernels,bench] [--models DIR --expected DIR]
                       [--model FILE ...] [--out tools/results/gpu_check.json]

tests      all tests marked `gpu`
memcheck, racecheck
           compute-sanitizer over the kernel tests, a file at a time; skipped with a line where the machine refuses it
logits     tools/logits_check.py over MODELS/NAME.gguf and EXPECTED/NAME.npz
kernels    tools/bench/kernels.py --device cuda
bench      rimuru bench of every --model

No command runs longer than --limit seconds (590). Parts of an earlier run stay in the file unless they run again, so
that a check can be done in pieces. Exit status 1 where a part has failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

KERNEL_TESTS = "tests/ops/test_cuda_*.py"
SANITIZER_PROBE = "import cupy; assert int(cupy.arange(5).sum()) == 10"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]


def run(command: list[str], limit_s: float) -> tuple[int, str, float]:
    """(exit status, output, seconds) of a command in the root folder; status 124 where it ran out of time."""
    started = time.monotonic()
    print("$", " ".join(command), flush=True)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        status, output = 124, raw.decode(errors="replace") if isinstance(raw, bytes) else raw
    seconds = time.monotonic() - started
    print("\n".join(output.splitlines()[-3:]), f"\n[{status}] {seconds:.1f} s", flush=True)
    return status, output, round(seconds, 1)


def pytest_row(status: int, output: str, seconds: float) -> dict[str, Any]:
    """What a pytest run says in its last lines."""
    row: dict[str, Any] = {"ok": status == 0, "seconds": seconds}
    for count, what in re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)\b", output):
        row[what] = int(count)
    if status == 124:
        row["note"] = "ran out of time"
    if not row["ok"]:
        row["failures"] = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, flags=re.M)[:50]
    return row


def machine() -> dict[str, Any]:
    """Card, driver and versions."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    status, output, _ = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "card": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": output.split()[0] if status == 0 and output.split() else "unknown",
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip() or "unknown",
    }


def check_tests(options: argparse.Namespace) -> dict[str, Any]:
    return pytest_row(*run([*PYTEST, "tests"], options.limit))


def check_sanitizer(options: argparse.Namespace, tool: str) -> dict[str, Any]:
    """compute-sanitizer over each file of kernel tests; `errors` as it counts them."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"ok": True, "skipped_because": "compute-sanitizer is not installed"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    status, output, _ = run([*command, sys.executable, "-c", SANITIZER_PROBE], 120)
    if status != 0:
        lines = [line.strip("= ") for line in output.splitlines() if "rror" in line or "not supported" in line]
        return {"ok": True, "skipped_because": f"the machine refuses it: {(lines or ['no reason given'])[0]}"}
    files: dict[str, Any] = {}
    for path in sorted(ROOT.glob(KERNEL_TESTS)):
        if options.files and not any(part in path.name for part in options.files.split(",")):
            continue
        if not re.search(r"mark\.gpu", path.read_text()):
            continue
        # Model shapes take minutes under the sanitizer, and edge shapes reach the same lines.
        deselected = ["-k", options.sanitizer_k] if options.sanitizer_k else []
        status, output, seconds = run([*command, *PYTEST, *deselected, str(path.relative_to(ROOT))], options.limit)
        row = pytest_row(status, output, seconds)
        found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", output)
        row["errors_found"] = int(found[1] or found[2]) if found else None
        files[path.name] = row
    return {"ok": all(row["ok"] for row in files.values()), "files": files}


def check_logits(options: argparse.Namespace) -> dict[str, Any]:
    if options.models is None or options.expected is None:
        return {"ok": True, "skipped_because": "no --models and --expected"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.json"
        places = ["--models", str(options.models), "--expected", str(options.expected), "--json", str(out)]
        command = [sys.executable, "tools/logits_check.py", "--device", "cuda", *places, *options.names.split()]
        status, output, seconds = run(command, options.limit)
        rows = json.loads(out.read_text()) if out.exists() else []
    last = output.strip().splitlines()[-1:] or [""]
    return {"ok": status == 0, "seconds": seconds, "summary": last[0], "models": rows}


def check_kernels(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.json"
        command = [
            sys.executable,
            "tools/bench/kernels.py",
            "--device",
            "cuda",
            "--seconds",
            "0.05",
            "--json",
            str(out),
        ]
        status, _, seconds = run(command, options.limit)
        rows = json.loads(out.read_text()) if out.exists() else []
    return {"ok": status == 0, "seconds": seconds, "cases": rows}


def check_bench(options: argparse.Namespace) -> dict[str, Any]:
    if not options.model:
        return {"ok": True, "skipped_because": "no --model"}
    rows: dict[str, Any] = {}
    for path in options.model:
        sizes = ["--prefill", options.prefill, "--streams", options.streams]
        command = [sys.executable, "-m", "rimuru", "bench", str(path), "--device", "cuda", "--json", *sizes]
        status, output, seconds = run(command, options.limit)
        found = re.search(r"^\{.*^\}|^\{.*\}$", output, flags=re.S | re.M)
        figures = json.loads(found[0]) if status == 0 and found else {"error": output[-500:]}
        rows[path.name] = {"ok": status == 0, "seconds": seconds, **figures}
    return {"ok": all(row["ok"] for row in rows.values()), "models": rows}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tests": check_tests,
    "memcheck": lambda options: check_sanitizer(options, "memcheck"),
    "racecheck": lambda options: check_sanitizer(options, "racecheck"),
    "logits": check_logits,
    "kernels": check_kernels,
    "bench": check_bench,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--models", type=Path, help="folder with NAME.gguf, for logits")
    parser.add_argument("--expected", type=Path, help="folder with NAME.npz, for logits")
    parser.add_argument(
        "--names", default="", help="models of the logits part, separated by spaces; all where not given"
    )
    parser.add_argument("--model", type=Path, action="append", default=[], help="a model to benchmark; may be repeated")
    parser.add_argument("--prefill", default="512,4096", help="prompt lengths of the benchmark")
    parser.add_argument("--streams", default="1,8,32", help="streams of the benchmark")
    parser.add_argument("--files", default="", help="parts of names of test files that the sanitizer parts take")
    parser.add_argument("--sanitizer-k", default="not 151936 and not 4096", help="pytest -k of the sanitizer parts")
    parser.add_argument("--limit", type=float, default=590.0, help="seconds that one command may take")
    parser.add_argument("--out", type=Path, default=ROOT / "tools/results/gpu_check.json")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}")
    return options


def main() -> int:
    options = arguments()
    from rimuru.ops.cuda.device import usable

    why_not = usable()
    if why_not is not None:
        print(f"no GPU to check: {why_not}", file=sys.stderr)
        return 2
    result = json.loads(options.out.read_text()) if options.out.exists() else {"parts": {}}
    about = machine()
    result.update(about)
    for name in options.only.split(","):
        row = PARTS[name](options)
        result["parts"][name] = {**row, "date": about["date"], "commit": about["commit"]}
        print(f"{name}: {'ok' if row['ok'] else 'FAILED'} {row.get('skipped_because', '')}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(result["parts"][name]["ok"] for name in options.only.split(",")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
