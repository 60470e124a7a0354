"""phi3: fused matrices, rope factors by context (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("phi3",)
MODELS = {"phi3": "Phi-3, Phi-4 (text)"}
RUNNABLE = {"phi3": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """ffn_up holds the gate rows, then the up rows. The window key is not used: all layers see everything."""
    rope = base.rope("half")

    def layer(index: int) -> LayerSpec:
        fused = not base.has(index, "attn_q.weight")
        return LayerSpec(index, base.attention(index, rope, fused_qkv=fused), base.dense(index, fused_gate_up=True))

    return base.config(base.layers(layer))
