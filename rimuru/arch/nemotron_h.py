"""nemotron_h and nemotron_h_moe: one sublayer a block, Mamba2, attention or feed-forward (facts section 4.5)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.mamba import mamba2
from rimuru.arch.spec import DenseFfnSpec, LayerSpec, ModelConfig, MoeSpec, SharedExpertSpec

NAMES = ("nemotron_h", "nemotron_h_moe")
MODELS = {"nemotron_h": "Nemotron-H", "nemotron_h_moe": "Nemotron 3 Nano, Super"}
RUNNABLE = {"nemotron_h": ("cpu", "cuda"), "nemotron_h_moe": ("cpu", "cuda")}
EPS_KEY = "attention.layer_norm_epsilon"


def read_config(base: Base) -> ModelConfig:
    """No rope; relu^2 without a gate. The RMS epsilon has a key of its own and defaults to the other one."""
    eps = base.number("attention.layer_norm_rms_epsilon", base.norm_eps)
    base.check(eps > 0, f"key {base.key('attention.layer_norm_rms_epsilon')} is {eps}, must be positive")

    def layer(index: int) -> LayerSpec:
        if base.ffn_width[index]:
            return LayerSpec(index, None, _ffn(base, index), ffn_norm="attn_norm.weight")
        mixer = mamba2(base) if base.n_head_kv[index] == 0 else base.attention(index, None)
        return LayerSpec(index, mixer, None)

    return base.config(base.layers(layer), norm_eps=eps)


def _ffn(base: Base, layer: int) -> MoeSpec | DenseFfnSpec:
    if base.architecture == "nemotron_h" or base.count("expert_count", 0) == 0:
        return base.dense(layer, activation="relu2", gated=False)
    top_k = max(1, base.per_layer("expert_used_count", 0)[layer])
    width = base.per_layer("expert_feed_forward_length", [width // top_k for width in base.ffn_width])[layer]
    shared_width = base.count("expert_shared_feed_forward_length", 0)
    return base.moe(
        layer,
        width,
        gating="sigmoid",
        renormalise=base.flag("expert_weights_norm", False),
        weights_scale=base.weights_scale(),
        activation="relu2",
        gated=False,
        selection_bias=True,
        latent_size=base.count("moe_latent_size", 0) or None,
        shared=SharedExpertSpec(shared_width, sigmoid_gate=False) if shared_width else None,
    )
