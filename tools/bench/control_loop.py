"""Cost of the control loop per step: what stands between two steps at 96 requests and 6,000 experts. Prints JSON.

`loop` is all of it, by step: `adjust` (need, policy, residency order, page tables, records, background reads begun) and
`residency` (a step's choices of 48 layers noted). `schedule` is the whole scheduler with `adjust` in it: 96 running
sequences get their pages, some are replaced, experts shrink and come back. `layers` is what the CPU's store does
instead of `residency`, layer by layer: noting the choices of 96 tokens, and naming their experts, which it has to read.
`device` is what a device's store does instead of it: in an eighth of the steps it takes a report of what was chosen, of
who is resident now, and of who came meanwhile (an expert of each layer and step), in another eighth it sends the
commands for eight experts that left and eight that came (which `adjust` counts); `device_loop` is that and `adjust`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.arch.shapes import shape_gguf
from rimuru.engine.room import ExpertRoom
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.source import ExpertSource
from rimuru.experts.store import spread_experts
from rimuru.memory.page_pool import PagePool
from rimuru.memory.views import ExpertView
from rimuru.ops.host import bytes_at
from rimuru.ops.places import ASKED, FILLS, HITS, LOG_ENTRIES, N_TOTALS, STEPS, TOKENS, ExpertPlaces, fill_entry
from rimuru.ops.reference import ReferenceOps
from rimuru.ops.reference.residency import set_places
from rimuru.simulate.cards import card_named
from rimuru.simulate.simulator import NoCopier, NoMemory, Settings, Simulation
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

    def summary(self, *others: Stopwatch) -> dict[str, float]:
        """Microseconds per call (of all these together), the first tenth (compiling, filling) left out."""
        first, watches = len(self.times) // 10, (self, *others)
        times, wall = (
            sum(np.array(times[first : len(self.times)]) * 1e6 for times in kind)
            for kind in ([w.times for w in watches], [w.wall_times for w in watches])
        )
        return {"mean": round(float(np.mean(times)), 1), "p50": round(float(np.median(times)), 1),
                "p95": round(float(np.percentile(times, 95)), 1), "wall_mean": round(float(np.mean(wall)), 1),
                "wall_p50": round(float(np.median(wall)), 1), "calls": len(self.times) - first}  # fmt: skip


def measure(policy: str, n_steps: int) -> dict[str, object]:
    gguf, _ = shape_gguf("qwen3-30b-a3b", "q4_k_m")
    settings = Settings(int(16e9), card_named("rtx5090"), policy=policy, max_sequences=N_REQUESTS, profile_tokens=0)
    simulation = Simulation(gguf, settings)
    assert isinstance(simulation.room, ExpertRoom)
    rng = np.random.default_rng(0)
    trace = [TraceRequest(0.0, 40, int(n)) for n in rng.integers(n_steps // 2, n_steps, 2 * N_REQUESTS)]
    adjust = Stopwatch(simulation.room, "adjust")
    schedule = Stopwatch(simulation.scheduler, "schedule")
    noting = Stopwatch(simulation.store.residency, "note_all")
    result = simulation.run(trace)
    device = by_device(simulation, rng, 4 * n_steps)
    return {
        "policy": policy,
        "experts": simulation.experts.n_experts,
        "mean_concurrency": round(float(result.values["mean_concurrency"]), 1),
        "decisions": result.values["decisions"],
        "loop_us": adjust.summary(noting),
        "adjust_us": adjust.summary(),
        "residency_us": noting.summary(),
        "schedule_us": schedule.summary(),
        "layers_us": by_layers(simulation, rng),
        "device_us": device,
        "device_loop_us": {"mean": round(adjust.summary()["mean"] + device["mean"], 1)},
    }


def by_layers(simulation: Simulation, rng: np.random.Generator) -> dict[str, float]:
    """Noting the choices of N_REQUESTS tokens layer by layer, a step's layers together."""
    residency, layers = simulation.store.residency, simulation.experts.layers
    n_experts, top_k = layers[0].n_experts, simulation.cost.top_k
    ids = [rng.integers(0, n_experts, (N_REQUESTS, top_k)).astype(np.int32) for _ in layers]

    class Step:
        def run(self) -> None:
            for slot, chosen in enumerate(ids):
                residency.note(slot, chosen)

    step = Step()
    watch = Stopwatch(step, "run")
    for _ in range(100):
        step.run()
    return watch.summary()


