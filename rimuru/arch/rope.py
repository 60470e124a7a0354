"""Rotary embedding parameters from the rope.* keys (facts section 3.2)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from rimuru.arch.spec import Pairing, RopeSpec, YarnSpec
from rimuru.base.errors import UnsupportedModelError

if TYPE_CHECKING:
    from rimuru.arch.common import Base

SCALING_TYPES = ("none", "linear", "yarn", "longrope")


def rope_spec(base: Base, pairing: str, n_rot: int, freq_base: float | None, scaled: bool) -> RopeSpec:
    """Rotation of n_rot dims; freq_base None = the key rope.freq_base. `scaled` False leaves scaling keys aside."""
    base.check(
        n_rot > 0 and n_rot % 2 == 0, f"key {base.key('rope.dimension_count')}: {n_rot} rotated dims; must be even"
    )
    freq_base = base.number("rope.freq_base", 10000.0) if freq_base is None else freq_base
    base.check(freq_base > 0, f"key {base.key('rope.freq_base')} is {freq_base}, must be positive")
    scale, yarn = scaling(base) if scaled else (1.0, None)
    magnitude = base.number("rope.scaling.attn_factor", 1.0) if scaled else 1.0
    if yarn is not None:
        magnitude *= 1 + 0.1 * math.log(yarn.factor)
    return RopeSpec(
        n_rot=n_rot,
        pairing=cast(Pairing, pairing),
        freq_base=freq_base,
        freq_scale=scale,
        yarn=yarn,
        magnitude=magnitude,
        factors_tensor=_factors_tensor(base),
    )


def scaling(base: Base) -> tuple[float, YarnSpec | None]:
    """Linear frequency scale, and YaRN's parameters where the file asks for it (the scale is then 1)."""
    kind = base.gguf.kv.get(base.key("rope.scaling.type"), str, "linear")
    if kind not in SCALING_TYPES:
        raise UnsupportedModelError(
            f"{base.gguf.path}: key {base.key('rope.scaling.type')} is {kind!r:.80}; "
            f"known are {', '.join(SCALING_TYPES)}"
        )
    factor = base.number("rope.scaling.factor", base.number("rope.scale_linear", 0.0))
    base.check(factor >= 0, f"key {base.key('rope.scaling.factor')} is {factor}, must be positive")
    if kind == "none" or factor == 0:
        return 1.0, None
    if kind == "yarn":
        return 1.0, YarnSpec(factor, original_context(base))
    return 1.0 / factor, None


def original_context(base: Base) -> int:
    return base.count("rope.scaling.original_context_length", base.context_length, 1)


def _factors_tensor(base: Base) -> str | None:
    if "rope_freqs.weight" in base.gguf.tensors:
        return "rope_freqs.weight"
    name = "rope_factors_long.weight" if base.context > original_context(base) else "rope_factors_short.weight"
    return name if name in base.gguf.tensors else None
