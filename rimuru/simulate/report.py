"""What a simulation found, as numbers and as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.base.errors import RimuruError
from rimuru.base.extras import install_command
from rimuru.engine.scheduler import Scheduler
from rimuru.memory.decisions import DecisionLog
from rimuru.memory.page_pool import PagePool
from rimuru.plan import StepPlan
from rimuru.request import Sequence
from rimuru.simulate.store import SimulatedStore
from rimuru.simulate.timing import StepTime

MAX_TIMELINE = 400


@dataclass(slots=True)
class Result:
    """Keys as design section 7 names them, and more. Times in seconds."""

    values: dict[str, Any]
    timeline: dict[str, list[float]]
    """Equally long lists: time_s, running, waiting, resident_experts, pages of each kind (expert, kv, ssm, conv), free
    pages in bytes."""

    def as_dict(self, timeline: bool = True) -> dict[str, Any]:
        return self.values | ({"timeline": self.timeline} if timeline else {})


@dataclass(slots=True)
class _Request:
    arrival_s: float
    first_s: float | None = None
    last_s: float = 0.0
    n_tokens: int = 0
    n_wanted: int = 0


class Recorder:
    """Follows a simulation."""

    def __init__(self, pool: PagePool, scheduler: Scheduler, store: SimulatedStore) -> None:
        self.pool, self.scheduler, self.store = pool, scheduler, store
        self.n_steps = 0
        self._requests: dict[int, _Request] = {}
        self._bytes = {"used": 0.0, "expanded": 0.0}
        self._ways: dict[str, int] = {}
        self._busy_s = self._weighted = self._computed_s = 0.0
        self._peak = self._n_run = 0
        self._rows: list[tuple[float, ...]] = []
        self._every = 1

    def arrived(self, sequence: Sequence, arrival_s: float) -> None:
        self._requests[sequence.seq_id] = _Request(arrival_s, n_wanted=sequence.params.max_tokens)

    def step(self, plan: StepPlan, time: StepTime, expanded_bytes: float, now: float) -> None:
        """A step has been planned and timed; it ends at `now`."""
        self.n_steps += 1
        n = len(self.scheduler.running)
        self._peak = max(self._peak, n)
        self._n_run += n
        self._busy_s += time.step_s
        self._computed_s += time.compute_s
        self._weighted += n * time.step_s
        self._bytes["used"] += time.link_bytes
        self._bytes["expanded"] += expanded_bytes
        self._ways[time.way] = self._ways.get(time.way, 0) + 1
        if self.n_steps % self._every == 0:
            self._rows.append(self._row(now, n))
            if len(self._rows) >= 2 * MAX_TIMELINE:
                self._rows, self._every = self._rows[1::2], 2 * self._every

    def _row(self, now: float, n_running: int) -> tuple[float, ...]:
        stats = self.pool.stats()
        pages = [stats["views"][kind]["pages"] for kind in ("expert", "kv", "ssm", "conv")]
        n_resident = self.store.residency.n_resident
        return (now, n_running, len(self.scheduler.waiting), n_resident, *pages, stats["free_bytes"])

    def token(self, sequence: Sequence, now: float) -> None:
        """A sequence got a token."""
        request = self._requests[sequence.seq_id]
        if request.first_s is None:
            request.first_s = now
        request.last_s = now
        request.n_tokens += 1

    def last_s(self, seq_id: int) -> float:
        """When a request got its last token so far."""
        return self._requests[seq_id].last_s

    @property
    def n_started(self) -> int:
        """Requests that have had a token."""
        return sum(request.first_s is not None for request in self._requests.values())

    @property
    def n_answered(self) -> int:
        """Requests that have had all their tokens."""
        return sum(request.n_tokens >= request.n_wanted for request in self._requests.values())

    @property
    def n_tokens(self) -> int:
        """Tokens of answers."""
        return sum(request.n_tokens for request in self._requests.values())

    @property
    def mean_first_s(self) -> float:
        """Time to first token, mean of those that have had one."""
        waits = [r.first_s - r.arrival_s for r in self._requests.values() if r.first_s is not None]
        return sum(waits) / len(waits) if waits else 0.0

    @property
    def used_bytes(self) -> float:
        """What went over the link because steps used it."""
        return self._bytes["used"]

    def result(self, makespan_s: float, decisions: DecisionLog | None) -> Result:
        done = [r for r in self._requests.values() if r.first_s is not None]
        ttft = np.array([(r.first_s or 0.0) - r.arrival_s for r in done])
        tpot = np.array([(r.last_s - (r.first_s or 0.0)) / (r.n_tokens - 1) for r in done if r.n_tokens > 1])
        latency = np.array([r.last_s - r.arrival_s for r in done])
        n_tokens = sum(r.n_tokens for r in done)
        store = self.store
        values = {
            "requests": len(done),
            "steps": self.n_steps,
            "makespan_s": makespan_s,
            "busy_s": self._busy_s,
            "compute_s": self._computed_s,
            "output_tokens": n_tokens,
            "output_tokens_per_second": n_tokens / makespan_s if makespan_s else 0.0,
            "peak_concurrency": self._peak,
            "mean_concurrency": self._n_run / max(self.n_steps, 1),
            "mean_concurrency_by_time": self._weighted / self._busy_s if self._busy_s else 0.0,
            "ttft_s": _summary(ttft),
            "tpot_s": _summary(tpot),
            "latency_s": _summary(latency),
            "bytes_moved": int(sum(self._bytes.values())),
            "bytes_moved_by_cause": {key: int(n) for key, n in self._bytes.items()},
            "hit_rate": store.n_hits / store.n_asked if store.n_asked else 1.0,
            "preemptions": self.scheduler.n_preemptions,
            "steps_by_way": self._ways,
            "decisions": {} if decisions is None else dict(decisions.counts),
            "resident_experts_at_end": store.residency.n_resident,
        }
        names = ("time_s", "running", "waiting", "resident_experts", "expert", "kv", "ssm", "conv", "free_bytes")
        columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(names)
        return Result(values, {name: list(column) for name, column in zip(names, columns, strict=True)})


def _summary(values: np.ndarray) -> dict[str, float]:
    if not values.size:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    p50, p95 = np.percentile(values, [50, 95])
    return {"mean": float(values.mean()), "p50": float(p50), "p95": float(p95)}


def write_plot(results: dict[str, Result], page_bytes: dict[str, int], path: str | Path) -> None:
    """Pages by kind and requests over time, one column per result. Needs matplotlib (extra `plot`)."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise RimuruError(f"a plot needs matplotlib: {install_command('plot')}") from None
    figure, axes = pyplot.subplots(2, len(results), figsize=(5 * len(results), 6), squeeze=False, sharex="col")
    kinds = [kind for kind in ("expert", "kv", "ssm", "conv") if page_bytes.get(kind)]
    for column, (name, result) in enumerate(results.items()):
        line, time_s = result.timeline, result.timeline["time_s"]
        stacks = [np.array(line[kind]) * page_bytes[kind] / 2**30 for kind in kinds]
        stacks.append(np.array(line["free_bytes"]) / 2**30)
        axes[0, column].stackplot(time_s, stacks, labels=[*kinds, "free"])
        axes[0, column].set_title(name)
        axes[0, column].set_ylabel("GiB of the pool")
        axes[1, column].plot(time_s, line["running"], label="running")
        axes[1, column].plot(time_s, line["waiting"], label="waiting")
        axes[1, column].set_xlabel("seconds")
        axes[1, column].set_ylabel("requests")
    axes[0, 0].legend(loc="lower left")
    axes[1, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
