"""lfm2 and lfm2moe: short convolutions and attention (facts section 4.12)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import DenseFfnSpec, LayerSpec, ModelConfig, MoeSpec, ShortConvSpec

NAMES = ("lfm2", "lfm2moe")
MODELS = {"lfm2": "LFM2", "lfm2moe": "LFM2-8B-A1B, LFM2-24B-A2B"}
RUNNABLE = {"lfm2": ("cpu", "cuda"), "lfm2moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """A layer without KV heads is a short convolution. The final norm has a historical name."""
    rope = base.rope("half")
    kernel = base.count("shortconv.l_cache", None, 2)
    window = base.count("attention.sliding_window", 0) or None if base.architecture == "lfm2" else None

    def layer(index: int) -> LayerSpec:
        mixer = (
            ShortConvSpec(base.n_embd, kernel)
            if base.n_head_kv[index] == 0
            else base.attention(index, rope, qk_norm="head", window=window)
        )
        return LayerSpec(index, mixer, _ffn(base, index))

    return base.config(base.layers(layer), output_norm="token_embd_norm.weight")


def _ffn(base: Base, layer: int) -> DenseFfnSpec | MoeSpec:
    if base.architecture == "lfm2" or layer < base.count("leading_dense_block_count", 0):
        return base.dense(layer)
    width = base.per_layer("expert_feed_forward_length")[layer]
    return base.moe(layer, width, gating=base.gating(None), renormalise=True, selection_bias=True)
