"""Hit rates of the residency policies by number of concurrent tokens and share of resident experts, and the default.

    python tools/bench/simulate_residency.py [--out tools/results] [--steps 400]

Synthetic router of the trained-like kind; each stream has its own topic. `offline` is a hot set from other text that
never changes, `hotset` the same refreshed while it serves, `recency` as the engine does it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script
from rimuru.experts import residency as module
from rimuru.experts.residency import Residency
from rimuru.experts.routing import SyntheticRouter, router_for
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout

N_LAYERS = 6
STREAMS = (1, 2, 4, 8, 16, 32, 64, 96)
SHARES = (0.2, 0.36, 0.5, 0.64, 0.85)
MODELS = {"qwen3-30b (128, 8)": (128, 8), "qwen3.5-35b (256, 8)": (256, 8)}
POLICIES = ("recency", "hotset", "offline")


def traffic(n_experts: int, top_k: int, n_streams: int, n_steps: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(probabilities on other text, choices int32 [layers, experts] of each step)."""
    router = SyntheticRouter(N_LAYERS, n_experts, top_k, router_for(n_experts), seed=n_streams)
    other = np.zeros((N_LAYERS, n_experts), np.int32)
    for stream in range(-32, 0):
        router.open(stream)
        for _ in range(100):
            router.route(stream, 1, other)
        router.close(stream)
    steps = []
    for stream in range(n_streams):
        router.open(stream)
    for _ in range(n_steps):
        counts = np.zeros((N_LAYERS, n_experts), np.int32)
        for stream in range(n_streams):
            router.route(stream, 1, counts)
        steps.append(counts)
    return other / 3200, steps


def hit_rate(profile: np.ndarray, steps: list[np.ndarray], policy: str, share: float, n_tokens: int) -> float:
    n_layers, n_experts = profile.shape
    layout = ExpertLayout(1, tuple(ExpertLayerLayout(i, n_experts, 1, ()) for i in range(n_layers)))
    residency = Residency(layout, "recency" if policy == "recency" else "hotset")
    residency.load_profile(profile)
    n_resident = round(share * n_experts)
    for layer in range(n_layers):
        residency.resident[layer, np.argsort(-profile[layer])[:n_resident]] = True
    n_asked = n_hits = 0
    for number, counts in enumerate(steps):
        residency.begin_step(n_tokens)
        residency.note_all(counts)
        for layer in range(n_layers):
            used = np.flatnonzero(counts[layer])
            resident = residency.resident[layer]
            missing = used[~resident[used]]
            if number >= len(steps) // 4:  # after warming up
                n_asked += len(used)
                n_hits += len(used) - len(missing)
            if policy == "offline":
                continue
            for newcomer, victim in residency.exchanges(layer, counts[layer] > 0, missing):
                resident[newcomer], resident[victim] = True, False
    return n_hits / n_asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--decay", type=float, default=module.DECAY_TOKENS, help="tokens after which a choice counts 1/e"
    )
    args = parser.parse_args()
    module.DECAY_TOKENS = args.decay
    rows: list[dict[str, object]] = []
    lines = [
        "# Residency, simulated",
        "",
        f"Hit rates: recency / hotset / offline. A choice counts 1/e after {args.decay:.0f} tokens.",
        "",
    ]
    lines += ["| model | streams | " + " | ".join(f"{s:.0%}" for s in SHARES) + " |"]
    lines += ["|---" * (len(SHARES) + 2) + "|"]
    for model, (n_experts, top_k) in MODELS.items():
        for n_streams in STREAMS:
            profile, steps = traffic(n_experts, top_k, n_streams, max(120, args.steps if n_streams < 32 else 200))
            cells = []
            for share in SHARES:
                rates = [hit_rate(profile, steps, policy, share, n_streams) for policy in POLICIES]
                rows.append(
                    {"model": model, "streams": n_streams, "share": share} | dict(zip(POLICIES, rates, strict=True))
                )
                cells.append(" / ".join(f"{rate:.3f}" for rate in rates))
            lines.append(f"| {model} | {n_streams} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    (args.out / "simulate_residency.json").write_text(json.dumps(rows, indent=1) + "\n")
    (args.out / "simulate_residency.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
