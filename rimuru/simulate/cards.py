"""What a machine can do: the inputs of the time model."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gbps * 1e9

    @property
    def operations_per_s(self) -> float:
        return self.compute_tflops * 1e12


CARDS = {
    card.name: card
    for card in (
        Card("rtx5090", 180.0, 1800.0, 53.0),
        Card("rtx4090", 140.0, 1000.0, 25.0),
        Card("h200", 600.0, 4400.0, 53.0),
    )
}


def card_named(name: str) -> Card:
    """A built-in card. Raises BadInputError for an unknown name."""
    if name not in CARDS:
        raise BadInputError(f"unknown card {name!r}; known: {', '.join(CARDS)}")
    return CARDS[name]
