"""Page operations per second of the allocator, in batch calls on a full-size pool. Prints JSON.

An allocated page and a freed page count as one operation each. `mixed` frees in random order, so that every free
changes another parent's fill level and merges happen in bits.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.memory.allocator import PageAllocator
from rimuru.memory.specs import (
    ConvLayout,
    ExpertLayerLayout,
    ExpertLayout,
    KvGroupLayout,
    KvLayout,
    PoolLayout,
    SsmLayout,
)

KIB = 1024


def hybrid_layout() -> PoolLayout:
    """Page sizes of the kind that Qwen3.5-35B-A3B in Q4_K_M gets: 288 KiB, 2 MiB, 18 MiB."""
    return PoolLayout(
        huge_bytes=18432 * KIB,
        expert=ExpertLayout(288 * KIB, (ExpertLayerLayout(0, 256, 7, ()),)),
        kv=KvLayout(36 * KIB, (KvGroupLayout((0,), 2, 256, 256, 9, None, 2),), "expert"),
        ssm=SsmLayout(2048 * KIB, 2048 * KIB, tuple(range(30))),
        conv=ConvLayout(32 * KIB, 32 * KIB, 3, tuple(range(30)), "ssm"),
        slab_bytes=0,
    )


def best_rate(n_operations: int, work: Callable[[], None], repeats: int) -> float:
    """Operations per second of the fastest of some runs."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return n_operations / min(seconds)


def measure(allocator: PageAllocator, kind: str, n_batch: int, repeats: int) -> dict[str, float]:
    """Rates in millions of page operations per second for batches of n_batch pages."""
    n_batches = max(1, min(allocator.free_pages(kind), 100_000) // n_batch)
    pages_per_id = allocator.unit_pages(kind)
    held: list[np.ndarray] = []

    def in_order() -> None:
        for _ in range(n_batches):
            ids = allocator.allocate(kind, n_batch)
            assert ids is not None
            held.append(ids)
        while held:
            allocator.free(kind, held.pop())

    def mixed() -> None:
        for _ in range(n_batches):
            ids = allocator.allocate(kind, n_batch)
            assert ids is not None
            held.append(ids)
        shuffled = order[: n_batches * n_batch]
        ids = np.concatenate(held)[shuffled]
        held.clear()
        for start in range(0, ids.size, n_batch):
            allocator.free(kind, ids[start : start + n_batch])

    order = np.random.default_rng(1).permutation(n_batches * n_batch)
    n_operations = 2 * n_batches * n_batch * pages_per_id
    in_order()  # compiles
    return {
        "in_order": round(best_rate(n_operations, in_order, repeats) / 1e6, 1),
        "mixed": round(best_rate(n_operations, mixed, repeats) / 1e6, 1),
    }


def measure_experts(allocator: PageAllocator, n_pages: int, repeats: int) -> float:
    """Millions of page operations per second of whole experts placed side by side, one call each."""
    n_experts = min(allocator.free_pages("expert") // (n_pages + 1), 5000)

    def work() -> None:
        held = [allocator.allocate_expert(n_pages) for _ in range(n_experts)]
        for ids in held:
            assert ids is not None
            allocator.free("expert", ids)

    work()
    return round(best_rate(2 * n_experts * n_pages, work, repeats) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool-gib", type=float, default=24, help="size of the pool (nothing is really allocated)")
    parser.add_argument("--repeats", type=int, default=25, help="the fastest run counts")
    args = parser.parse_args()
    layout = hybrid_layout()
    allocator = PageAllocator(layout, int(args.pool_gib * 2**30) // layout.huge_bytes)
    report: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "huge_pages": allocator.n_huge,
        "unit": "million page operations per second",
        "must": 10,
    }
    for n_batch in (64, 256, 1024):
        report[f"batch_{n_batch}"] = {
            kind: measure(allocator, kind, n_batch, args.repeats) for kind in ("kv", "expert", "ssm", "conv")
        }
    report["experts_of_7_pages"] = measure_experts(allocator, 7, args.repeats)
    allocator.audit()
    assert allocator.levels()["l1"]["free"] == allocator.n_huge
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
