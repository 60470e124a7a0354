"""qwen3next, qwen35 and qwen35moe: gated DeltaNet layers among attention layers (facts section 4.3)."""

from __future__ import annotations

from rimuru.arch.common import Base
from rimuru.arch.qwen_moe import expert_width, gated_shared_expert
from rimuru.arch.spec import DeltaNetSpec, LayerSpec, ModelConfig

NAMES = ("qwen3next", "qwen35", "qwen35moe")
MODELS = {
    "qwen3next": "Qwen3-Next-80B-A3B",
    "qwen35": "Qwen3.5, Qwen3.6 (dense)",
    "qwen35moe": "Qwen3.5, Qwen3.6 with experts",
}
RUNNABLE = {"qwen3next": ("cpu", "cuda"), "qwen35": ("cpu", "cuda"), "qwen35moe": ("cpu", "cuda")}


def read_config(base: Base) -> ModelConfig:
    """For text all rope sections see the same position, so the sectioned rope of qwen35* is the plain one."""
    if base.architecture != "qwen3next":
        _check_sections(base)
    rope = base.rope("half")
    recurrent = _recurrent(base)

    def layer(index: int) -> LayerSpec:
        mixer = (
            _delta_net(base, index)
            if recurrent[index]
            else base.attention(index, rope, qk_norm="head", output_gate=True)
        )
        ffn = (
            base.dense(index)
            if base.architecture == "qwen35"
            else base.moe(
                index,
                expert_width(base, index),
                renormalise=True,
                selection_bias=False,
                shared=gated_shared_expert(base, index),
            )
        )
        return LayerSpec(index, mixer, ffn, ffn_norm="post_attention_norm.weight")

    return base.config(base.layers(layer), ignored_tensors=frozenset(("cls.output.weight", "cls.output.bias")))


def _check_sections(base: Base) -> None:
    key = base.key("rope.dimension_sections")
    sections = base.gguf.kv.require_list(key, int)
    n_rot = base.count("rope.dimension_count", base.key_dim)
    base.check(
        len(sections) == 4 and min(sections) >= 0 and sum(sections) == n_rot // 2 and sections[3] == 0,
        f"key {key} is {list(sections)}; expected four numbers whose sum is {n_rot // 2}, the last one 0",
    )


def _recurrent(base: Base) -> tuple[bool, ...]:
    flags = base.gguf.kv.get_list(base.key("attention.recurrent_layers"), bool)
    if flags is None:
        interval = base.count("full_attention_interval", 4, 1)
        return tuple((index + 1) % interval != 0 for index in range(base.n_layers))
    base.check(
        len(flags) == base.n_blocks,
        f"key {base.key('attention.recurrent_layers')} has {len(flags)} entries for {base.n_blocks} blocks",
    )
    return tuple(bool(flag) for flag in flags)


def _delta_net(base: Base, layer: int) -> DeltaNetSpec:
    head_dim = base.count("ssm.state_size", None, 1)
    n_key, n_value = base.count("ssm.group_count", None, 1), base.count("ssm.time_step_rank", None, 1)
    inner = base.count("ssm.inner_size", None, 1)
    base.check(n_value % n_key == 0, f"{n_value} value heads (ssm.time_step_rank) are no multiple of {n_key} key heads")
    base.check(inner == n_value * head_dim, f"ssm.inner_size is {inner}, but {n_value} heads of {head_dim} are stored")
    is_next = base.architecture == "qwen3next"
    return DeltaNetSpec(
        n_key_heads=n_key,
        n_value_heads=n_value,
        head_dim=head_dim,
        conv_kernel=base.count("ssm.conv_kernel", None, 2),
        head_order="grouped" if is_next else "tiled",
        fused_in=is_next and base.has(layer, "ssm_in.weight"),
        fused_ba=is_next,
    )
