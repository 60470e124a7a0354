"""gemma3: four norms a block, windows in five of six layers (facts section 4.14)."""

from __future__ import annotations

import math

from rimuru.arch.common import Base
from rimuru.arch.spec import LayerSpec, ModelConfig
from rimuru.arch.windows import windowed_layers

NAMES = ("gemma3",)
MODELS = {"gemma3": "Gemma 3 (text)"}
RUNNABLE = {"gemma3": ("cpu", "cuda")}
N_LAYERS_27B = 62


def read_config(base: Base) -> ModelConfig:
    """Layers with a window have their own rope base and no scaling. The 27B model scales scores by n_embd / n_head."""
    full_rope = base.rope("half")
    window_rope = base.rope("half", freq_base=base.number("rope.freq_base_swa", 10000.0), scaled=False)
    window = base.count("attention.sliding_window", 0) or None
    windowed = windowed_layers(base, 6) if window else (False,) * base.n_layers

    def layer(index: int) -> LayerSpec:
        width = base.key_dim
        if base.n_layers == N_LAYERS_27B:
            width = base.n_embd // max(1, base.n_head[index])
        attention = base.attention(
            index,
            window_rope if windowed[index] else full_rope,
            qk_norm="head",
            scale=1 / math.sqrt(width),
            window=window if windowed[index] else None,
        )
        return LayerSpec(
            index,
            attention,
            base.dense(index, activation="gelu_tanh"),
            post_mixer_norm="post_attention_norm.weight",
            post_ffn_norm="post_ffw_norm.weight",
        )

    return base.config(
        base.layers(layer),
        embedding_scale=math.sqrt(base.n_embd),
        final_softcap=base.number("final_logit_softcapping", 0.0) or None,
    )
