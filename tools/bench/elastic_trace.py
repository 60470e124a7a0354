#!/usr/bin/env python3
"""A trace of requests through a loaded engine, with one switch of the elastic loop changed at a time.

    python tools/bench/elastic_trace.py MODEL --memory 14GB --trace azure_conv.csv --requests 32 --stretch 0.2 \
        --output trace.json
    python tools/bench/simulate_trace.py trace.json --shape qwen3-30b-a3b --card h200   # the same, foretold, beside it

Requests arrive when the trace says, times multiplied by --stretch (a trace without times: all at once, or --rate a
second), with prompts of random tokens of the trace's lengths; answers are sampled at temperature 1 and end at the
trace's lengths. The experts are chosen by a router like a trained model's (--routing), from the same streams for every
variant. Before each, --warm requests from further down the trace get short answers that are not counted, so that
residency has met such text.

A variant that takes longer than --most-seconds is stopped there and counted up to then: its time is no makespan, its
rate is one. The JSON is written after every variant; --limit-seconds begins nothing after so long.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru import LLM, SamplingParams
from rimuru.base.errors import BadInputError, NotEnoughMemoryError, RimuruError
from rimuru.commands.bench import counters, routing_label
from rimuru.request import Sequence
from rimuru.simulate.traces import TraceRequest, cut_to_context, read_trace
from tools.bench import elastic
from tools.bench.elastic import Setting, add_run_options, names

VARIANTS: dict[str, dict[str, str]] = {
    "all on": {},
    "recency": {"residency": "recency"},
    "hot set": {"residency": "hotset"},
    "not elastic": {"policy": "fixed"},
    "no fill on read": {"off": "fill_on_read"},
    "no prefetch": {"off": "prefetch"},
    "no in place": {"off": "in_place"},
}
"""What is changed, the most telling first; those that load alike follow each other."""
WARM_STEPS = 2
"""By so many tokens each answer of those that are not counted is longer than the one before: steps of every number of
requests up to theirs have run, and graphs of them are there, when counting begins."""


@dataclass(slots=True)
class Life:
    """One request's times, in seconds from the first arrival."""

    request: TraceRequest
    first_s: float | None = None
    last_s: float = 0.0
    n_tokens: int = 0


@dataclass(slots=True)
class Replayed:
    """How a trace went. took_s: to the last token, or to where it was stopped."""

    lives: list[Life] = field(default_factory=list)
    took_s: float = 0.0
    n_steps: int = 0
    peak: int = 0

    def values(self) -> dict[str, Any]:
        """Times as `rimuru simulate` reports them, of those that have had a token."""
        begun = [life for life in self.lives if life.first_s is not None]
        firsts = [(life.first_s or 0.0) - life.request.arrival_s for life in begun]
        steps = [(life.last_s - (life.first_s or 0.0)) / (life.n_tokens - 1) for life in begun if life.n_tokens > 1]
        n_tokens = sum(life.n_tokens for life in self.lives)
        return {
            "answered": sum(life.n_tokens >= life.request.n_output for life in self.lives),
            "makespan_s": self.took_s,
            "output_tokens": n_tokens,
            "output_tokens_per_second": n_tokens / self.took_s if self.took_s else 0.0,
            "ttft_s": summary(firsts),
            "tpot_s": summary(steps),
            "peak_concurrency": self.peak,
            "steps": self.n_steps,
        }


def summary(values: list[float]) -> dict[str, float]:
    """Zeros of none."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    p50, p95 = np.percentile(values, [50, 95])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p95": float(p95)}


def replay(llm: LLM, trace: list[TraceRequest], rng: np.random.Generator, most_s: float) -> Replayed:
    """Answer a trace's requests as they arrive; stop after most_s. Raises the error of a request that failed."""
    engine = llm.loaded.engine
    found, lives = Replayed(), {}
    pending = deque((request, rng.integers(0, engine.n_vocab, request.n_prompt).tolist()) for request in trace)
    running: dict[int, Sequence] = {}
    started = time.perf_counter()
    while pending or engine.has_work:
        now = time.perf_counter() - started
        if now >= most_s:
            break
        while pending and pending[0][0].arrival_s <= now:
            request, prompt = pending.popleft()
            params = SamplingParams(max_tokens=request.n_output, temperature=1.0, ignore_eos=True)
            sequence = engine.add(prompt, params)
            running[sequence.seq_id], lives[sequence.seq_id] = sequence, Life(request)
        if not engine.has_work:
            time.sleep(max(0.0, min(pending[0][0].arrival_s, most_s) - now))
            continue
        report = engine.step()
        now = time.perf_counter() - started
        found.n_steps += 1
        found.peak = max(found.peak, len(engine.scheduler.running) + len(report.ended))
        for sequence in report.advanced:
            life = lives[sequence.seq_id]
            life.first_s = now if life.first_s is None else life.first_s
            life.last_s, life.n_tokens = now, life.n_tokens + 1
            found.took_s = now
        for sequence in report.ended:
            if sequence.error is not None:
                raise sequence.error
            del running[sequence.seq_id]
    if pending or running:
        found.took_s = most_s
    for sequence in running.values():
        engine.abort(sequence)
    while engine.has_work:
        engine.step()
    found.lives = list(lives.values())
    return found


