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
    in_place_gbps: float | None = None
    """At which experts' kernels read absent experts where they lie, for more than IN_PLACE_TOKENS tokens; None: as fast
    as the link."""
    staged_gbps: float | None = None
    """At which the host brings experts when a layer has chosen; None: as fast as the link."""
    host_turn_us: float = 0.0
    """Per layer whose choices the host waits for."""

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


IN_PLACE_TOKENS = 128
ENGINE_IN_PLACE_SHARE = 0.22
"""Of the link's rate, for pieces of prompts: without loading buffers a prompt of 2,048 tokens ran at 31% of its rate,
without fill on read at 33%; foretold 35 and 30. In steps of 32 and 96 streams kernels were measured at the link's rate
where a third of the experts is missed, at a third of it where 3% are: no rate says both, so there it is the link's."""
ENGINE_STAGED_SHARE = 0.45
ENGINE_HOST_TURN_US = 420.0
"""Without reading in place: 41, 145 and 5,320 tokens per second of 1 and 32 streams and a prompt of 2,048 tokens were
measured, 41, 159 and 6,080 are foretold (tools/LOG.md, "Ablation")."""


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
        overlap=ENGINE_OVERLAP, in_place_gbps=ENGINE_IN_PLACE_SHARE * card.pcie_gbps,
        staged_gbps=ENGINE_STAGED_SHARE * card.pcie_gbps, host_turn_us=ENGINE_HOST_TURN_US, **shares,
    )  # fmt: skip
