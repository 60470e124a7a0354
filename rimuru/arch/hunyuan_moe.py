"""hunyuan-moe: Hunyuan-A13B (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("hunyuan-moe",)
MODELS = {"hunyuan-moe": "Hunyuan-A13B"}
RUNNABLE = {"hunyuan-moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """Norms of q and k come after rope. Experts are feed_forward_length wide."""
    rope = base.rope("half")
    base.per_layer("expert_feed_forward_length")

    def layer(index: int) -> LayerSpec:
        width = base.ffn_width[index]
        shared = SharedExpertSpec(base.count("expert_shared_feed_forward_length", width, 1), sigmoid_gate=False)
        ffn = base.moe(index, width, renormalise=True, selection_bias=False, shared=shared)
        attention = base.attention(index, rope, qk_norm="head", qk_norm_after_rope=True)
        return LayerSpec(index, attention, ffn)

    return base.config(base.layers(layer))
