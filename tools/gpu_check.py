#!/usr/bin/env python3
"""Everything that has to hold on a machine with a GPU, as one JSON file with card, driver, date and figures.

    tools/gpu_check.sh [--only tests,memcheck,racecheck,logits,kernels,bench] [--models DIR --expected DIR]
                       [--model FILE ...] [--jobs N] [--commit ID] [--out tools/results/gpu_check.json]

tests      all tests marked `gpu`, several processes side by side; then those that need the card for themselves
memcheck, racecheck
           compute-sanitizer over a selection of the kernel tests that reaches every family of kernels, side by side;
           skipped with a line where the machine refuses it
logits     tools/logits_check.py over MODELS/NAME.gguf and EXPECTED/NAME.npz, side by side
kernels    tools/bench/kernels.py --device cuda
bench      rimuru bench of every --model

No part runs longer than --limit seconds (590). The file is written while the parts run: what a part has found is in it
even where its time was up. Parts of an earlier run stay unless they run again, so that a check can be done in pieces,
by several calls at the same time too. Exit status 1 where a part has failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.gpu_runs import PYTEST, Results, end_all, pytest_row, run, sanitizer_row, shares, side_by_side  # noqa: E402

SANITIZER_PROBE = "import cupy; assert int(cupy.arange(5).sum()) == 10"
Row = dict[str, Any]
Save = Callable[[Row], None]

SOME_TYPES = r"(q4_k|q6_k|q8_0|q5_0|mxfp4|iq2_s|f16)"
MEMCHECK: dict[str, str] = {
    "matmul": r"fast-linear (\w+ (127x\d+ T=(1|40)|300x512 T=130)|.*three types|.*factors|f32|\w+ constant)"
    rf"|test_tiles\[fast-{SOME_TYPES}\]|test_every_switch_of_kernel\[fast-(2|9|17|33|65|97|129)\]"
    r"|deterministic-linear q4_k 127x256 T=(1|40)|deterministic-(q4_k|f32)-1100-shared expert",
    "moe": r"fast-(route|(summed )?experts) (?!qwen3)|test_every_switch_of_kernel\[fast"
    r"|placement_never\w+\[fast-(\w+-)?(7|100)\]|deterministic-experts q4_k_m T=(9|40)",
    "attention": r"test_attention\[(?!.*(2500|context \d\d|one block))|qkv|window|padding|pieces",
    "recurrent": r"mixed|decode, \w+, 3/3|decode, 3 heads|padding|no_bit\[(conv of 4|delta_net of 4x24|mamba2 of 30)",
    "pointwise": r"test_case\[(?!.*(4096|8192|64x2048))|eight_bit_form\[\w+-96-|embed|take_tokens",
    "mla": r"fast-(?!.*(T=300|128 heads|16 heads))",
    "fused": r"fast-(choose_experts|linear normed|attention prepares) (?!qwen3)",
    "sampling": r"test_case\[(?!.*151936)|penalty|top_k_keeps|order_of|filters_keep|hot_draws|follow_the",
    "residency": r"test_case\[(?!.*qwen3)",
    "runtime": r"read_pinned|graph_outlives|stage_gives",
}
"""What compute-sanitizer sees, by file tests/ops/test_cuda_<name>.py: every family and tensor type, edge shapes; model
shapes take minutes under it and reach the same lines."""

RACECHECK: dict[str, str] = {
    "matmul": rf"fast-linear {SOME_TYPES} (127x\d+ T=40|300x512 T=130)|test_tiles\[fast-(q4_k|q8_0|f16)\]"
    r"|test_every_switch_of_kernel\[fast-(4|9|33|97)\]|f32 router",
    "moe": r"fast-route (ties|sigmoid in groups|1024)|fast-experts (q4_k_m T=(2|8|20|40|300)|q8_0 T=700|mxfp4 T=60)"
    r"|fast-experts (three types|factors|no gate) T=|test_every_switch_of_kernel\[fast-(\w+-)?(3|16|65)\]",
    "attention": r"decode, (groups|window)|decode, 16 tokens a page, context 49|keys of|latent|prompt (of|pieces)"
    r"|256 dims|mixed|qkv\[.*(head|vector)|window, sinks",
    "recurrent": r"mixed|padding|no_bit\[(delta_net of 4x24|mamba2 of 30|mamba1 of 40)",
    "pointwise": r"(rms_norm|add_norm|row_gate) (3x7|5x288)|gated_norm (2x256|3x90)",
    "mla": r"fast-head_linear (q4_k|q8_0|f16) T=9",
    "fused": r"fast-(choose_experts|linear normed|attention prepares) (?!qwen3|float32)",
    "residency": r"test_case\[fetch_(?!.*qwen3)",
    "sampling": r"test_case\[(?!.*151936)|penalty|order_of",
}
"""Kernels that share memory within a block; one or two tensor types of each."""


def machine(commit: str) -> Row:
    """Card, driver and versions."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    status, output, _ = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30)
    if not commit:
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": output.split()[0] if status == 0 and output.split() else "unknown",
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or "unknown",
    }


