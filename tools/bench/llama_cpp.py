#!/usr/bin/env python3
"""Measures llama.cpp on the files of `rimuru bench`: prefill with its llama-bench, decode with its llama-batched-bench.

    python tools/bench/llama_cpp.py MODEL.gguf... --bin DIR [--prefill 512,4096] [--streams 1,8,32,96] [--output FILE]

DIR holds an installed or built llama.cpp's programs. Flash attention is on and every layer on the card. A prompt's rate
is that of the best of the --ubatch sizes (its default is small for a large card); decode feeds random tokens after
--context tokens each. Rates are medians of --repeats. Where one of the programs cannot run a model, its last words are
reported, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def prefill_rates(output: str) -> dict[int, float]:
    """Tokens per second of each prompt length, the best micro-batch's, from what `llama-bench -o json` prints."""
    rates: dict[int, float] = {}
    for row in json.loads(output[output.index("[") :]):
        if row["n_prompt"] and not row["n_gen"]:
            rate = statistics.median(row.get("samples_ts") or [row["avg_ts"]])
            rates[row["n_prompt"]] = max(rate, rates.get(row["n_prompt"], 0.0))
    return rates


def decode_rates(output: str) -> dict[int, float]:
    """Tokens per second of all streams together, medians over repeats, from the rows of `llama-batched-bench`."""
    samples: dict[int, list[float]] = {}
    for line in output.splitlines():
        if '"speed_tg"' in line:  # its log may put a time before a row
            row = json.loads(line[line.index("{") :])
            samples.setdefault(row["pl"], []).append(row["speed_tg"])
    return {streams: statistics.median(rates) for streams, rates in samples.items()}


def run(command: list[str], limit_seconds: float) -> str:
    """What the program printed. Raises RuntimeError with its last words where it failed or took too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {' | '.join(words)}")
    return done.stdout


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one file, under the names that `rimuru bench --json` gives them."""
    started = time.monotonic()
    figures: dict[str, Any] = {"model": model.name, "errors": []}
    largest = max(int(n) for n in args.ubatch.split(","))
    prefill = [str(args.bin / "llama-bench"), "-m", str(model), *f"-p {args.prefill} -n 0 -ngl 99 -fa 1".split()]
    prefill += f"-b {largest} -ub {args.ubatch} -r {args.repeats} -o json".split()
    streams = [int(n) for n in args.streams.split(",")]
    repeated = ",".join(str(n) for n in streams for _ in range(args.repeats))
    padded = -(-(args.context + args.new) // 256) * 256  # llama.cpp rounds a sequence's context up to 256 tokens
    decode = [str(args.bin / "llama-batched-bench"), "-m", str(model), *f"-c {max(streams) * padded} -ngl 99".split()]
    decode += f"-fa on -npp {args.context} -ntg {args.new} -npl {repeated} --output-format jsonl".split()
    parts = [("prefill", prefill, prefill_rates), ("decode", decode, decode_rates)]
    for name, command, parse in parts:
        try:
            figures[f"{name}_tokens_per_second"] = parse(run(command, args.limit_seconds))
        except (RuntimeError, ValueError, KeyError) as error:
            figures["errors"].append(f"{name}: {error}")
    figures["seconds"] = round(time.monotonic() - started, 1)
    return figures


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for figures in results:
        for name in ("prefill", "decode"):
            rates = figures.get(f"{name}_tokens_per_second", {})
            cells = "  ".join(f"{key}: {rate:,.0f}" for key, rate in rates.items())
            lines.append(f"{figures['model'][:34]:34}  {name:7}  {cells}")
        lines += [f"  {error}" for error in figures["errors"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--bin", type=Path, required=True, help="folder of llama-bench and llama-batched-bench")
    parser.add_argument("--prefill", default="512,4096", help="prompt lengths in tokens")
    parser.add_argument("--streams", default="1,8,32,96", help="sequences that decode at once")
    parser.add_argument("--context", type=int, default=128, help="tokens that each sequence holds before it decodes")
    parser.add_argument("--new", type=int, default=64, help="tokens that each sequence decodes")
    parser.add_argument("--ubatch", default="512,2048", help="micro-batches to try for prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=120, help="for each of a model's two programs")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    results = [measure(model, args) for model in args.models]
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return int(any(figures["errors"] for figures in results))


if __name__ == "__main__":
    sys.exit(main())
