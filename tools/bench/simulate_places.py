"""Hit rates of the residencies as a device decides them, while the number of streams falls: 96, 32, 8, 4, 2, 1.

    python tools/bench/simulate_places.py [--out tools/results] [--seeds 2]

One set of places after the other, as bench/elastic.py measures its cells: streams come with prompts of 118 tokens, some
steps do not count, then some do. The rule is the engine's (experts/device_places.py), each step is that of the kernel's
twin (ops/reference/residency.py). Routers: the trained-like one for 128 experts, and one of fixed probabilities like
that of random weights with `--skew`. This is what SCORE_TOKENS and ALL_COME_TOKENS were chosen with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.experts.device_places import rule_of
from rimuru.experts.residency import Residency, ResidencyPolicy
from rimuru.experts.routing import SyntheticRouter, router_for
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout
from rimuru.ops.places import (
    ALL_COME,
    ASKED,
    BY_RECENCY,
    DECAY,
    HITS,
    LOG_ENTRIES,
    MAX_COMERS,
    MOST_FILLS,
    N_CONTROLS,
    N_TOTALS,
    LayerPlaces,
)
from rimuru.ops.reference.residency import fetch_experts

N_LAYERS, N_EXPERTS, TOP_K = 4, 128, 8
POLICIES: tuple[ResidencyPolicy, ...] = ("auto", "recency", "hotset")
SHARES = {"8 GB": 0.36, "14 GB": 0.62}
"""Of Qwen3-30B-A3B's experts that the budget holds."""
CELLS = ((96, 8, 9), (32, 9, 11), (8, 20, 25), (4, 40, 50), (2, 80, 100), (1, 150, 200))
"""Streams, steps that do not count, steps that do."""
PROMPT, STEP_TOKENS = 118, 2048
SKEW = 1.35
"""Of fixed logits: half of the experts then serve about as much as with `--skew 0.35` of random weights."""


class FixedRouter:
    """Choices by fixed probabilities, the same for every stream."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.logits = self.rng.normal(0.0, SKEW, (N_LAYERS, N_EXPERTS))

    def open(self, stream: int) -> None: ...
    def close(self, stream: int) -> None: ...
    def begin_step(self) -> None: ...

    def route(self, stream: int, n_tokens: int, counts: np.ndarray) -> None:
        """Add what n_tokens tokens choose to counts int32 [layers, experts]."""
        for layer, logits in enumerate(self.logits):
            drawn = logits + self.rng.gumbel(size=(n_tokens, N_EXPERTS))
            np.add.at(counts[layer], np.argpartition(-drawn, TOP_K, axis=1)[:, :TOP_K].reshape(-1), 1)


def router_of(name: str, seed: int) -> SyntheticRouter | FixedRouter:
    if name == "fixed":
        return FixedRouter(seed)
    return SyntheticRouter(N_LAYERS, N_EXPERTS, TOP_K, router_for(N_EXPERTS, name), seed=seed)


def empty_places(share: float) -> list[LayerPlaces]:
    """Of each layer, held by the first experts; pages of no bytes."""
    found = []
    for number in range(N_LAYERS):
        ids = np.arange(N_EXPERTS)
        held = np.where(ids < round(share * N_EXPERTS), ids, -1).astype(np.int32)
        found.append(
            LayerPlaces(
                ExpertLayerLayout(number, N_EXPERTS, 1, ()), 0, np.zeros((N_EXPERTS, 1), np.int64),
                np.ones(N_EXPERTS, np.int64), (held >= 0).astype(np.int64)[:, None], held.copy(), held.copy(),
                np.zeros(N_EXPERTS, np.int32), np.zeros(N_EXPERTS, np.float32), np.zeros(N_EXPERTS, np.int32),
                np.zeros(N_EXPERTS, np.int32), np.zeros(N_TOTALS, np.int32), np.zeros(N_CONTROLS, np.int32),
                np.zeros((0, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.bool_),
                np.zeros(1 + LOG_ENTRIES, np.int64), number,
            )
        )  # fmt: skip
    return found


def batches(streams: range, n_decode: int) -> Iterator[list[tuple[int, int]]]:
    """(stream, tokens) of each step: the prompts in as few as their tokens take, then a token of everybody."""
    batch: list[tuple[int, int]] = []
    for stream in streams:
        left = PROMPT
        while left:
            n_tokens = min(left, STEP_TOKENS - sum(n for _, n in batch))
            batch.append((stream, n_tokens))
            left -= n_tokens
            if sum(n for _, n in batch) == STEP_TOKENS:
                yield batch
                batch = []
    if batch:
        yield batch
    yield from ([(stream, 1) for stream in streams] for _ in range(n_decode))


def hit_rates(
    policy: ResidencyPolicy, router: str, share: float, seed: int, cells: tuple[tuple[int, int, int], ...] = CELLS
) -> dict[int, float]:
    """Share of the distinct experts that steps ask for and find, by number of streams."""
    route, layers, first = router_of(router, seed), empty_places(share), 0
    residency = Residency(ExpertLayout(1, tuple(places.layout for places in layers)), policy)
    found = {}
    for n_streams, n_warm, n_counted in cells:
        streams, first = range(first, first + n_streams), first + n_streams
        residency.n_requests = n_streams
        by_recency, all_come, decay_tokens = rule_of(residency)
        for places in layers:
            places.control[[BY_RECENCY, ALL_COME, MOST_FILLS]] = by_recency, all_come, MAX_COMERS
            places.control[DECAY] = np.float32(decay_tokens).view(np.int32)
        for stream in streams:
            route.open(stream)
        steps = list(batches(streams, n_warm + n_counted))
        for number, batch in enumerate(steps):
            if number == len(steps) - n_counted:
                before = sum(places.totals.astype(np.int64) for places in layers)
            counts = np.zeros((N_LAYERS, N_EXPERTS), np.int32)
            route.begin_step()
            for stream, n_tokens in batch:
                route.route(stream, n_tokens, counts)
            for places, chosen in zip(layers, counts, strict=True):
                ids = np.repeat(np.arange(N_EXPERTS, dtype=np.int32), chosen).reshape(-1, TOP_K)
                fetch_experts(ids, np.zeros(len(ids), np.int32), places)
        for stream in streams:
            route.close(stream)
        counted = sum(places.totals.astype(np.int64) for places in layers) - before
        found[n_streams] = float(counted[HITS] / counted[ASKED])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    sizes = [n for n, _, _ in CELLS]
    lines = ["# Residency on a device, simulated", "", "Hit rates while the number of streams falls.", ""]
    lines.append("| router | budget | residency | " + " | ".join(str(n) for n in sizes) + " |")
    lines.append("|---" * (len(sizes) + 3) + "|")
    rows = []
    for router, budget, policy in itertools.product(("qwen3-30b", "fixed"), SHARES, POLICIES):
        runs = [hit_rates(policy, router, SHARES[budget], seed) for seed in range(args.seeds)]
        means = {n: float(np.mean([run[n] for run in runs])) for n in sizes}
        rows.append({"router": router, "budget": budget, "residency": policy, "hit_rates": means})
        lines.append(f"| {router} | {budget} | {policy} | " + " | ".join(f"{means[n]:.3f}" for n in sizes) + " |")
        print(lines[-1], flush=True)
    (args.out / "simulate_places.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (args.out / "simulate_places.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
