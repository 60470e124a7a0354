"""deepseek4: DeepSeek-V4 (facts section 4.13). Described for planning: what its tensors and its cache are."""

from __future__ import annotations

import math

from rimuru.arch.common import SQRT_SOFTPLUS, Base
from rimuru.arch.rope import scaling
from rimuru.arch.spec import CompressedAttentionSpec, LayerSpec, ModelConfig, MoeSpec, RopeSpec, SharedExpertSpec

NAMES = ("deepseek4",)
MODELS = {"deepseek4": "DeepSeek-V4"}
RUNNABLE: dict[str, tuple[str, ...]] = {}


def read_config(base: Base) -> ModelConfig:
    ratios = base.gguf.kv.require_list(base.key("attention.compress_ratios"), int)
    base.check(
        len(ratios) >= base.n_layers and all(ratio in (0, 4, 128) for ratio in ratios),
        f"key {base.key('attention.compress_ratios')} must hold 0, 4 or 128 for each of {base.n_layers} layers",
    )
    base.gguf.kv.expect(base.key("expert_gating_func"), int, (SQRT_SOFTPLUS,))
    return base.config(
        base.layers(lambda index: LayerSpec(index, _attention(base, index, ratios[index]), _moe(base, index))),
        tied=False,
        n_streams=base.count("hyper_connection.count", None, 1),
        ignored_tensors=frozenset(f"blk.{i}.exp_probs_b_vl.bias" for i in range(base.n_layers)),
    )


def _attention(base: Base, layer: int, ratio: int) -> CompressedAttentionSpec:
    n_head, n_groups = base.n_head[layer], base.count("attention.output_group_count", None, 1)
    base.check(n_head > 0 and n_head % n_groups == 0, f"{n_head} heads do not fall into {n_groups} output groups")
    n_rot = base.count("rope.dimension_count", base.key_dim, 2)
    base.check(n_rot % 2 == 0 and n_rot <= base.key_dim, f"{n_rot} rotated dims do not fit in heads of {base.key_dim}")
    key = "attention.compress_rope_freq_base" if ratio else "rope.freq_base"
    freq_base = base.number(key) if ratio else base.number(key, 10000.0)
    scale, yarn = scaling(base) if ratio else (1.0, None)
    return CompressedAttentionSpec(
        n_head=n_head,
        head_dim=base.key_dim,
        q_lora_rank=base.count("attention.q_lora_rank", None, 1),
        n_output_groups=n_groups,
        output_lora_rank=base.count("attention.output_lora_rank", None, 1),
        window=base.count("attention.sliding_window", None, 1),
        compress_ratio=ratio,
        rope=RopeSpec(n_rot, "adjacent", freq_base, scale, yarn, tail=True),
        scale=1 / math.sqrt(base.key_dim),
        n_index_heads=base.count("attention.indexer.head_count", None, 1),
        index_dim=base.count("attention.indexer.key_length", None, 1),
        index_top_k=base.count("attention.indexer.top_k", None, 1),
    )


def _moe(base: Base, layer: int) -> MoeSpec:
    width = base.per_layer("expert_feed_forward_length")[layer]
    hashed = layer < base.count("hash_layer_count", None)
    limit = base.gguf.kv.per_layer(base.key("swiglu_clamp_exp"), float, base.n_blocks)[layer]
    return base.moe(
        layer,
        width,
        gating="sqrt_softplus",
        renormalise=base.gguf.kv.require(base.key("expert_weights_norm"), bool),
        weights_scale=base.number("expert_weights_scale") or 1.0,
        activation="swiglu_clamp",
        activation_limit=limit,
        selection_bias=not hashed,
        hash_routed=hashed,
        shared=SharedExpertSpec(width * base.count("expert_shared_count", None, 1), sigmoid_gate=False),
    )
