"""What every layer of a model shares while it is built and while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rimuru.arch.spec import ModelConfig, MoeSpec, RopeSpec
from rimuru.formats.gguf import GgufFile
from rimuru.forward.rope import rope_table
from rimuru.forward.weights import TensorReader
from rimuru.forward.workspace import Workspace
from rimuru.memory.specs import PoolLayout
from rimuru.ops.base import Act, Array, ExpertTable, KvLayer, Ops, StateLayer


@dataclass(slots=True)
class Wave:
    """Experts of one layer that can be read now. `active` [n_experts] bool, or None where all asked for can."""

    table: ExpertTable
    active: Array | None


class LentExperts(Protocol):
    """Experts of a layer that somebody else computes."""

    def add_to(self, out: Array, scale: float) -> None:
        """out[t] += scale * their part of the weighted sum. out [T, w]."""


class ExpertReader(Protocol):
    """The only door to experts (experts/store.py)."""

    def waves(self, layer_slot: int, ids: Array, positions: Array) -> Iterator[Wave]:
        """Make the experts named in ids (int32 [T, k]) readable, in one or more turns. A turn's experts stay
        readable until the next one is asked for. Rows at position -1 (int32 [T]) are padding."""

    def settled(self, layer_slot: int) -> ExpertTable | None:
        """The table of the only turn that `waves` will give, where that is known before the layer's tokens have chosen,
        and neither it nor ids change until then."""

    @property
    def foresees(self) -> bool:
        """Whether forecasts of what the next layer's tokens will choose are of use."""

    def foresee(self, layer_slot: int, ids: Array, positions: Array) -> None:
        """What a layer's tokens will likely choose, before its turn; after the turn of the layer before."""

    def lend(self, layer_slot: int, x: Act, ids: Array, weights: Array, spec: MoeSpec) -> LentExperts | None:
        """Before `waves`: take experts that are computed elsewhere out of ids and weights [T, k]; None where all stay.
        x: the experts' input."""


@dataclass(slots=True)
class RoutingTap:
    """`chosen(layer_slot, ids)` sees the experts that every MoE layer uses (int32 [T, k], on the device), where set.

    For recording and tests: steps that a device replays as a graph do not come by.
    """

    chosen: Callable[[int, Array], None] | None = None


@dataclass(slots=True)
class BuildContext:
    """Everything a layer's constructor needs. Layers ask the workspace for buffers and keep what they bind here."""

    config: ModelConfig
    gguf: GgufFile
    ops: Ops
    reader: TensorReader
    workspace: Workspace
    layout: PoolLayout
    pool_base: int
    experts: ExpertReader | None
    n_positions: int
    tap: RoutingTap = field(default_factory=RoutingTap)
    _rope: dict[RopeSpec, Array] = field(default_factory=dict)

    def rope(self, spec: RopeSpec | None) -> Array | None:
        """The rotation table of a spec; layers with equal specs share it."""
        if spec is None:
            return None
        if spec not in self._rope:
            factors = None if spec.factors_tensor is None else self.reader.host_vector(spec.factors_tensor)
            self._rope[spec] = self.reader.upload(rope_table(spec, factors, self.n_positions))
        return self._rope[spec]

    def kv_layer(self, index: int) -> KvLayer:
        """The KV window of block `index`."""
        kv = self.layout.kv
        assert kv is not None, "an attention layer needs KV pages in the layout"
        for group_index, group in enumerate(kv.groups):
            if index in group.layers:
                offset = group.layers.index(index) * group.layer_bytes
                return KvLayer(self.pool_base, kv.page_bytes, group, group_index, offset)
        raise AssertionError(f"block {index} is in no KV group")

    def state_layer(self, index: int) -> StateLayer:
        """The recurrent-state window of block `index`."""
        ssm, conv = self.layout.ssm, self.layout.conv
        return StateLayer(
            self.pool_base,
            ssm,
            ssm.layers.index(index) if ssm is not None and index in ssm.layers else -1,
            conv,
            conv.layers.index(index) if conv is not None and index in conv.layers else -1,
        )


def concatenated_rows(sizes: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive row ranges with the given sizes."""
    stops = np.cumsum(sizes)
    return [(int(stop - size), int(stop)) for size, stop in zip(sizes, stops, strict=True)]
