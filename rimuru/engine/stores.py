"""Which store of experts an engine gets: where its experts can lie decides.

pool is RAM (CPU)                                   HostExpertStore      absent experts are read from the file
a device, host memory holds those outside the pool  DeviceExpertStore    kernels read them in place, or bring them
a device, it does not, or cannot be pinned          TieredExpertStore    a copy in host memory or the file, by waves
a device, and nothing may be read in place          TieredExpertStore    unless loading buffers take all of a layer
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rimuru.ops as backends
from rimuru.arch.spec import ModelConfig, MoeSpec
from rimuru.config import EngineConfig
from rimuru.engine.resolve import buffer_experts, ram_bytes, snapshot_ram_bytes, swap_ram_bytes
from rimuru.engine.room import ExpertRoom
from rimuru.experts.cpu_experts import CpuExperts
from rimuru.experts.device_places import home_bytes
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.host_arena import BLOCK_BYTES, PinningError
from rimuru.experts.source import ExpertSource
from rimuru.experts.store import HostExpertStore
from rimuru.experts.tiered_store import TieredExpertStore
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout, PoolLayout
from rimuru.memory.views import ExpertView
from rimuru.ops.base import Act, Array, Copier, ExpertTable, Ops
from rimuru.ops.places import MAX_COMERS

log = logging.getLogger(__name__)

ExpertStore = HostExpertStore | DeviceExpertStore
POOL_SHARE = 0.9
"""Of the pool, for experts that must be in it: the rest is for requests."""
RAM_SHARE = 0.97
"""Of host memory, for experts: blocks are not filled to the last byte."""


def needs_disk(layout: ExpertLayout | None, device: str, pool_bytes: int, ram_bytes: int) -> bool:
    """Whether the pool of a device and host memory together are too small for all experts."""
    if layout is None or device == "cpu":
        return False
    return layout.n_pages * layout.page_bytes > POOL_SHARE * pool_bytes + RAM_SHARE * ram_bytes


def may_read_in_place(
    layout: ExpertLayout, config: EngineConfig, quotas: list[int] | None, n_buffers: int, ram_bytes: int
) -> bool:
    """Whether a DeviceExpertStore may come to read experts where they lie in host memory."""
    if quotas is not None and sum(quotas) == layout.n_experts:
        return False
    widest = max(layer.n_experts for layer in layout.layers)
    brings_all = min(n_buffers, MAX_COMERS) >= widest and home_bytes(layout) <= ram_bytes
    return not (config.fill_on_read and config.prefetch and brings_all)


def cpu_share(
    store: ExpertStore | None, model: ModelConfig, config: EngineConfig, device: str, threads: int | None
) -> CpuExperts | None:
    """What computes missed experts on the CPU: where that was asked for, and experts are missed at all."""
    if not config.cpu_experts or device == "cpu" or not isinstance(store, DeviceExpertStore) or not store.by_device:
        return None
    if config.deterministic:
        log.warning("no expert is computed on the CPU: results are asked for that do not depend on placement")
        return None
    specs = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeSpec)]
    widths = [spec.latent_size or model.n_embd for spec in specs]
    store.helpers.append(shared := CpuExperts(store, backends.create("cpu", threads), specs, widths))
    store.chooser.cpu = shared
    return shared


def expert_ram_bytes(config: EngineConfig, device: str, layout: PoolLayout) -> int:
    """Host memory that experts outside a device's pool may take: what snapshots and swapped requests leave."""
    others = snapshot_ram_bytes(config, device, layout) + swap_ram_bytes(config, device)
    return max(0, ram_bytes(config) - others)


def wave_buffers(model: ModelConfig, layout: ExpertLayout, pool_bytes: int) -> int:
    """Loading buffers of a store that brings experts in waves, in experts."""
    specs = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeSpec)]
    return buffer_experts(layout, max(spec.top_k for spec in specs), pool_bytes)


