"""Engines on the CPU with the device's store of experts: the twin of what runs on a card."""

from __future__ import annotations

from typing import Any

from rimuru.engine import build
from rimuru.engine.room import ExpertRoom
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.memory.views import ExpertView


def device_store(
    builder: build._Builder, biases: list[Any], factors: list[Any], room: ExpertRoom, ram_bytes: int = 1 << 30
) -> DeviceExpertStore:
    """Stands for `_Builder._make_store`. ram_bytes: what the store may take of host memory."""
    layout, config = builder.layout.expert, builder.config
    assert layout is not None
    builder.source = builder.source or build.GgufExpertSource(builder.gguf, layout)
    return DeviceExpertStore(
        layout, builder.pool, ExpertView(builder.pool), builder.source, builder.ops, builder.ops.copier(), biases,
        builder.quotas, room.may_grow, ram_bytes, 2, config.residency, factors, config.fill_on_read,
        builder.n_buffers if config.prefetch else 0, config.prediction, config.in_place,
    )  # fmt: skip
