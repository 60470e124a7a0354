"""jamba: Mamba1 and attention layers, experts in some of them (facts section 4.6)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.mamba import mamba1
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("jamba",)
MODELS = {"jamba": "Jamba"}
RUNNABLE = {"jamba": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """No rope. A layer without KV heads is Mamba1; one with a router has experts (softmax, not renormalised)."""

    def layer(index: int) -> LayerSpec:
        mixer = mamba1(base) if base.n_head_kv[index] == 0 else base.attention(index, None)
        has_experts = base.has(index, "ffn_gate_inp.weight")
        ffn = base.moe(index, base.ffn_width[index], selection_bias=False) if has_experts else base.dense(index)
        return LayerSpec(index, mixer, ffn)

    return base.config(base.layers(layer))
