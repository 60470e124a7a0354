"""What a machine can do: the inputs of the time model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rimuru.base.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Card:
    """Rates as they are reached, not as they are printed: 1e12 operations, 1e9 bytes per second, microseconds."""

    name: str
    compute_tflops: float
    memory_gbps: float
    pcie_gbps: float
    disk_gbps: float = 6.0
    step_overhead_us: float = 150.0
    """Once per step: planning, assembling, sampling, one graph launch."""
    layer_overhead_us: float = 6.0
    """Per layer: kernels that wait for each other."""
    memory_gib: float = 24.0
    """Memory of the card."""
    miss_overhead_us: float = 0.0
    """Per layer that reads over the link while it runs: until the first bytes come, and the last are there."""
    overlap: float = 1.0
    """How much of the shorter one of reading weights and computing with them hides behind the longer one."""

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gbps * 1e9

    @property
    def operations_per_s(self) -> float:
        return self.compute_tflops * 1e12


CARDS = {
    card.name: card
    for card in (
        Card("rtx5090", 180.0, 1800.0, 53.0, memory_gib=32.0),
        Card("rtx4090", 140.0, 1000.0, 25.0),
        Card("h200", 600.0, 4400.0, 53.0, memory_gib=139.0),
    )
}


RATES = ("compute_tflops", "memory_gbps", "pcie_gbps", "disk_gbps")
ENGINE_SHARES = {"compute_tflops": 0.18, "memory_gbps": 0.56}
"""Of a card's rates, what the kernels of this engine reach together."""
ENGINE_LAYER_OVERHEAD_US = 18.0
ENGINE_MISS_OVERHEAD_US = 40.0
ENGINE_OVERLAP = 0.0
"""Fitted with ENGINE_SHARES to 40 cells of Qwen3-30B-A3B with a trained-like router on an H200 at commit 1cc4b8a, 1 to
96 streams in 8, 14 and 24 GB: foretold to 5% in the mean, 17% at most (tools/bench/simulate_forecast.py)."""


def card_named(name: str, rates: Mapping[str, float | None] | None = None) -> Card:
    """A built-in card, with other rates (RATES) where they are given. Raises BadInputError for an unknown name or a
    rate that is none."""
    if name not in CARDS:
        raise BadInputError(f"unknown card {name!r}; known: {', '.join(CARDS)}")
    given = {key: value for key, value in (rates or {}).items() if value is not None}
    for key, value in given.items():
        if not 0 < value < math.inf:
            raise BadInputError(f"--{key.replace('_', '-')} must be more than 0, and finite")
    return replace(CARDS[name], **given)  # type: ignore[arg-type]


def as_used(card: Card) -> Card:
    """The card as this engine uses it: for forecasts, where a simulation compares policies on the card as it is."""
    shares = {key: share * getattr(card, key) for key, share in ENGINE_SHARES.items()}
    return replace(
        card, layer_overhead_us=ENGINE_LAYER_OVERHEAD_US, miss_overhead_us=ENGINE_MISS_OVERHEAD_US,
        overlap=ENGINE_OVERLAP, **shares,
    )  # fmt: skip
