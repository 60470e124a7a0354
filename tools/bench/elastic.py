#!/usr/bin/env python3
"""The table of the elastic loop: rates under every policy and residency, by memory budget and number of streams.

    python tools/bench/elastic.py MODEL --memory 14GB,8GB,24GB --streams 96,32,8,1 --output elastic.json
    python tools/bench/elastic.py MODEL --memory 14GB --ablate --output ablation.json
    python tools/bench/elastic.py MODEL --memory 14GB --routing synthetic ...
    python tools/bench/elastic.py --table elastic.json ablation.json
    python tools/bench/elastic.py --merge all.json elastic.json synthetic.json

For each budget the model is loaded once for policies `paper` and `cost`, which are changed while it is loaded (as the
residency is), and once for each of `static` (all experts resident; it refuses to start where they do not fit) and
`fixed`. The residencies are compared under the first policy (at the budgets of --compare-at); the others have the first
residency, and where nothing was brought over the link, no second residency is measured. A cell:

    streams come together with prompts of 118 random tokens    -> time to first token, of each that is let in (a policy
                                                                  may let others wait: see `started`)
    then they decode at temperature 1: --warm seconds that are not counted, --seconds that are, without a stop between
                                                               -> tokens per second of all, per token, hit rate, link

Every row begins with the same streams of the routing, where one is put in place of the model's. Before its cells: a
prompt of 118 tokens alone, and one of 2,048. The cells of a row follow each other with the most streams first, so that
a hot set has seen the most when few streams ask.
The JSON is written after every row; --limit-seconds ends the run early with what there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru import LLM, SamplingParams
from rimuru.base.errors import BadInputError, NotEnoughMemoryError, RimuruError
from rimuru.commands.bench import counters, routing_label, use_routing
from rimuru.engine.room import ExpertRoom
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.replay import RoutingReplay
from rimuru.request import Sequence
from tools.bench.elastic_table import markdown, merged, row_line, table_of_files

ELASTIC = ("paper", "cost")
SWITCHES = ("fill_on_read", "prefetch", "in_place")
LONG_PROMPT = 2048


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration of an engine: what a row of the table is about."""

    memory: str
    policy: str
    residency: str
    off: str = ""
    """A switch that is turned off (ablation)."""

    @property
    def loads_alike(self) -> tuple[str, str, str]:
        """Settings with the same value can be had by changing a loaded engine."""
        return self.memory, "elastic" if self.policy in ELASTIC else self.policy, self.off


class Streams:
    """So many requests that decode at once; whoever ends is followed by another one."""

    def __init__(self, llm: LLM, n_streams: int, n_prompt: int, rng: np.random.Generator) -> None:
        self.engine, self.n_prompt, self.rng = llm.loaded.engine, n_prompt, rng
        most = llm.context_length - n_prompt - 1
        self.params = SamplingParams(max_tokens=most, temperature=1.0, ignore_eos=True)
        self.started = time.perf_counter()
        self.first_s: dict[int, float] = {}
        self.n_ended_tokens = 0
        self.running = [self._start() for _ in range(n_streams)]
        self._first = {sequence.seq_id for sequence in self.running}

    def _start(self) -> Sequence:
        prompt = self.rng.integers(0, self.engine.n_vocab, self.n_prompt).tolist()
        return self.engine.add(prompt, self.params)

    def step(self) -> None:
        """One step of the engine; raises the error of a request that failed."""
        report = self.engine.step()
        now = time.perf_counter()
        for sequence in report.advanced:
            if sequence.seq_id in self._first and sequence.seq_id not in self.first_s:
                self.first_s[sequence.seq_id] = now - self.started
        for sequence in report.ended:
            if sequence.error is not None:
                raise sequence.error
            self.n_ended_tokens += sequence.n_output
            self.running[self.running.index(sequence)] = self._start()

    @property
    def n_tokens(self) -> int:
        """Tokens of answers so far."""
        return self.n_ended_tokens + sum(sequence.n_output for sequence in self.running)

    def run(self, seconds: float) -> tuple[int, float, int]:
        """Step for so long: (tokens, seconds, steps)."""
        before, started, n_steps = self.n_tokens, time.perf_counter(), 0
        while n_steps < 2 or time.perf_counter() - started < seconds:
            self.step()
            n_steps += 1
        return self.n_tokens - before, time.perf_counter() - started, n_steps

    def end(self) -> None:
        """Cancel everything, and let the engine become idle."""
        for sequence in self.running:
            self.engine.abort(sequence)
        while self.engine.has_work:
            self.engine.step()


