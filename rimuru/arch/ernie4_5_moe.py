"""ernie4_5-moe: ERNIE 4.5 with experts (facts section 4.15)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig, SharedExpertSpec

NAMES = ("ernie4_5-moe",)
MODELS = {"ernie4_5-moe": "ERNIE 4.5 with experts"}
RUNNABLE = {"ernie4_5-moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """Every step-th layer after the leading dense ones has experts. Files may hold an attention output bias: unused."""
    rope = base.rope("adjacent")
    width = base.per_layer("expert_feed_forward_length")
    n_dense, step = base.count("leading_dense_block_count", 0), base.count("interleave_moe_layer_step", None, 1)
    shared_width = base.count("expert_shared_feed_forward_length", 0)
    shared = SharedExpertSpec(shared_width, sigmoid_gate=False) if shared_width else None

    def layer(index: int) -> LayerSpec:
        attention = base.attention(index, rope, output_bias=False)
        has_experts = index >= n_dense and (index + 1) % step == 0
        ffn = base.moe(index, width[index], renormalise=True, shared=shared) if has_experts else base.dense(index)
        return LayerSpec(index, attention, ffn)

    unused = frozenset(f"blk.{index}.attn_output.bias" for index in range(base.n_layers))
    return base.config(base.layers(layer), ignored_tensors=unused)
