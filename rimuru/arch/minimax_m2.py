"""minimax-m2: MiniMax-M2 (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("minimax-m2",)
MODELS = {"minimax-m2": "MiniMax-M2"}
RUNNABLE = {"minimax-m2": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """Experts are feed_forward_length wide; the key of their own width must be present all the same."""
    rope = base.rope("half")
    base.per_layer("expert_feed_forward_length")
    gating = base.gating(None)

    def layer(index: int) -> LayerSpec:
        ffn = base.moe(index, base.ffn_width[index], gating=gating, renormalise=True, selection_bias=True)
        return LayerSpec(index, base.attention(index, rope, qk_norm="vector"), ffn)

    return base.config(base.layers(layer), tied=False)