class Device(ReferenceOps):
    """What a device's store asks for between steps; the device does it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._queued: list[tuple[np.ndarray, int, ExpertPlaces]] = []

    def set_places(self, commands: np.ndarray, n_commands: int, places: ExpertPlaces) -> None:
        """See Ops.set_places."""
        self._queued.append((commands.copy(), n_commands, places))

    def catch_up(self) -> None:
        """Do what was queued."""
        while self._queued:
            set_places(*self._queued.pop(0))


class Mail(NoCopier):
    """Brings reports, and moves nothing else."""

    def copy_out(self, target: np.ndarray, address: int) -> None:
        np.copyto(target.view(np.uint8), bytes_at(address, target.nbytes))


def device_store(simulation: Simulation, share: float) -> DeviceExpertStore:
    """A device's store of the same experts, of which so many are resident; none has any bytes."""
    layout, mail = simulation.experts, Mail()
    n_bytes = int(1.2 * share * layout.n_pages * layout.page_bytes) // simulation.layout.huge_bytes
    pool = PagePool(NoMemory(n_bytes * simulation.layout.huge_bytes), simulation.layout, None, mail)
    store = DeviceExpertStore(
        layout, pool, ExpertView(pool), cast(ExpertSource, None), Device(), mail, [{} for _ in layout.layers], None,
        lambda n: True, 1 << 50, 1,
    )  # fmt: skip
    for slot, expert in spread_experts(layout)[: int(share * layout.n_experts)]:
        pages = store.begin(slot)
        assert pages is not None
        store.settle(slot, expert, pages)
    store._start_places()
    store.residency.n_requests = N_REQUESTS  # as `adjust` says before each step
    return store


def by_device(simulation: Simulation, rng: np.random.Generator, n_steps: int) -> dict[str, float]:
    """What a device's store does in a step of N_REQUESTS tokens, whose experts have changed places meanwhile."""
    store, layers = device_store(simulation, 0.5), simulation.experts.layers
    arrays, rows = store.places.arrays, store.view.rows_before
    totals = arrays.totals.reshape(len(layers), N_TOTALS)

    watch = Stopwatch(store, "begin_step")
    for number in range(n_steps):
        totals[:, [STEPS, TOKENS, ASKED, HITS, FILLS]] += (1, N_REQUESTS, 100, 60, 1)
        arrays.counts += rng.integers(0, 12, arrays.counts.size, np.int32)
        for slot, layer in enumerate(layers):  # in each layer somebody else comes into a place, or into each empty one
            held = arrays.holders[rows[slot] : rows[slot + 1]]
            empty = np.flatnonzero((store.places.layer_pages(slot)[:, 0] >= 0) & (held < 0))
            into = empty if len(empty) else rng.choice(np.flatnonzero(held >= 0), 1)
            left = held[into]
            held[into] = rng.choice(np.setdiff1d(np.arange(layer.n_experts), held), len(into), replace=False)
            for place, victim in zip(into.tolist(), left.tolist(), strict=True):
                n = int(arrays.log[0])
                entry = fill_entry(n, int(totals[slot, STEPS]), slot, int(held[place]), victim, place, False)
                arrays.log[1 + n % LOG_ENTRIES], arrays.log[0] = entry, n + 1
        if number % 8 == 4:
            store.shrink(8)
            store.expand(8)
        store.begin_step()
        store.ops.catch_up()  # type: ignore[attr-defined]
    store.catch_up()
    assert store.fills.n == arrays.log[0] > n_steps and store.fills.n_lost == 0
    return watch.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    rows = [measure(policy, args.steps) for policy in ("paper", "cost")]
    print(json.dumps({"machine": platform.processor() or platform.machine(), "results": rows}, indent=1))


if __name__ == "__main__":
    main()
