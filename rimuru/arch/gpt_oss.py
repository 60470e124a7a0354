"""gpt-oss: sinks, a window in every other layer, biased experts (facts section 4.10)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig
from rimuru.arch.windows import windowed_layers

NAMES = ("gpt-oss",)
MODELS = {"gpt-oss": "gpt-oss-20b, gpt-oss-120b"}
RUNNABLE = {"gpt-oss": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """The router takes the top-k of its raw logits and a softmax over them."""
    width = base.per_layer("expert_feed_forward_length")
    window = base.count("attention.sliding_window", None, 1)
    windowed = windowed_layers(base, 2)
    full_rope = base.rope("half")
    window_rope = base.rope("half", freq_base=base.number("rope.freq_base_swa", full_rope.freq_base))

    def layer(index: int) -> LayerSpec:
        attention = base.attention(
            index,
            window_rope if windowed[index] else full_rope,
            bias="required",
            output_bias=True,
            sinks=True,
            window=window if windowed[index] else None,
        )
        ffn = base.moe(
            index,
            width[index],
            gating="softmax_selected",
            activation="swiglu_oai",
            expert_bias=True,
            selection_bias=False,
        )
        return LayerSpec(index, attention, ffn, ffn_norm="post_attention_norm.weight")

    return base.config(base.layers(layer), tied=False)