@dataclass(slots=True)
class LateStore:
    """Stands in for the store while layers are built: the store needs the pool, whose size needs the layers."""

    store: ExpertStore | None = None
    cpu_experts: CpuExperts | None = None

    def waves(self, layer_slot: int, ids: Array, positions: Array) -> Any:
        """See forward.context.ExpertReader."""
        assert self.store is not None
        return self.store.waves(layer_slot, ids, positions)

    def settled(self, layer_slot: int) -> ExpertTable | None:
        """See forward.context.ExpertReader."""
        assert self.store is not None
        return self.store.settled(layer_slot)

    @property
    def foresees(self) -> bool:
        """See forward.context.ExpertReader."""
        return isinstance(self.store, DeviceExpertStore) and self.store.foresees

    def foresee(self, layer_slot: int, ids: Array, positions: Array) -> None:
        """See forward.context.ExpertReader."""
        assert isinstance(self.store, DeviceExpertStore)
        self.store.foresee(layer_slot, ids, positions)

    def lend(self, layer_slot: int, x: Act, ids: Array, weights: Array, spec: MoeSpec) -> Any:
        """See forward.context.ExpertReader."""
        return None if self.cpu_experts is None else self.cpu_experts.lend(layer_slot, x, ids, weights, spec)


@dataclass(slots=True)
class StoreParts:
    """What stores are made of."""

    layout: ExpertLayout
    pool: PagePool
    source: ExpertSource
    ops: Ops
    copier: Callable[[], Copier]
    biases: list[dict[str, Array]]
    factors: list[dict[str, Array]]
    quotas: list[int] | None
    room: ExpertRoom
    config: EngineConfig
    n_threads: int

    def host(self, n_buffers: int) -> HostExpertStore:
        """For a pool in RAM."""
        config = self.config
        return HostExpertStore(
            self.layout, self.pool, ExpertView(self.pool), self.source, self.copier(), self.biases, n_buffers,
            self.quotas, self.room.may_grow, config.fill_on_read, self.n_threads, config.residency, self.factors,
        )  # fmt: skip

    def tiered(self, n_buffers: int, n_ram_bytes: int) -> TieredExpertStore:
        """For a device and experts on disk."""
        config = self.config
        return TieredExpertStore(
            self.layout, self.pool, ExpertView(self.pool), self.source, self.ops, self.copier(), self.biases, n_buffers,
            self.quotas, self.room.may_grow, n_ram_bytes, config.fill_on_read, self.n_threads, config.residency,
            self.factors,
        )  # fmt: skip

    def device(self, n_buffers: int, n_ram_bytes: int) -> DeviceExpertStore | None:
        """For a device that reads host memory in place; None, and a line in the log, where too little can be pinned."""
        config, layout = self.config, self.layout
        store = DeviceExpertStore(
            layout, self.pool, ExpertView(self.pool), self.source, self.ops, self.copier(), self.biases, self.quotas,
            self.room.may_grow, n_ram_bytes, self.n_threads, config.residency, self.factors, config.fill_on_read,
            n_buffers, config.prediction, config.in_place,
        )  # fmt: skip
        outside_bytes = layout.n_pages * layout.page_bytes
        if not store.by_device:
            outside_bytes = max(0, outside_bytes - self.pool.total_bytes)
            self._bound_absent(n_ram_bytes)
        try:
            if outside_bytes:
                store.arena.reserve(outside_bytes + outside_bytes // 64 + BLOCK_BYTES)
        except PinningError as error:
            log.warning("%s: experts outside the pool come through staging buffers", error)
            store.close()
            return None
        return store

    def _bound_absent(self, n_ram_bytes: int) -> None:
        """No more experts may leave the pool than host memory takes."""
        largest = self.layout.max_pages * self.layout.page_bytes
        n_most = int(RAM_SHARE * n_ram_bytes / largest)
        limit = self.room.offload_limit
        if n_most < self.layout.n_experts:
            self.room.offload_limit = n_most if limit is None else min(limit, n_most)
