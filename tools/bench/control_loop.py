"""Cost of the control loop per step: what stands between two steps at 96 requests and 6,000 experts. Prints JSON.

`adjust` is the loop itself (need, policy, residency order, page tables, background reads begun), `schedule` the whole
scheduler with it: 96 running sequences get their pages, some are replaced, experts shrink and come back. `residency`
is the noting of one step's routing (96 tokens in 48 layers), which runs beside the layers.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np

from rimuru.arch.shapes import shape_gguf
from rimuru.engine.room import ExpertRoom
from rimuru.simulate.cards import card_named
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.traces import TraceRequest

N_REQUESTS = 96


class Stopwatch:
    """Times of one method of an object, which it wraps: of the thread's own work, so that other programs count less."""

    def __init__(self, owner: object, name: str) -> None:
        self.times: list[float] = []
        self.wall_times: list[float] = []
        self._call: Callable[..., object] = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: object, **more: object) -> object:
        started, wall_started = time.thread_time(), time.perf_counter()
        try:
            return self._call(*args, **more)
        finally:
            self.times.append(time.thread_time() - started)
            self.wall_times.append(time.perf_counter() - wall_started)

    def summary(self) -> dict[str, float]:
        """Microseconds per call, the first tenth (compiling, filling) left out."""
        first = len(self.times) // 10
        times, wall = np.array(self.times[first:]) * 1e6, np.array(self.wall_times[first:]) * 1e6
        return {"mean": round(float(times.mean()), 1), "p50": round(float(np.median(times)), 1),
                "p95": round(float(np.percentile(times, 95)), 1), "wall_mean": round(float(wall.mean()), 1),
                "wall_p50": round(float(np.median(wall)), 1), "calls": len(times)}  # fmt: skip


def measure(policy: str, n_steps: int) -> dict[str, object]:
    gguf, _ = shape_gguf("qwen3-30b-a3b", "q4_k_m")
    settings = Settings(int(16e9), card_named("rtx5090"), policy=policy, max_sequences=N_REQUESTS, profile_tokens=0)
    simulation = Simulation(gguf, settings)
    assert isinstance(simulation.room, ExpertRoom)
    rng = np.random.default_rng(0)
    trace = [TraceRequest(0.0, 40, int(n)) for n in rng.integers(n_steps // 2, n_steps, 2 * N_REQUESTS)]
    adjust = Stopwatch(simulation.room, "adjust")
    schedule = Stopwatch(simulation.scheduler, "schedule")
    touch = Stopwatch(simulation.store.residency, "touch")
    result = simulation.run(trace)
    per_step = np.array(touch.times).reshape(-1, 48).sum(axis=1) * 1e6
    return {
        "policy": policy,
        "experts": simulation.experts.n_experts,
        "mean_concurrency": round(float(result.values["mean_concurrency"]), 1),
        "decisions": result.values["decisions"],
        "adjust_us": adjust.summary(),
        "schedule_us": schedule.summary(),
        "residency_us": {"mean": round(float(per_step.mean()), 1), "p95": round(float(np.percentile(per_step, 95)), 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rows = [measure(policy, args.steps) for policy in ("paper", "cost")]
    print(json.dumps({"machine": platform.processor() or platform.machine(), "results": rows}, indent=1))


if __name__ == "__main__":
    main()