def use(llm: LLM, setting: Setting) -> None:
    """Change a loaded engine to a setting that loads alike."""
    loaded = llm.loaded
    assert loaded.store is not None
    loaded.store.residency.policy = setting.residency  # type: ignore[assignment]
    if isinstance(loaded.room, ExpertRoom):
        loaded.room.policy = setting.policy  # type: ignore[assignment]


def measure_prompts(llm: LLM, n_prompt: int, rng: np.random.Generator) -> dict[str, float]:
    """A prompt alone on a warm engine: milliseconds to its first token; tokens per second of a long one."""

    def first_token_s(n_tokens: int) -> float:
        engine = llm.loaded.engine
        prompt = rng.integers(0, engine.n_vocab, n_tokens).tolist()
        started = time.perf_counter()
        engine.run_until([engine.add(prompt, SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True))])
        return time.perf_counter() - started

    long_prompt = min(LONG_PROMPT, llm.context_length - 2)
    first_token_s(n_prompt), first_token_s(long_prompt)
    alone_s = statistics.median(first_token_s(n_prompt) for _ in range(5))
    long_s = statistics.median(first_token_s(long_prompt) for _ in range(3))
    return {"first_token_alone_ms": 1e3 * alone_s, f"prefill_{long_prompt}_tokens_per_s": long_prompt / long_s}


def measure_streams(llm: LLM, n_streams: int, args: argparse.Namespace, rng: np.random.Generator) -> dict[str, Any]:
    """One cell."""
    streams = Streams(llm, n_streams, args.prompt, rng)
    decisions = llm.loaded.room.decisions if isinstance(llm.loaded.room, ExpertRoom) else None
    try:
        limit = time.perf_counter() + args.start_seconds
        while len(streams.first_s) < n_streams and time.perf_counter() < limit:
            streams.step()
        streams.run(args.warm)
        asked, hits, n_bytes = counters(llm)
        moves = dict(decisions.counts) if decisions is not None else {}
        n_preempted = llm.loaded.engine.scheduler.n_preemptions
        n_tokens, seconds, n_steps = streams.run(args.seconds)
        asked_after, hits_after, n_bytes_after = counters(llm)
        n_resident = sum(llm.memory()["resident_experts"])
    finally:
        streams.end()
    firsts = np.array(list(streams.first_s.values())) * 1e3
    return {
        "streams": n_streams,
        "started": len(streams.first_s),
        "tokens_per_s": n_tokens / seconds,
        "per_token_ms": 1e3 * seconds * len(streams.first_s) / max(n_tokens, 1),
        "first_token_ms": {"mean": float(firsts.mean()), "p50": float(np.median(firsts)), "max": float(firsts.max())},
        "hit_rate": (hits_after - hits) / (asked_after - asked) if asked_after > asked else None,
        "bytes_over_link_per_token": (n_bytes_after - n_bytes) / max(n_tokens, 1),
        "resident_experts": n_resident,
        "preemptions": llm.loaded.engine.scheduler.n_preemptions - n_preempted,
        "moves": {name: decisions.counts[name] - n for name, n in moves.items()} if decisions is not None else {},
        "steps": n_steps,
        "seconds": seconds,
    }


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """All rows, those that load alike next to each other."""
    found = []
    for memory in args.memory:
        if args.ablate:
            found += ablations(memory, args)
            continue
        for policy in args.policies:
            compares = policy == args.policies[0] and memory in (args.compare_at or args.memory)
            residencies = args.residency if compares else args.residency[:1]
            residencies = ["auto"] if policy == "static" else residencies
            found += [Setting(memory, policy, residency) for residency in residencies]
    return found