def traces_of(settings: dict[str, Any], folder: Path | None = None) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """(the requests that are not counted, all at once; those that are), as a run's settings say. folder: where the
    trace lies now."""
    path = Path(settings["trace"]) if folder is None else folder / Path(settings["trace"]).name
    n, n_warm = settings["requests"], settings["warm"]
    rows = read_trace(path, n + n_warm, settings["stretch"], settings["rate"], settings["seed"])
    rows, _ = cut_to_context(rows, settings["ctx"])
    if len(rows) < n + n_warm:
        raise BadInputError(f"{path} has {len(rows)} requests, fewer than --requests and --warm together")
    warm = [
        dataclasses.replace(row, arrival_s=0.0, n_output=min(WARM_STEPS * number, settings["ctx"] - row.n_prompt))
        for number, row in enumerate(rows[n:], 1)
    ]
    return warm, rows[:n]


def setting_of(variant: str, args: argparse.Namespace) -> Setting:
    return dataclasses.replace(Setting(args.memory, args.policy, args.residency), **VARIANTS[variant])


def measure(llm: LLM, variant: str, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"variant": variant, **dataclasses.asdict(setting), "routing": routing_label(llm)}
    engine, rng = llm.loaded.engine, np.random.default_rng(args.seed)
    warm, trace = traces_of(vars(args))
    elastic.use(llm, setting)
    if engine.replay is not None:  # the same streams for every variant
        engine.replay = engine.replay.restarted()
    replay(llm, warm, rng, args.most_seconds)
    before, n_preempted = counters(llm), engine.scheduler.n_preemptions
    found = replay(llm, trace, rng, args.most_seconds)
    n_asked, n_hits, n_bytes = (b - a for a, b in zip(before, counters(llm), strict=True))
    engine.audit()
    report = llm.memory()
    return row | {
        "scratch_bytes": report["scratch_bytes"],
        "ways": report.get("ways", {}),  # how missed experts came, since the model was loaded
        "measured": found.values()
        | {
            "hit_rate": n_hits / n_asked if n_asked else 1.0,
            "bytes_moved": n_bytes,
            "preemptions": engine.scheduler.n_preemptions - n_preempted,
            "resident_experts_at_end": sum(report["resident_experts"]),
        },
    }


def row_line(row: dict[str, Any]) -> str:
    """For who waits."""
    v = row["measured"]
    return (
        f"{row['variant']:16} {v['makespan_s']:6.2f} s, {v['answered']} answered, {v['output_tokens_per_second']:6.0f} "
        f"tok/s, first token {v['ttft_s']['mean']:.2f} s, per token {1e3 * v['tpot_s']['mean']:.0f} ms, at most "
        f"{v['peak_concurrency']}, hits {v['hit_rate']:.3f}, {v['bytes_moved'] / 1e9:.0f} GB"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every variant, loading anew where it needs that."""
    deadline = time.monotonic() + args.limit_seconds
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    kept["trace"] = Path(args.trace).name
    now = datetime.datetime.now(datetime.timezone.utc)
    result: dict[str, Any] = {
        "model": Path(args.model).name, "card": "", "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "commit": args.commit or elastic.checked_out(), "settings": kept, "rows": [], "left_out": [],
    }  # fmt: skip
    llm: LLM | None = None
    loaded_for: tuple[str, str, str] | None = None
    made, plain = None, None
    try:
        for variant in args.variants:
            setting = setting_of(variant, args)
            if time.monotonic() > deadline:
                result["left_out"].append(f"{variant}: out of time")
                continue
            if llm is not None and loaded_for != setting.loads_alike:
                llm.close()
                llm = None
            if llm is None:
                try:
                    llm, loaded_for = elastic.open_engine(args, setting, made), setting.loads_alike
                except (NotEnoughMemoryError, BadInputError) as error:
                    result["left_out"].append(f"{variant}: {error}")
                    continue
                made, result["card"] = llm.loaded.engine.replay, elastic.card_of(llm)
            plain = plain if setting.off else type(llm.loaded.store)
            if setting.off and elastic.changes_nothing(llm, setting.off, plain):
                result["left_out"].append(f"{variant}: changes nothing here")
                continue
            try:
                result["rows"].append(row := measure(llm, variant, setting, args))
                print(row_line(row), file=sys.stderr, flush=True)
            except Exception as error:  # the other variants are wanted all the same
                result["left_out"].append(f"{variant}: {type(error).__name__}: {error}")
                llm.close()
                llm = None
            write(result, args.output)
    finally:
        if llm is not None:
            llm.close()
        write(result, args.output)
    return result


def write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", required=True, metavar="SIZE")
    parser.add_argument("--trace", required=True, metavar="FILE")
    parser.add_argument("--requests", type=int, default=32, metavar="N")
    parser.add_argument("--warm", type=int, default=16, metavar="N", help="requests that are not counted")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X")
    parser.add_argument("--rate", type=float, metavar="R", help="arrivals per second, for a trace without times")
    parser.add_argument("--variants", type=names, default=list(VARIANTS), metavar="NAME,NAME")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--residency", default="auto")
    parser.add_argument("--routing", default="synthetic", metavar="model|synthetic|FILE")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a stream of the routing, and 512")
    parser.add_argument("--most-seconds", type=float, default=16.0, metavar="S", help="of a variant")
    add_run_options(parser)
    args = parser.parse_args(arguments)
    args.streams = [args.requests]  # requests at once at most, as elastic.open_engine asks for it
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        traces_of(vars(args))  # what is wrong with it is said before the model is loaded
        result = run(args)
    except RimuruError as error:
        print(f"elastic_trace.py: {error}", file=sys.stderr)
        return 2
    for line in itertools.chain((row_line(row) for row in result["rows"]), result["left_out"]):
        print(line)
    return 0 if result["rows"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