def check_tests(options: argparse.Namespace, save: Save) -> Row:
    """Side by side where pytest-xdist is there; then, one after the other, what needs the card for itself."""
    many = options.jobs > 1 and importlib.util.find_spec("xdist") is not None
    workers = ["-n", str(options.jobs), "--dist", "worksteal"] if many else []
    ended: list[tuple[int, str, float]] = []
    for marks, more in (("gpu and not alone", workers), ("gpu and alone", [])):
        left_s = options.limit - sum(seconds for _, _, seconds in ended)
        failures = f"--failures-file={options.out.with_suffix('.failures.txt').absolute()}"
        command = [*PYTEST, "-m", marks, failures, *more, *gpu_test_files()]
        ended.append(run(command, max(left_s, 20.0), lambda text: save(pytest_row([*ended, (124, text, 0.0)]))))
    row = pytest_row(ended)
    return {**row, "seconds": round(sum(seconds for _, _, seconds in ended), 1)}


def gpu_test_files() -> list[str]:
    """Only these are opened: others may need packages that a machine with a GPU does not have."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def kernel_tests(selection: dict[str, str], wanted: str) -> list[str]:
    """Ids of the kernel tests that a selection names; `wanted`: only files whose name holds one of these words."""
    chosen = {name: re.compile(regex) for name, regex in selection.items()}
    if wanted:
        chosen = {name: regex for name, regex in chosen.items() if any(word in name for word in wanted.split(","))}
    files = [f"tests/ops/test_cuda_{name}.py" for name in chosen]
    listing = [*PYTEST, "--collect-only", "-qq", *files]
    output = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    ids = re.findall(r"^(tests/ops/test_cuda_(\w+)\.py::.+)$", output, flags=re.M)
    return [name for name, file in ids if chosen[file].search(name.split("::")[1])]


def check_sanitizer(options: argparse.Namespace, save: Save, tool: str) -> Row:
    """compute-sanitizer over the selection; `errors_found` as it counts them."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {"ok": True, "skipped_because": "compute-sanitizer is not installed"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    status, output, _ = run([*command, sys.executable, "-c", SANITIZER_PROBE], 120)
    if status != 0:
        lines = [line.strip("= ") for line in output.splitlines() if "rror" in line or "not supported" in line]
        return {"ok": True, "skipped_because": f"the machine refuses it: {(lines or ['no reason given'])[0]}"}
    ids = kernel_tests(MEMCHECK if tool == "memcheck" else RACECHECK, options.files)
    commands = [[*command, *PYTEST, *part] for part in shares(ids, options.jobs, together=3)]
    counts = {"selected": len(ids), "processes": len(commands)}
    results = side_by_side(
        commands, options.limit, lambda texts: save(sanitizer_row([(124, text, 0.0) for text in texts]) | counts)
    )
    return sanitizer_row(results) | counts