def ablations(memory: str, args: argparse.Namespace) -> list[Setting]:
    """The first of the policies and residencies, and the same with one thing changed at a time."""
    policy, residency = args.policies[0], args.residency[0]
    base = Setting(memory, policy, residency)
    others = [Setting(memory, policy, other) for other in ("hotset", "recency") if other != residency]
    switched = [dataclasses.replace(base, off=name) for name in SWITCHES]
    return [base, *others, Setting(memory, "fixed", residency), *switched]


def open_engine(args: argparse.Namespace, setting: Setting, replay: RoutingReplay | None) -> LLM:
    """Load the model for a setting and put the routing in place: that of `replay`, where it has been made already."""
    more: dict[str, Any] = {setting.off: False} if setting.off else {}
    llm = LLM(
        args.model, device=args.device, memory=setting.memory, ram=args.ram, threads=args.threads, context=args.ctx,
        policy=setting.policy, residency=setting.residency, max_sequences=max(args.streams), prefix_cache=False,
        seed=args.seed, **more,
    )  # fmt: skip
    if replay is not None:
        llm.loaded.engine.replay = replay
        return llm
    try:
        n_tokens = args.prompt + 512
        use_routing(llm, args.routing, args.router, args.topics, max(args.streams) // 2, n_tokens, args.seed)
    except BaseException:
        llm.close()
        raise
    return llm


def changes_nothing(llm: LLM, off: str, plain: type | None) -> bool:
    """Whether an engine with a switch turned off runs as the one with all on, whose store is a `plain` one. Only a
    device's own store brings experts ahead of a prompt's layers; without reading in place it may become another one."""
    if off == "prefetch":
        return not isinstance(llm.loaded.store, DeviceExpertStore)
    return off == "in_place" and type(llm.loaded.store) is plain


def checked_out() -> str:
    """The commit of this checkout; "" where it is none."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).resolve().parent
    try:
        return subprocess.run(git, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def card_of(llm: LLM) -> str:
    """What the model runs on."""
    if llm.loaded.resolved.device != "cuda":
        return "CPU"
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


class Table:
    """Rows as they are measured, written after each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path = args.output
        kept = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key not in ("table", "merge")
        }
        self.values: dict[str, Any] = {
            "model": Path(args.model).name,
            "card": "",
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": args.commit or checked_out(),
            "settings": kept,
            "loads": [],
            "rows": [],
            "left_out": [],
        }

    def add(self, row: dict[str, Any]) -> None:
        self.values["rows"].append(row)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            Path(self.path).write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")

    def nothing_moved(self, setting: Setting) -> bool:
        """Whether a row of the same budget and policy has shown that all experts stay: who leaves is no question."""
        return any(
            row["cells"]
            and (row["memory"], row["policy"], row["off"]) == (setting.memory, setting.policy, setting.off)
            and all(cell["bytes_over_link_per_token"] == 0 for cell in row["cells"])
            for row in self.values["rows"]
        )

    def leave_out(self, setting: Setting, why: str) -> None:
        what = f"no {setting.off}" if setting.off else f"{setting.policy}, {setting.residency}"
        self.values["left_out"].append(f"{setting.memory}, {what}: {why}")


