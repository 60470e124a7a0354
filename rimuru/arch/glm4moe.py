"""glm4moe: GLM-4.5 to 4.7, and the text part of 4.5V and 4.6V (facts section 4.11)."""

from __future__ import annotations

from rimuru.arch.common import SIGMOID, Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("glm4moe",)
MODELS = {"glm4moe": "GLM-4.5, 4.5-Air, 4.6, 4.7, 4.5V and 4.6V (text)"}
RUNNABLE = {"glm4moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """For text all rope sections of the vision models see the same position, so they are the plain rope."""
    rope = base.rope("half")
    width = base.per_layer("expert_feed_forward_length")
    n_shared, n_dense = base.count("expert_shared_count", None), base.count("leading_dense_block_count", 0)
    gating = base.gating(SIGMOID)

    def layer(index: int) -> LayerSpec:
        attention = base.attention(index, rope, qk_norm=base.qk_norm(index))
        ffn = (
            base.dense(index)
            if index < n_dense
            else base.moe(
                index,
                width[index],
                gating=gating,
                renormalise=base.flag("expert_weights_norm", False),
                weights_scale=base.weights_scale(),
                selection_bias=True,
                shared=SharedExpertSpec(width[index] * n_shared, sigmoid_gate=False) if n_shared else None,
            )
        )
        return LayerSpec(index, attention, ffn, ffn_norm="post_attention_norm.weight")

    return base.config(base.layers(layer))
