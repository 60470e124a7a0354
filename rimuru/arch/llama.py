"""llama: dense Llama models, and Mixtral, which is llama with experts (facts section 4.7)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig

NAMES = ("llama",)
MODELS = {"llama": "Llama 2 and 3, Mistral, Mixtral"}
RUNNABLE = {"llama": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """Adjacent-pair rope over the whole head; softmax top-k of the experts, renormalised."""
    rope = base.rope("adjacent")
    base.check(
        rope.n_rot == base.key_dim,
        f"key llama.rope.dimension_count is {rope.n_rot}, must be the head width {base.key_dim}",
    )
    has_experts = base.count("expert_count", 0) > 0

    def layer(index: int) -> LayerSpec:
        ffn = (
            base.moe(index, base.ffn_width[index], renormalise=True, selection_bias=False)
            if has_experts
            else base.dense(index)
        )
        return LayerSpec(index, base.attention(index, rope), ffn)

    return base.config(base.layers(layer))
