"""The dashboard's data: the pool as a picture, the rates, and what changed lately."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.units import counted, human_bytes
from rimuru.engine.build import LoadedModel
from rimuru.memory.decisions import DecisionLog, FillLog, Record
from rimuru.memory.page_pool import BUFFER_OWNER
from rimuru.memory.specs import PageKind
from rimuru.server.loop import EngineLoop

STATIC = Path(__file__).parent / "static"
MAX_CELLS = 1536
"""More huge pages than this share cells, side by side."""
OBSERVE_S = 0.5
RUN_STEPS = 32
"""Decisions of one kind that lie no further apart, with no other in between, are one line."""
FILL_PAUSE_S = 10.0
"""Experts that steps brought in are one line until there were none for so long; of such lines MOST_FILL_LINES."""
MOST_FILL_LINES = 4
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?: (?:expert|page|request)s?)?(?: is| are)?")
_EXPERT, _BUFFER, _SHARED, _SSM, _CONV, _REQUEST = range(6)
_CLASS_BITS = 40


def memory_report(loaded: LoadedModel) -> dict[str, Any]:
    """loaded.memory_report() with the prefix cache's share. In the engine's thread."""
    return {**loaded.memory_report(), "cached_pages": int(loaded.engine.cache.cached_pages)}


class ChangeLog:
    """The adjuster's decisions as people read them, with the time, and what else changed the pool lately."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.entries: deque[dict[str, Any]] = deque(maxlen=40)
        self._run: _Run | None = None
        """What the newest entry tells of, where it is decisions."""
        self._seen: dict[str, int] | None = None
        self._n_decisions = 0
        self._fill_runs: deque[_FillRun] = deque(maxlen=MOST_FILL_LINES)
        """The newest first."""
        self._fills: FillLog | None = None
        self._seen_fills = (np.zeros(0, np.int64), 0, 0)
        self._next = 0.0

    def observe(self) -> None:
        """Note what is new since the last call; cheap, and at most every OBSERVE_S. In the engine's thread."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + OBSERVE_S
        decisions = self.loaded.room.decisions
        self._take_decisions(decisions)
        self._take_fills(decisions.fills)
        current = {
            "huge": self.loaded.pool.allocator.n_huge,
            "preempted": self.loaded.engine.scheduler.n_preemptions,
            "moved": self.loaded.engine.cache.swap.n_saved,
        }
        before, self._seen = self._seen, current
        if before is not None:
            self._compare(before, current)

    def _take_decisions(self, decisions: DecisionLog) -> None:
        new = decisions.records(decisions.n - self._n_decisions)
        self._n_decisions = decisions.n
        for (action, reason), group in itertools.groupby(new, key=lambda record: (record.action, record.reason)):
            self._decided(_Run.of(action, reason, list(group)))

    def _take_fills(self, fills: FillLog) -> None:
        """Fills come by the thousand: they are told by their number, in lines of their own."""
        if self._fills is not fills:
            self._fills, self._seen_fills = fills, (np.zeros_like(fills.per_layer), 0, 0)
            self._fill_runs.clear()
        per_layer, n_foretold, n_lost = self._seen_fills
        self._seen_fills = fills.per_layer.copy(), fills.n_foretold, fills.n_lost
        newest = "".join(f"expert {r.expert} of layer {r.layer}, {r.reason}" for r in fills.records(1))
        n_new = fills.n_foretold - n_foretold, fills.n_lost - n_lost
        run = _FillRun(time.time(), fills.per_layer - per_layer, *n_new, newest)
        if not run.n:
            return
        if self._fill_runs and run.time - self._fill_runs[0].time < FILL_PAUSE_S:
            run.join(self._fill_runs.popleft())
        self._fill_runs.appendleft(run)

    def newest_first(self) -> list[dict[str, Any]]:
        """All entries, and those of fills among them."""
        fills = [
            {"time": run.time, "text": run.text(self._fills)} for run in self._fill_runs if self._fills is not None
        ]
        return sorted([*fills, *self.entries], key=lambda entry: entry["time"], reverse=True)

    def _decided(self, new: _Run) -> None:
        """One entry, or more of the newest one."""
        if self._run is not None and self._run.goes_on_with(new):
            self.entries.popleft()
            new = self._run.joined(new)
        self.add(new.text())
        self._run = new

    def _compare(self, before: dict[str, int], after: dict[str, int]) -> None:
        if after["huge"] != before["huge"]:
            size = human_bytes(after["huge"] * self.loaded.layout.huge_bytes)
            self.add(f"the pool went from {before['huge']} to {after['huge']} huge pages ({size})")
        n_preempted, n_moved = (after[name] - before[name] for name in ("preempted", "moved"))
        if n_preempted > 0:
            self._gave_way(n_preempted, n_moved)

    def _gave_way(self, n_preempted: int, n_moved: int) -> None:
        """One entry for all that happens without anything else in between."""
        if self.entries and "gave_way" in self.entries[0]:
            before = self.entries.popleft()["gave_way"]
            n_preempted, n_moved = n_preempted + before[0], n_moved + before[1]
        place = f", {n_moved} of them into host memory" if n_moved else ""
        self.add(f"{counted(n_preempted, 'answer')} gave way to others{place}", gave_way=(n_preempted, n_moved))

    def add(self, text: str, **more: Any) -> None:
        self._run = None
        self.entries.appendleft({"time": time.time(), "text": text, **more})


@dataclass(frozen=True)
class _Run:
    """Decisions of one kind that follow each other; the reason is the last one's."""

    action: str
    reason: str
    n_times: int
    last_step: int
    n_experts: int
    """Pages, where pages moved."""
    n_bytes: int
    layers: tuple[int, int]
    """The first and the last."""

    @classmethod
    def of(cls, action: str, reason: str, records: list[Record]) -> _Run:
        """Records of decisions that were taken together."""
        layers = [record.layer for record in records]
        n_bytes = sum(record.bytes for record in records)
        n = sum(record.pages for record in records) if action == "move" else len(records)
        return cls(action, reason, 1, records[-1].step, n, n_bytes, (min(layers), max(layers)))

    def goes_on_with(self, later: _Run) -> bool:
        is_alike = self.action == later.action and _shape(self.reason) == _shape(later.reason)
        return is_alike and later.last_step - self.last_step <= RUN_STEPS

    def joined(self, later: _Run) -> _Run:
        layers = min(self.layers[0], later.layers[0]), max(self.layers[1], later.layers[1])
        n_experts, n_bytes = self.n_experts + later.n_experts, self.n_bytes + later.n_bytes
        n_times = self.n_times + later.n_times
        return _Run(later.action, later.reason, n_times, later.last_step, n_experts, n_bytes, layers)

    def text(self) -> str:
        first, last = self.layers
        is_one = self.n_times == 1
        if self.action == "refuse":
            return f"kept the experts{'' if is_one else f' {self.n_times} times, last'}: {self.reason}"
        if self.action == "move":
            what = f"moved {counted(self.n_experts, 'page')} within the pool ({human_bytes(self.n_bytes)})"
            return f"{what}{'' if is_one else f' in {self.n_times} goes, last'}: {self.reason}"
        of = f"layer {first}" if first == last else f"layers {first} to {last}"
        done = "gave up" if self.action == "shrink" else "brought in"
        what = f"{done} {counted(self.n_experts, 'expert')} of {of} ({human_bytes(self.n_bytes)})"
        return f"{what}{'' if is_one else f' in {self.n_times} goes, last'}: {self.reason}"


