"""One block, built from its LayerSpec by two tables: mixers and feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rimuru.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    MoeSpec,
    ShortConvSpec,
)
from rimuru.base.errors import UnsupportedModelError
from rimuru.forward.attention import Attention
from rimuru.forward.context import BuildContext
from rimuru.forward.ffn import DenseFfn, MoeFfn
from rimuru.forward.mla import LatentAttention
from rimuru.forward.recurrent import DeltaNet, Mamba1, Mamba2, ShortConv
from rimuru.ops.base import Act, Array, Step

MIXERS: dict[type, Callable[[int, Any, BuildContext], Any]] = {
    AttentionSpec: Attention,
    DeltaNetSpec: DeltaNet,
    Mamba1Spec: Mamba1,
    Mamba2Spec: Mamba2,
    MlaSpec: LatentAttention,
    ShortConvSpec: ShortConv,
}


class Sublayer:
    """x += residual_scale * part(norm(x)), or with a post norm x += residual_scale * post(part(norm(x)))."""

    def __init__(self, part: Any, norm: str, post_norm: str | None, index: int, build: BuildContext) -> None:
        self.part, self.ops, self.workspace, self.config = part, build.ops, build.workspace, build.config
        self.norm = build.reader.required_vector(f"blk.{index}.{norm}")
        self.post_norm = None if post_norm is None else build.reader.required_vector(f"blk.{index}.{post_norm}")
        build.workspace.need_act("normed", build.config.n_embd)
        if post_norm is not None:
            build.workspace.need_array("delta", build.config.n_embd)

    def forward(self, x: Array, step: Step) -> None:
        config, n = self.config, step.host.n_tokens
        normed: Act = self.workspace.act("normed", n, config.n_embd)
        self.ops.rms_norm(x, self.norm, config.norm_eps, normed, may_wait=True)
        if self.post_norm is None:
            self.part.forward(normed, x, True, config.residual_scale, step)
        else:
            delta = self.workspace.array("delta", n, config.n_embd)
            self.part.forward(normed, delta, False, 1.0, step)
            self.ops.add_norm(x, delta, self.post_norm, config.norm_eps, config.residual_scale)


def build_layer(spec: LayerSpec, layer_slot: int, build: BuildContext) -> list[Sublayer]:
    """The block's sublayers in order; `layer_slot` counts the blocks with experts before this one."""
    parts: list[Sublayer] = []
    if spec.mixer is not None:
        make = MIXERS.get(type(spec.mixer))
        if make is None:
            raise UnsupportedModelError(f"layers of kind {type(spec.mixer).__name__} cannot run yet")
        mixer = make(spec.index, spec.mixer, build)
        parts.append(Sublayer(mixer, spec.mixer_norm, spec.post_mixer_norm, spec.index, build))
    if isinstance(spec.ffn, MoeSpec):
        ffn: Any = MoeFfn(spec.index, layer_slot, spec.ffn, build)
        parts.append(Sublayer(ffn, spec.ffn_norm, spec.post_ffn_norm, spec.index, build))
    elif isinstance(spec.ffn, DenseFfnSpec):
        ffn = DenseFfn.from_spec(spec.index, spec.ffn, build)
        parts.append(Sublayer(ffn, spec.ffn_norm, spec.post_ffn_norm, spec.index, build))
    return parts
