"""Shared by the subcommands: loading with progress, the summary of what fits where, JSON output."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rimuru.base.errors import BadInputError
from rimuru.base.units import human_bytes
from rimuru.commands.forecast import after_loading
from rimuru.config import EngineConfig
from rimuru.llm import LLM

log = logging.getLogger(__name__)

FIRST_LINE_S, NEXT_LINES_S = 2.0, 10.0
"""Where stderr is a file or a pipe: loading that takes longer than this says what it does, and then every so often."""


class LoadLines:
    """Progress as lines, written by a thread: some stages (compiling) say nothing before they are over."""

    def __init__(self) -> None:
        self._now = ("", 0, 0)
        self._is_over = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._write, name="rimuru-progress", daemon=True)
        self._thread.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._now = (stage, done, total)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _write(self) -> None:
        wait_s = FIRST_LINE_S
        while not self._is_over.wait(wait_s):
            with contextlib.suppress(OSError):  # whoever read it has gone
                note(self.line())
            wait_s = NEXT_LINES_S

    def line(self) -> str:
        stage, done, total = self._now
        if stage == "kernels":
            part = f" ({done} of {total})" if total > 1 else ""
            what = f"compiling kernels{part}, which the first run on a machine does"
        elif stage:
            what = f"{stage}, {human_bytes(done)} of {human_bytes(total)}"
        else:
            what = "opening the model"
        return f"loading: {what}; {time.monotonic() - self._started:.0f} s so far"


class LoadBars:
    """One progress bar per stage of loading, on stderr; lines where it is no terminal, nothing where quiet is asked."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._lines = None if quiet or sys.stderr.isatty() else LoadLines()
        self._bar: Any = None
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._lines is not None:
            self._lines(stage, done, total)
            return
        if self.quiet:
            return
        if stage != self._stage:
            self.close()
            self._stage = stage
            if stage == "kernels":
                text = "kernels (compiled by the first run on a machine)"
                self._bar = tqdm(total=total, desc=text, bar_format="{desc}: {elapsed}", file=sys.stderr)
            else:
                self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=stage, file=sys.stderr)
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def config_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The LLM keywords that the common options set."""
    return {
        "device": args.device,
        "memory": args.memory,
        "ram": args.ram,
        "swap": args.swap,
        "threads": args.threads,
        "context": args.ctx,
        "kv_type": args.kv_type,
        "policy": args.policy,
        "residency": args.residency,
        "resident_experts": args.resident_experts,
        "expert_offload_limit": args.expert_offload_limit,
        "deterministic": args.deterministic,
        "seed": args.seed or 0,
        "prefetch": args.prefetch,
        "prediction": bool(args.prediction),
        "fill_on_read": args.fill_on_read,
        "in_place": args.in_place,
        "cpu_experts": args.cpu_experts,
    }


def seed_of(args: argparse.Namespace) -> int:
    """--seed for generators, which take no negative numbers, as the engine maps it: any whole number is one."""
    return (args.seed or 0) % (1 << 64)


def checked_config(args: argparse.Namespace) -> EngineConfig:
    """What the common options ask for. Raises BadInputError for values that no model could be loaded with."""
    return EngineConfig(**{k: v for k, v in config_keywords(args).items() if k in _CONFIG_FIELDS})


def warn_of_idle(given: Mapping[str, bool], where: str) -> None:
    """Options that were given and change nothing: one warning names them all."""
    if idle := [name for name, is_given in given.items() if is_given]:
        log.warning("%s: no effect %s", ", ".join(idle), where)


def _options_of_cuda(config: EngineConfig) -> dict[str, bool]:
    """Options that change nothing on a CPU, and whether they were given."""
    return {
        "--no-prefetch": not config.prefetch,
        "--no-in-place": not config.in_place,
        "--prediction": config.prediction,
        "--cpu-experts": config.cpu_experts,
    }


def warn_of_fixed(config: EngineConfig) -> None:
    """Name what was given and changes nothing because the number of resident experts is fixed."""
    if config.resident_experts is not None or config.policy in ("fixed", "static"):
        given = {
            "--policy paper": config.policy == "paper",
            "--expert-offload-limit": config.expert_offload_limit is not None,
        }
        warn_of_idle(given, "where the number of resident experts is fixed")


def open_llm(args: argparse.Namespace, check: Callable[[LLM], object] | None = None, **more: Any) -> LLM:
    """Load the model of the command line, with progress and a summary on stderr.

    `check` may refuse what the user wants of this model; it runs before the summary, so that a refusal is one line.
    """
    config = checked_config(args)
    bars = LoadBars(args.quiet)
    try:
        llm = LLM(args.model, progress=bars, **{**config_keywords(args), **more})
    finally:
        bars.close()
    try:
        warn_of_fixed(config)
        if llm.loaded.resolved.device == "cpu":
            warn_of_idle(_options_of_cuda(config), "on the CPU")
        if check is not None:
            check(llm)
    except BaseException:
        llm.close()
        raise
    if not args.quiet:
        note(summary(llm))
        note(after_loading(llm))
    return llm


_CONFIG_FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


def summary(llm: LLM) -> str:
    """Two lines: what was loaded, and where it lies."""
    loaded = llm.loaded
    model, layout = loaded.config, loaded.layout
    lines = [
        f"{model.name or loaded.gguf.path.name}: {model.architecture}, {len(model.layers)} layers, context "
        f"{loaded.engine.context_length} tokens, on {loaded.resolved.device} ({loaded.resolved.threads} threads), "
        f"loaded in {loaded.load_s:.1f} s"
    ]
    report = loaded.memory_report()
    parts = [f"weights {human_bytes(loaded.dense_bytes)}", f"scratch {human_bytes(loaded.scratch_bytes)}"]
    parts.append(f"pool {human_bytes(report['pool_bytes'])}")
    if layout.expert is not None:
        parts.append(f"{sum(report['resident_experts'])} of {layout.expert.n_experts} experts resident")
    lines.append("memory: " + ", ".join(parts))
    lines += loaded.notes
    return "\n".join(lines)


def note(text: str) -> None:
    """A line for people: stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, ensure_ascii=False))


def read_text(path: str) -> str:
    """A UTF-8 text file. Raises BadInputError in one line."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInputError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from None
