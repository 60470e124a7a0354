"""olmoe: OLMoE-1B-7B (facts section 4.8)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("olmoe",)
MODELS = {"olmoe": "OLMoE-1B-7B"}
RUNNABLE = {"olmoe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """Norms over the whole q and k vectors before rope; softmax top-k, not renormalised."""
    rope = base.rope("half")

    def layer(index: int) -> LayerSpec:
        ffn = base.moe(index, base.ffn_width[index], selection_bias=False)
        return LayerSpec(index, base.attention(index, rope, qk_norm="vector"), ffn)

    return base.config(base.layers(layer), tied=False)