def measure_row(llm: LLM, setting: Setting, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """All cells of a configuration; what went wrong is in `error`."""
    row: dict[str, Any] = {**dataclasses.asdict(setting), "routing": routing_label(llm), "cells": []}
    rng = np.random.default_rng(args.seed)
    engine = llm.loaded.engine
    try:
        use(llm, setting)
        if engine.replay is not None:  # the same streams for every row
            engine.replay = engine.replay.restarted()
        row["prompts"] = measure_prompts(llm, args.prompt, rng)
        for n_streams in sorted(args.streams, reverse=True):
            if time.monotonic() > deadline:
                row["error"] = "out of time"
                break
            row["cells"].append(measure_streams(llm, n_streams, args, rng))
            engine.audit()
    except Exception as error:  # the other rows are wanted all the same
        row["error"] = f"{type(error).__name__}: {error}"
    report = llm.memory()
    row["forecasts"] = report.get("forecasts", {}).get("by_way", {})  # of steps, since the model was loaded
    row["memory_report"] = {k: v for k, v in report.items() if k.endswith("_bytes")}
    return row


def run(args: argparse.Namespace) -> Table:
    """Every row, loading anew where a setting needs it, or where the last one failed."""
    table, deadline = Table(args), time.monotonic() + args.limit_seconds
    llm: LLM | None = None
    replay: RoutingReplay | None = None
    loaded_for: tuple[str, str, str] | None = None
    plain: dict[str, type] = {}
    try:
        for setting in settings_of(args):
            if time.monotonic() > deadline:
                table.leave_out(setting, "out of time")
                continue
            if not setting.off and table.nothing_moved(setting):
                table.leave_out(setting, "as the row before, whose experts all stay in the pool")
                continue
            if llm is not None and loaded_for != setting.loads_alike:
                llm.close()
                llm = None
            if llm is None:
                try:
                    llm, loaded_for = open_engine(args, setting, replay), setting.loads_alike
                except RimuruError as error:
                    if not isinstance(error, (NotEnoughMemoryError, BadInputError)):
                        raise
                    table.add({**dataclasses.asdict(setting), "cells": [], "error": str(error)})
                    continue
                replay, table.values["card"] = llm.loaded.engine.replay, card_of(llm)
                table.values["loads"].append({"for": list(loaded_for), "seconds": llm.loaded.load_s})
            if not setting.off:
                plain[setting.memory] = type(llm.loaded.store)
            elif changes_nothing(llm, setting.off, plain.get(setting.memory)):
                table.leave_out(setting, "changes nothing here")
                continue
            row = measure_row(llm, setting, args, deadline)
            table.add(row)
            print(row_line(row, sorted(args.streams)), file=sys.stderr, flush=True)
            if "error" in row and row["error"] != "out of time":
                llm.close()
                llm = None
    finally:
        if llm is not None:
            llm.close()
        table.write()
    return table


def names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in names(text)]


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of every benchmark that opens engines with `open_engine`, and writes a JSON."""
    parser.add_argument("--router", default="auto", metavar="NAME")
    parser.add_argument("--topics", type=int, metavar="N")
    parser.add_argument("--limit-seconds", type=float, default=540.0, metavar="S", help="begin nothing after so long")
    parser.add_argument("--ctx", type=int, default=4096, metavar="N")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ram", metavar="SIZE")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--commit", default="", metavar="ID", help="of what is measured, where this is no git checkout")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="only print the Markdown of such JSON")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="only write the first file, from those after it: of one model",
    )
    parser.add_argument("--memory", type=names, default=["14GB", "24GB", "8GB"], metavar="SIZE,SIZE")
    parser.add_argument("--streams", type=numbers, default=[96, 32, 8, 1], metavar="N,N")
    parser.add_argument("--policies", type=names, default=["cost", "paper", "fixed", "static"], metavar="NAME,NAME")
    parser.add_argument("--residency", type=names, default=["auto", "hotset", "recency"], metavar="NAME,NAME")
    parser.add_argument("--compare-at", type=names, metavar="SIZE,SIZE", help="where residencies are compared")
    parser.add_argument("--ablate", action="store_true", help="one change at a time to the first policy and residency")
    parser.add_argument("--routing", default="model", metavar="model|synthetic|FILE")
    parser.add_argument("--prompt", type=int, default=118, metavar="N", help="tokens of a prompt")
    parser.add_argument("--start-seconds", type=float, default=6.0, metavar="S", help="longest wait for first tokens")
    parser.add_argument("--warm", type=float, default=1.5, metavar="S", help="seconds of decoding before a cell counts")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="seconds of decoding of a cell")
    add_run_options(parser)
    args = parser.parse_args(arguments)
    if sum(what is not None for what in (args.model, args.table, args.merge)) != 1:
        parser.error("give a model to measure, or --table or --merge and files")
    if args.merge and len(args.merge) < 2:
        parser.error("--merge takes the file to write and those to read")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.merge:
            text = json.dumps(merged(args.merge[1:]), indent=1) + "\n"
            args.merge[0].write_text(text, encoding="utf-8")
        if args.table or args.merge:
            print(table_of_files(args.table or args.merge[:1]))
            return 0
    except BadInputError as error:
        print(f"elastic.py: {error}", file=sys.stderr)
        return 2
    table = run(args)
    print("\n".join(markdown([table.values])))
    return 0 if any(row["cells"] for row in table.values["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
