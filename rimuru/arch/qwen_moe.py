"""qwen2moe (Qwen1.5-MoE, Qwen2-57B-A14B) and qwen3moe (Qwen3-30B-A3B, 235B), facts sections 4.1 and 4.2."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("qwen2moe", "qwen3moe")
MODELS = {
    "qwen2moe": "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    "qwen3moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
}
RUNNABLE = {"qwen2moe": ("cpu", "cuda"), "qwen3moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    return _qwen2moe(base) if base.architecture == "qwen2moe" else _qwen3moe(base)


def expert_width(base: Base, layer: int) -> int:
    """expert_feed_forward_length, by default feed_forward_length / expert_used_count (all Qwen MoE models)."""
    top_k = max(1, base.per_layer("expert_used_count", 0)[layer])
    return base.per_layer("expert_feed_forward_length", [width // top_k for width in base.ffn_width])[layer]


def gated_shared_expert(base: Base, layer: int) -> SharedExpertSpec:
    """The shared expert of Qwen models, times sigmoid(ffn_gate_inp_shexp . x)."""
    width = base.count("expert_shared_feed_forward_length", base.ffn_width[layer])
    base.check(width > 0, f"key {base.key('expert_shared_feed_forward_length')} is {width}, must be positive")
    return SharedExpertSpec(width, sigmoid_gate=True)


def _qwen2moe(base: Base) -> ModelConfig:
    rope = base.rope("half")

    def layer(index: int) -> LayerSpec:
        ffn = base.moe(index, expert_width(base, index), shared=gated_shared_expert(base, index), selection_bias=False)
        return LayerSpec(index, base.attention(index, rope, bias="required"), ffn)

    return base.config(base.layers(layer), tied=False)


def _qwen3moe(base: Base) -> ModelConfig:
    rope = base.rope("half")

    def layer(index: int) -> LayerSpec:
        ffn = base.moe(index, expert_width(base, index), renormalise=True, selection_bias=False)
        return LayerSpec(index, base.attention(index, rope, qk_norm="head"), ffn)

    return base.config(base.layers(layer))
