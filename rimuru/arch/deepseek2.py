"""deepseek2: DeepSeek-V2, V3, R1, Kimi-K2, GLM-4.7-Flash: latent attention (facts section 4.9)."""

from __future__ import annotations

import math
from dataclasses import replace

from rimuru.arch.common import SIGMOID, SOFTMAX, Base
from rimuru.arch.spec import LayerSpec, MlaSpec, ModelConfig, SharedExpertSpec

NAMES = ("deepseek2",)
MODELS = {"deepseek2": "DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, GLM-4.7-Flash"}
RUNNABLE = {"deepseek2": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    n_dense = base.count("leading_dense_block_count", 0)
    expert_width = base.per_layer("expert_feed_forward_length")
    n_shared = base.count("expert_shared_count", None)
    # GLM-4.7-Flash files lack the gating key and use a sigmoid; its size is all that tells them apart.
    is_flash = base.n_layers in (47, 48) and base.n_vocab == 154880
    gating = base.gating(SIGMOID if is_flash else SOFTMAX)

    def layer(index: int) -> LayerSpec:
        if index < n_dense:
            return LayerSpec(index, _latent_attention(base, index), base.dense(index))
        ffn = base.moe(
            index,
            expert_width[index],
            gating=gating,
            renormalise=base.flag("expert_weights_norm", False),
            weights_scale=base.weights_scale(),
            shared=SharedExpertSpec(expert_width[index] * n_shared, sigmoid_gate=False) if n_shared else None,
        )
        return LayerSpec(index, _latent_attention(base, index), ffn)

    return base.config(base.layers(layer))


def _latent_attention(base: Base, layer: int) -> MlaSpec:
    """Files of before the latent cache give key and value length per head; newer ones in the *_mla keys."""
    n_head, rank = base.n_head[layer], base.count("attention.kv_lora_rank", None, 1)
    key_dim = base.count("attention.key_length_mla", base.key_dim, 1)
    value_dim = base.count("attention.value_length_mla", base.value_dim, 1)
    n_rot = base.count("rope.dimension_count", None, 2)
    base.check(n_head > 0, f"block {layer} has no query heads")
    base.check(n_rot < key_dim, f"{n_rot} rotated dims leave nothing of {key_dim} key dims a head")
    rope = base.rope("adjacent", n_rot)
    scale = 1 / math.sqrt(key_dim)
    if rope.yarn is not None:
        log_factor = math.log(rope.yarn.factor)
        multiplier = base.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        # With the multiplier, cos and sin stay as they are and the scores get it instead (mscale = mscale_all_dim).
        growth = 1 + 0.1 * (multiplier or 1.0) * log_factor
        scale *= growth * growth
        if multiplier:
            rope = replace(rope, magnitude=rope.magnitude / (1 + 0.1 * log_factor))
    return MlaSpec(
        n_head=n_head,
        q_lora_rank=base.count("attention.q_lora_rank", 0) or None,
        kv_lora_rank=rank,
        nope_dim=key_dim - n_rot,
        value_dim=value_dim,
        rope=rope,
        scale=scale,
        fused_kv_b=base.has(layer, "attn_kv_b.weight"),
    )