def check_logits(options: argparse.Namespace, save: Save) -> Row:
    if options.models is None or options.expected is None:
        return {"ok": True, "skipped_because": "no --models and --expected"}
    names = options.names.split() or sorted(path.stem for path in options.expected.glob("*.npz"))
    parts = shares(names, options.jobs)
    places = ["--models", str(options.models), "--expected", str(options.expected), "--memory", "4GiB"]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(len(parts))]

        def row() -> Row:
            models = [model for file in files if file.exists() for model in json.loads(file.read_text())]
            models.sort(key=lambda model: str(model["name"]))
            n_ok = sum(bool(model["ok"]) for model in models)
            bad = [str(model["name"]) for model in models if not model["ok"]]
            summary = f"{n_ok} of {len(models)} models within their bound on cuda, {len(names)} asked for"
            return {"summary": summary, "failures": bad, "models": models}

        base = [sys.executable, "tools/logits_check.py", "--device", "cuda", *places]
        commands = [[*base, "--json", str(file), *part] for file, part in zip(files, parts, strict=True)]
        results = side_by_side(commands, options.limit, lambda texts: save({"ok": False, **row()}))
        ok = all(status == 0 for status, _, _ in results)
        return {"ok": ok, "seconds": max(seconds for _, _, seconds in results), **row()}


def check_kernels(options: argparse.Namespace, save: Save) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.json"
        command = [sys.executable, "tools/bench/kernels.py", "--device", "cuda", "--seconds", "0.05"]
        status, _, seconds = run([*command, "--json", str(out)], options.limit)
        figures = json.loads(out.read_text()) if out.exists() else {}
    return {"ok": status == 0, "seconds": seconds, **figures}


def check_bench(options: argparse.Namespace, save: Save) -> Row:
    if not options.model:
        return {"ok": True, "skipped_because": "no --model"}
    rows: Row = {}
    for path in options.model:
        sizes = ["--prefill", options.prefill, "--streams", options.streams]
        command = [sys.executable, "-m", "rimuru", "bench", str(path), "--device", "cuda", "--json", *sizes]
        status, output, seconds = run(command, options.limit)
        found = re.search(r"^\{.*^\}|^\{.*\}$", output, flags=re.S | re.M)
        figures = json.loads(found[0]) if status == 0 and found else {"error": output[-500:]}
        rows[path.name] = {"ok": status == 0, "seconds": seconds, **figures}
        save({"ok": False, "models": rows})
    return {"ok": all(row["ok"] for row in rows.values()), "models": rows}


PARTS: dict[str, Callable[[argparse.Namespace, Save], Row]] = {
    "tests": check_tests,
    "memcheck": lambda options, save: check_sanitizer(options, save, "memcheck"),
    "racecheck": lambda options, save: check_sanitizer(options, save, "racecheck"),
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
    parser.add_argument("--files", default="", help="the sanitizer parts: only these test files (words of their names)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(1, min(12, cores // 2)), help="processes side by side")
    parser.add_argument("--commit", default="", help="of what is checked, where this is no git checkout")
    parser.add_argument("--limit", type=float, default=590.0, help="seconds that one part (bench: one model) may take")
    parser.add_argument("--out", type=Path, default=ROOT / "tools/results/gpu_check.json")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {sorted(unknown)[0]!r}; choose from {', '.join(PARTS)}")
    return options


def _end(number: int, frame: object) -> None:
    end_all()  # the file stays as it is
    raise SystemExit(128 + number)


def main() -> int:
    options = arguments()
    from rimuru.ops.cuda.device import usable

    why_not = usable()
    if why_not is not None:
        print(f"no GPU to check: {why_not}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)
    results, ok = Results(options.out, machine(options.commit)), True
    for name in options.only.split(","):
        row = PARTS[name](options, lambda row, name=name: results.save(name, {"unfinished": True, **row}))  # type: ignore[misc]
        results.save(name, row)
        counts = " ".join(f"{key} {row[key]}" for key in ("passed", "failed", "skipped", "not_run") if key in row)
        found = f"errors {row['errors_found']}" if "errors_found" in row else row.get("summary", "")
        verdict = "ok" if row["ok"] else "FAILED"
        print(f"{name}: {verdict} {row.get('skipped_because', '')} {counts} {found}", flush=True)
        for failure in row.get("failures", []):
            print(f"    {failure}", flush=True)
        ok = ok and bool(row["ok"])
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
