"""granite, granitemoe and granitehybrid: Granite 3 and 4 (facts sections 4.4 and 4.15).

granite is granitemoe without experts: the same keys, four scales and rotation.
"""

from __future__ import annotations

import math

from rimuru.arch.common import Base
from rimuru.arch.mamba import mamba2
from rimuru.arch.spec import DenseFfnSpec, LayerSpec, ModelConfig, MoeSpec, RopeSpec, SharedExpertSpec

NAMES = ("granite", "granitemoe", "granitehybrid")
MODELS = {
    "granite": "Granite 3 (dense)",
    "granitemoe": "Granite 3 with experts",
    "granitehybrid": "Granite 4.0 H",
}
RUNNABLE = dict.fromkeys(NAMES, ("cpu", "cuda"))


def read_config(base: Base) -> ModelConfig:
    """Mamba2 layers are those without KV heads; four scales, of which 0 means off."""
    hybrid = base.architecture == "granitehybrid"
    rope = _rope(base, hybrid)
    logit_scale = base.number("logit_scale", 0.0 if hybrid else None)
    scale = base.number("attention.scale", 0.0) or 1 / math.sqrt(base.key_dim)

    def layer(index: int) -> LayerSpec:
        recurrent = hybrid and base.n_head_kv[index] == 0
        mixer = mamba2(base) if recurrent else base.attention(index, rope, scale=scale)
        return LayerSpec(index, mixer, _ffn(base, index))

    return base.config(
        base.layers(layer),
        embedding_scale=base.number("embedding_scale", 0.0) or 1.0,
        residual_scale=base.number("residual_scale", 0.0) or 1.0,
        logit_scale=1.0 / (logit_scale or 1.0),
    )


def _rope(base: Base, hybrid: bool) -> RopeSpec | None:
    # granitehybrid files say "no rope" through a key of another meaning (facts section 4.4).
    if hybrid and not base.flag("rope.scaling.finetuned", True):
        return None
    return base.rope("adjacent")


def _ffn(base: Base, layer: int) -> MoeSpec | DenseFfnSpec:
    if base.count("expert_count", 0) == 0:
        return base.dense(layer)
    shared_width = base.count("expert_shared_feed_forward_length", 0)
    shared = SharedExpertSpec(shared_width, sigmoid_gate=False) if shared_width else None
    return base.moe(layer, base.ffn_width[layer], renormalise=True, selection_bias=False, shared=shared)