@dataclass
class _FillRun:
    """Fills without a pause between them."""

    time: float
    """Of the last ones."""
    per_layer: np.ndarray
    n_foretold: int
    n_lost: int
    last: str
    """What is known of the last one."""

    @property
    def n(self) -> int:
        return int(self.per_layer.sum()) + self.n_lost

    def join(self, earlier: _FillRun) -> None:
        self.per_layer = self.per_layer + earlier.per_layer
        self.n_foretold += earlier.n_foretold
        self.n_lost += earlier.n_lost

    def text(self, fills: FillLog) -> str:
        slots = np.flatnonzero(self.per_layer)
        n_bytes = human_bytes(int(self.per_layer @ fills.expert_bytes))
        of = ""
        if len(slots):
            first, last = fills.layer_number(int(slots[0])), fills.layer_number(int(slots[-1]))
            of = f" of layer {first}" if first == last else f" of layers {first} to {last}"
        foretold = f", {self.n_foretold} of them foretold" if self.n_foretold else ""
        lost = f"; of {self.n_lost} of them nothing more is known" if self.n_lost else ""
        return f"steps brought in {counted(self.n, 'expert')}{of} ({n_bytes}{foretold}), last: {self.last}{lost}"


def _shape(reason: str) -> str:
    """What reasons have in common that differ in numbers only."""
    return _NUMBER.sub("#", reason)


def snapshot(loop: EngineLoop, changes: ChangeLog, name: str) -> dict[str, Any]:
    """Everything that the page shows. In the engine's thread, between two steps."""
    loaded, engine, counters = loop.loaded, loop.engine, loop.counters
    report = memory_report(loaded)
    changes.observe()
    return {
        "model": name,
        "architecture": loaded.config.architecture,
        "device": loaded.resolved.device,
        "context": engine.context_length,
        "draining": loop.is_draining,
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "tokens_per_second": round(loop.tokens_per_second(), 2),
        "output_tokens": counters.n_output_tokens,
        "prompt_tokens": counters.n_prompt_tokens,
        "cached_tokens": counters.n_cached_tokens,
        "requests": {
            outcome: getattr(counters, f"n_jobs_{outcome}") for outcome in ("done", "failed", "cancelled", "refused")
        },
        "hit_rate": report.get("hit_rate"),
        "read_bytes": report.get("read_bytes", 0),
        "memory": report,
        "pool": pool_picture(loaded),
        "changes": changes.newest_first(),
    }


