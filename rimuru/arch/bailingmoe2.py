"""bailingmoe2: Ling 2 and Ring 2 (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("bailingmoe2",)
MODELS = {"bailingmoe2": "Ling 2, Ring 2"}
RUNNABLE = {"bailingmoe2": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    rope = base.rope("half")
    width = base.per_layer("expert_feed_forward_length")
    n_shared, n_dense = base.count("expert_shared_count", 0), base.count("leading_dense_block_count", 0)
    gating = base.gating(None)

    def layer(index: int) -> LayerSpec:
        attention = base.attention(index, rope, fused_qkv=True, qk_norm="head")
        if index < n_dense:
            return LayerSpec(index, attention, base.dense(index))
        shared_width = (base.count("expert_shared_feed_forward_length", 0) or width[index]) * n_shared
        ffn = base.moe(
            index,
            width[index],
            gating=gating,
            renormalise=base.flag("expert_weights_norm", False),
            weights_scale=base.weights_scale(),
            shared=SharedExpertSpec(shared_width, sigmoid_gate=False) if shared_width else None,
        )
        return LayerSpec(index, attention, ffn)

    return base.config(base.layers(layer), tied=False)
