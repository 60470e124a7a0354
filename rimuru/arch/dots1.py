"""dots1: dots.llm1 (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("dots1",)
MODELS = {"dots1": "dots.llm1"}
RUNNABLE = {"dots1": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    rope = base.rope("half")
    width = base.per_layer("expert_feed_forward_length")
    n_shared, n_dense = base.count("expert_shared_count", 0), base.count("leading_dense_block_count", 0)
    gating = base.gating(None)

    def layer(index: int) -> LayerSpec:
        attention = base.attention(index, rope, qk_norm="head")
        if index < n_dense:
            return LayerSpec(index, attention, base.dense(index))
        ffn = base.moe(
            index,
            width[index],
            gating=gating,
            renormalise=base.flag("expert_weights_norm", False),
            weights_scale=base.weights_scale(),
            shared=SharedExpertSpec(width[index] * n_shared, sigmoid_gate=False) if n_shared else None,
        )
        return LayerSpec(index, attention, ffn)

    return base.config(base.layers(layer), tied=False)