def pool_picture(loaded: LoadedModel) -> dict[str, Any]:
    """The pool's cells in address order, each a list of [owner, share of the cell] in address order; the rest is free.

    Owners: `e3` experts of layer 3, `buffer`, `r17` request 17, `prefix` (KV that waits for reuse), `ssm`, `conv`.
    """
    allocator, layout = loaded.pool.allocator, loaded.layout
    n_huge = allocator.n_huge
    per_cell = max(1, -(-n_huge // MAX_CELLS))
    n_cells = -(-n_huge // per_cell)
    cells: list[list[list[Any]]] = [[] for _ in range(n_cells)]
    cell_bytes = per_cell * layout.huge_bytes
    starts, classes, n_bytes = _live_pages(loaded)
    if starts.size:
        keys = (starts // cell_bytes) << _CLASS_BITS | classes
        unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        totals = np.bincount(inverse.ravel(), weights=n_bytes)
        for i in np.argsort(starts[first], kind="stable").tolist():
            cell, code = int(unique[i]) >> _CLASS_BITS, int(unique[i]) & ((1 << _CLASS_BITS) - 1)
            cells[cell].append([_owner_name(code), round(float(totals[i]) / cell_bytes, 4)])
    return {"huge_bytes": layout.huge_bytes, "n_huge": n_huge, "huge_per_cell": per_cell, "cells": cells}


def _owner_name(code: int) -> str:
    kind, number = code >> 32, code & 0xFFFFFFFF
    return (f"e{number}", "buffer", "prefix", "ssm", "conv", f"r{number}")[kind]


def _live_pages(loaded: LoadedModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every allocated id: its first byte in the pool, its owner's code (class << 32 | number), its bytes."""
    allocator = loaded.pool.allocator
    of_request = _pages_of_requests(loaded)
    starts, classes, sizes = [], [], []
    for kind, ids in allocator.live_pages(np.arange(allocator.n_huge)).items():
        if not ids.size:
            continue
        starts.append(ids.astype(np.int64) * loaded.layout.page_bytes(kind))
        sizes.append(np.full(ids.size, allocator.unit_bytes(kind), np.float64))
        classes.append(_codes(loaded, kind, ids, of_request))
    if not starts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    return np.concatenate(starts), np.concatenate(classes), np.concatenate(sizes)


def _codes(
    loaded: LoadedModel, kind: PageKind, ids: np.ndarray, of_request: dict[PageKind, tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    if kind == "expert":
        owners = loaded.pool.allocator.owners(kind, ids).astype(np.int64)
        codes = np.full(ids.size, _BUFFER << 32, np.int64)
        if loaded.store is not None:
            experts = owners >= 0
            rows = np.asarray(loaded.store.view.rows_before)
            slots = np.searchsorted(rows, owners[experts], side="right") - 1
            layers = np.array([layer.layer for layer in loaded.store.layout.layers], np.int64)
            codes[experts] = _EXPERT << 32 | layers[slots]
        codes[(owners < 0) & (owners != BUFFER_OWNER)] = _SHARED << 32
        return codes
    codes = np.full(ids.size, {"ssm": _SSM, "conv": _CONV}.get(kind, _SHARED) << 32, np.int64)
    pages, numbers = of_request.get(kind, (np.empty(0, np.int64), np.empty(0, np.int64)))
    if pages.size:
        at = np.minimum(np.searchsorted(pages, ids), pages.size - 1)
        held = pages[at] == ids
        codes[held] = _REQUEST << 32 | numbers[at[held]]
    return codes


def _pages_of_requests(loaded: LoadedModel) -> dict[PageKind, tuple[np.ndarray, np.ndarray]]:
    """Per kind: page ids that open sequences use, ascending, and the number of the sequence that uses each."""
    engine, layout = loaded.engine, loaded.layout
    seq_ids = [int(request["id"]) for request in engine.cache.requests()]
    n_groups = 0 if layout.kv is None else len(layout.kv.groups)
    n_columns = max(1, engine.cache.max_blocks(seq_ids))
    kv = np.full((n_groups, len(seq_ids), n_columns), -1, np.int32)
    ssm = np.full((len(seq_ids), 0 if layout.ssm is None else len(layout.ssm.layers)), -1, np.int32)
    conv = np.full((len(seq_ids), 0 if layout.conv is None else len(layout.conv.layers)), -1, np.int32)
    if seq_ids:
        engine.cache.fill_batch(seq_ids, kv, ssm, conv, np.zeros(len(seq_ids), np.bool_))
    numbers = np.array(seq_ids, np.int64)
    found: dict[PageKind, tuple[np.ndarray, np.ndarray]] = {}
    tables: tuple[tuple[PageKind, np.ndarray], ...] = (("kv", kv.transpose(1, 0, 2)), ("ssm", ssm), ("conv", conv))
    for kind, table in tables:
        flat = table.reshape(len(seq_ids), -1).ravel().astype(np.int64) if seq_ids else np.empty(0, np.int64)
        owners = np.repeat(numbers, flat.size // max(1, len(seq_ids)))
        ids, first = np.unique(flat, return_index=True)
        real = ids >= 0
        found[kind] = (ids[real], owners[first[real]])
    return found
