"""How long a step takes: layers one after the other on the device, expert copies beside them on the link.

Ways to bring absent experts, as in the engine; the fastest by forecast is taken for each step:

    in place    the expert kernel reads what is used and absent over the link while it reads the rest from memory
    prefetch    all absent experts of a layer are copied while the layer before computes
    predicted   those that the layer before predicts are copied early, wrong ones too; what it missed is read in place
                (as in the engine only where it is asked for: on an H200 it cost more than it brought, tools/LOG.md)
    blocking    (where all of these are turned off) copied when the router has chosen, then computed

Copies of the adjuster's expansions are in the link's queue ahead of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rimuru.simulate.cards import IN_PLACE_TOKENS, Card
from rimuru.simulate.model_cost import ModelCost

PREDICTED_SHARE = 0.79
"""Of the next layer's experts that applying its router to this layer's hidden state names correctly."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Switches of the ways to bring experts."""

    in_place: bool = True
    prefetch: bool = True
    prediction: bool = False


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do. Arrays float64 [n_layers]: experts' bytes that are used, used but absent, all absent."""

    n_tokens: int
    n_logit_rows: int
    context_tokens: int
    """Tokens of context that attention reads, all sequences together."""
    n_sequences: int
    used_bytes: np.ndarray
    missed_bytes: np.ndarray
    absent_bytes: np.ndarray
    queued_bytes: float
    """Expansions in the link's queue."""
    in_place_bytes: np.ndarray | float = 0.0
    """Of what is used but absent, that which finds no place and no buffer: experts' kernels read it where it lies."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, and what went over the link for it (expansions not counted)."""

    step_s: float
    compute_s: float
    """Without any transfers."""
    link_bytes: float
    link_s: float
    way: str


class TimeModel:
    """Times of one model on one card. disk_share: share of the absent experts that is not in RAM."""

    def __init__(self, cost: ModelCost, card: Card, ways: Ways, disk_share: float = 0.0) -> None:
        self.cost, self.card, self.ways = cost, card, ways
        rate = 1.0 / (card.pcie_gbps * 1e9)
        self.seconds_per_byte = (1.0 - disk_share) * rate + disk_share * max(rate, 1.0 / (card.disk_gbps * 1e9))
        self._more_in_place = self._more_than_link(card.in_place_gbps)
        self._more_staged = self._more_than_link(card.staged_gbps)

    def _more_than_link(self, gbps: float | None) -> float:
        """Seconds that a byte takes beyond the link's time, at such a rate."""
        return 0.0 if gbps is None else max(0.0, 1.0 / (gbps * 1e9) - self.seconds_per_byte)

    def step(self, load: StepLoad) -> StepTime:
        """The fastest way for this step."""
        cost, card = self.cost, self.card
        reads = cost.dense_bytes + load.context_tokens * cost.context_bytes + load.n_sequences * cost.state_bytes
        dense = self._beside(
            reads / card.memory_bytes_per_s, load.n_tokens * cost.dense_operations / card.operations_per_s
        )
        dense += card.layer_overhead_us * 1e-6
        computing = load.n_tokens * cost.expert_operations / card.operations_per_s
        experts = self._beside(load.used_bytes / card.memory_bytes_per_s, computing)
        local = self._beside((load.used_bytes - load.missed_bytes) / card.memory_bytes_per_s, computing)
        ends = card.step_overhead_us * 1e-6 + max(
            cost.head_bytes / card.memory_bytes_per_s, load.n_logit_rows * cost.head_operations / card.operations_per_s
        )
        compute_s = float(dense.sum() + experts.sum() + ends)
        if not load.missed_bytes.any():
            queue_s = load.queued_bytes * self.seconds_per_byte
            return StepTime(max(compute_s, queue_s), compute_s, 0.0, 0.0, "resident")
        return min(
            (self._walk(way, dense, experts, local, load, ends, compute_s) for way in self._ways()),
            key=lambda time: time.step_s,
        )

    def _beside(self, reading: np.ndarray, computing: np.ndarray) -> np.ndarray:
        """Seconds by layer of reading weights and computing with them, each of which takes so long alone."""
        exposed = (1.0 - self.card.overlap) * np.minimum(reading, computing)
        return np.maximum(reading, computing) + exposed

    def _ways(self) -> list[str]:
        ways = ["in place"] if self.ways.in_place else []
        ways += ["prefetch"] if self.ways.prefetch else []
        ways += ["predicted"] if self.ways.prefetch and self.ways.prediction and self.ways.in_place else []
        return ways or ["blocking"]

    def _walk(
        self, way: str, dense: np.ndarray, experts: np.ndarray, local: np.ndarray, load: StepLoad, ends: float,
        compute_s: float,
    ) -> StepTime:  # fmt: skip
        """Follow the layers: `now` on the device, `link` = when the link is free again."""
        early, late = self._bytes(way, load)
        early_s = (early * self.seconds_per_byte).tolist()
        late_s = (late * self.seconds_per_byte + self._slower(way, load)).tolist()
        now, link, previous = 0.0, load.queued_bytes * self.seconds_per_byte, 0.0
        in_place, waiting = way in ("in place", "predicted"), self.card.miss_overhead_us * 1e-6
        turn = self.card.host_turn_us * 1e-6 if way == "blocking" else 0.0
        for dense_s, expert_s, local_s, copy_s, read_s in zip(
            dense.tolist(), experts.tolist(), local.tolist(), early_s, late_s, strict=True
        ):
            if copy_s:  # begins with the layer before: its buffer is free then
                link = max(link, previous) + copy_s
            previous = now
            now += dense_s + (turn if expert_s else 0.0)
            if copy_s:
                now = max(now, link)
            if not read_s:
                now += expert_s
            elif in_place:
                link = max(link, now) + read_s + waiting
                now = max(now + local_s, link)
            else:
                link = max(link, now) + read_s
                now = link + expert_s
        step_s = max(now + ends, link)
        link_bytes = float(early.sum() + late.sum())
        return StepTime(step_s, compute_s, link_bytes, link_bytes * self.seconds_per_byte, way)

    def _slower(self, way: str, load: StepLoad) -> np.ndarray | float:
        """Seconds by layer that reading takes beyond the link's time."""
        if way == "blocking":
            return load.missed_bytes * self._more_staged
        if way == "in place" and load.n_tokens > IN_PLACE_TOKENS:
            return load.in_place_bytes * self._more_in_place
        return 0.0

    def _bytes(self, way: str, load: StepLoad) -> tuple[np.ndarray, np.ndarray]:
        """Bytes per layer that are copied ahead of the layer, and that are read when it runs."""
        if way == "prefetch":
            return np.where(load.missed_bytes > 0, load.absent_bytes, 0.0), np.zeros_like(load.missed_bytes)
        if way == "predicted":  # as many are named as are used; of the wrong ones those that are absent come in vain
            absent = load.absent_bytes / np.maximum(self.cost.all_expert_bytes, 1.0)
            in_vain = (1.0 - PREDICTED_SHARE) * load.used_bytes * absent
            return PREDICTED_SHARE * load.missed_bytes + in_vain, (1.0 - PREDICTED_SHARE) * load.missed_bytes
        return np.zeros_like(load.missed_bytes), load.missed_bytes
