"""Keys of published models (facts section 5; families without a row there: their published configuration files).
Context lengths and vocabularies are those of the published files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Keys without the architecture's prefix, and the optional tensors such files have.

    A name in `optional` may hold `*` for the block number. `only` limits such names to some blocks.
    """

    architecture: str
    n_vocab: int
    keys: dict[str, Any]
    tied: bool = False
    optional: tuple[str, ...] = ()
    only: Callable[[int], bool] = field(default=lambda _: True)

    def metadata(self) -> dict[str, Any]:
        return {f"{self.architecture}.{key}": value for key, value in self.keys.items()}

    def optional_tensors(self) -> list[str]:
        blocks = [index for index in range(self.keys.get("block_count", 0)) if self.only(index)]
        found = [] if self.tied else ["output.weight"]
        for name in self.optional:
            found += [name.replace("*", str(index)) for index in blocks] if "*" in name else [name]
        return found


def _keys(
    layers: int,
    embd: int,
    heads: int,
    kv_heads: int | list[int],
    ff: int | list[int],
    head_dim: int = 128,
    context: int = 131072,
    eps: float = 1e-6,
    rope_base: float = 1e6,
    **more: Any,
) -> dict[str, Any]:
    keys = {
        "block_count": layers,
        "embedding_length": embd,
        "context_length": context,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": rope_base,
    }
    return keys | {key.replace("__", "."): value for key, value in more.items()}


def _experts(n: int, used: int, width: int, shared: int = 0, **more: Any) -> dict[str, Any]:
    keys = {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": width}
    return keys | ({"expert_shared_feed_forward_length": shared} if shared else {}) | more


def _delta(n_value_heads: int) -> dict[str, Any]:
    keys = {"conv_kernel": 4, "state_size": 128, "group_count": 16, "time_step_rank": n_value_heads}
    return {f"ssm.{key}": value for key, value in keys.items()} | {
        "ssm.inner_size": n_value_heads * 128,
        "full_attention_interval": 4,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
    }


def _mamba2(n_heads: int, head_dim: int, groups: int) -> dict[str, Any]:
    keys = {"conv_kernel": 4, "state_size": 128, "group_count": groups, "time_step_rank": n_heads}
    return {f"ssm.{key}": value for key, value in keys.items()} | {"ssm.inner_size": n_heads * head_dim}


def _qwen3next(
    arch: str, layers: int, embd: int, heads: tuple[int, int], value_heads: int, vocab: int, **experts: Any
) -> ModelShape:
    keys = _keys(layers, embd, *heads, experts.pop("ff", 0), 256, 262144, rope_base=1e7)
    return ModelShape(arch, vocab, keys | experts | _delta(value_heads))


def _latent(
    layers: int, embd: int, heads: int, ff: int, dims: tuple[int, int, int], q_rank: int = 0, **more: Any
) -> dict[str, Any]:
    nope, n_rot, value = dims
    keys = _keys(layers, embd, heads, 1, ff, 512 + n_rot, 163840, rope_base=1e4)
    keys |= {
        "attention.value_length": 512,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": nope + n_rot,
        "attention.value_length_mla": value,
        "rope.dimension_count": n_rot,
    }
    return keys | ({"attention.q_lora_rank": q_rank} if q_rank else {}) | more


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"type": "yarn", "factor": factor, "original_context_length": original} | more
    return {f"rope.scaling.{key}": value for key, value in keys.items()}


def _granite(embd: int, heads: tuple[int, int], ff: int, mamba_heads: int, experts: dict[str, Any]) -> ModelShape:
    kv_heads = [heads[1] if index % 10 == 5 else 0 for index in range(40)]
    keys = _keys(40, embd, heads[0], kv_heads, ff, 128, 131072, 1e-5, 1e4)
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 1 / 128, "logit_scale": 6.0}
    more = {"rope.scaling.finetuned": False}
    return ModelShape("granitehybrid", 100352, keys | experts | scales | more | _mamba2(mamba_heads, 64, 1), tied=True)


def _nemotron_nano() -> ModelShape:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    keys = _keys(
        len(pattern), 2688, 32, [2 if kind == "*" else 0 for kind in pattern],
        [1856 if kind == "E" else 0 for kind in pattern], context=262144, eps=1e-5, rope_base=1e4,
    ) | {"attention.layer_norm_epsilon": 1e-5}  # fmt: skip
    routing = {"expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_shared_count": 1}
    return ModelShape("nemotron_h_moe", 131072, keys | _experts(128, 6, 1856, 3712) | routing | _mamba2(64, 64, 8))


def _gemma3(layers: int, embd: int, heads: tuple[int, int], ff: int, head_dim: int, window: int) -> ModelShape:
    keys = _keys(layers, embd, *heads, ff, head_dim, 131072)
    if layers > 26:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return ModelShape("gemma3", 262144, keys | {"attention.sliding_window": window}, tied=True)


def _glm(
    layers: int, embd: int, experts: int, width: int, dense: tuple[int, int], scale: float, qk_norm: bool
) -> ModelShape:
    keys = _keys(layers, embd, 96, 8, dense[1], rope_base=1e6, eps=1e-5) | {
        "rope.dimension_count": 64, "leading_dense_block_count": dense[0], "expert_shared_count": 1,
        "expert_weights_norm": True, "expert_weights_scale": scale, "expert_gating_func": 2,
    }  # fmt: skip
    biases = tuple(f"blk.*.attn_{part}.bias" for part in "qkv")
    norms = ("blk.*.attn_q_norm.weight", "blk.*.attn_k_norm.weight") if qk_norm else ()
    return ModelShape("glm4moe", 151552, keys | _experts(experts, 8, width), optional=biases + norms)


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    keys = _keys(layers, 2880, 64, 8, 2880, 64, 131072, 1e-5, 150000.0, attention__sliding_window=128)
    return ModelShape("gpt-oss", 201088, keys | _experts(experts, 4, 2880) | _yarn(32.0, 4096))


def _lfm2(layers: int, attention: tuple[int, ...]) -> ModelShape:
    keys = _keys(layers, 2048, 32, [8 if index in attention else 0 for index in range(layers)], 7168, 64, 128000, 1e-5)
    more = {"shortconv.l_cache": 3, "leading_dense_block_count": 2, "expert_gating_func": 2}
    return ModelShape("lfm2moe", 65536, keys | _experts(32, 4, 1792) | more, tied=True)


def _sigmoid(scale: float, n_dense: int, n_shared: int = 1, groups: tuple[int, int] | None = None) -> dict[str, Any]:
    keys = {
        "expert_shared_count": n_shared, "leading_dense_block_count": n_dense, "expert_weights_norm": True,
        "expert_weights_scale": scale, "expert_gating_func": 2,
    }  # fmt: skip
    return keys | ({"expert_group_count": groups[0], "expert_group_used_count": groups[1]} if groups else {})


def _biased(arch: str, vocab: int, keys: dict[str, Any], n_dense: int) -> ModelShape:
    """With a selection bias in all blocks that have experts."""
    return ModelShape(arch, vocab, keys, optional=("blk.*.exp_probs_b.bias",), only=lambda index: index >= n_dense)


def _v3() -> ModelShape:
    keys = _latent(61, 7168, 128, 18432, (128, 64, 128), 1536) | _yarn(40.0, 4096, yarn_log_multiplier=0.1)
    return _biased("deepseek2", 129280, keys | _experts(256, 8, 2048) | _sigmoid(2.5, 3, groups=(8, 4)), 3)


def _kimi_k2() -> ModelShape:
    keys = _latent(61, 7168, 64, 18432, (128, 64, 128), 1536) | _yarn(32.0, 4096, yarn_log_multiplier=0.1)
    return _biased("deepseek2", 163840, keys | _experts(384, 8, 2048) | _sigmoid(2.827, 1), 1)


def _ling(layers: int, embd: int, heads: int, ff: int, width: int) -> ModelShape:
    keys = _keys(layers, embd, heads, 4, ff, context=32768, rope_base=6e5) | {"rope.dimension_count": 64}
    return _biased("bailingmoe2", 157184, keys | _experts(256, 8, width) | _sigmoid(2.5, 1, groups=(8, 4)), 1)


def _dots1() -> ModelShape:
    keys = _keys(62, 4096, 32, 32, 10944, context=32768, eps=1e-5, rope_base=1e7)
    return _biased("dots1", 152064, keys | _experts(128, 6, 1408) | _sigmoid(2.5, 1, n_shared=2), 1)


def _minimax_m2() -> ModelShape:
    keys = _keys(62, 3072, 48, 8, 1536, context=196608, rope_base=5e6) | {"rope.dimension_count": 64}
    return _biased("minimax-m2", 200064, keys | _experts(256, 8, 1536) | {"expert_gating_func": 2}, 0)


def _ernie(
    layers: int, embd: int, heads: tuple[int, int], ff: int, experts: dict[str, Any], n_dense: int
) -> ModelShape:
    keys = _keys(layers, embd, *heads, ff, eps=1e-5, rope_base=5e5) | experts
    more = {"leading_dense_block_count": n_dense, "interleave_moe_layer_step": 1}
    return _biased("ernie4_5-moe", 103424, keys | more, n_dense)


def _granite3(layers: int, embd: int, heads: int, head_dim: int, ff: int, logit_scale: float, n: int = 0) -> ModelShape:
    keys = _keys(layers, embd, heads, 8, ff, head_dim, 131072, rope_base=1e7)
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 1 / head_dim}
    keys |= scales | {"logit_scale": logit_scale}
    experts = {"expert_count": n, "expert_used_count": 8} if n else {}
    return ModelShape("granitemoe" if n else "granite", 49155, keys | experts, tied=True)


def _v2(lite: bool) -> ModelShape:
    yarn = _yarn(40.0, 4096, yarn_log_multiplier=0.0707)
    routing: dict[str, Any] = {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 1}
    if lite:
        keys = _latent(27, 2048, 16, 10944, (128, 64, 128)) | _experts(64, 6, 1408)
    else:
        keys = _latent(60, 5120, 128, 12288, (128, 64, 128), 1536) | _experts(160, 6, 1536)
        routing |= {"expert_weights_scale": 16.0, "expert_group_count": 8, "expert_group_used_count": 3}
    return ModelShape("deepseek2", 102400, keys | routing | yarn)


def _glm_flash() -> ModelShape:
    routing = {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True}
    keys = _latent(47, 2048, 20, 10240, (192, 64, 256), 768) | _experts(64, 4, 1536) | routing
    return ModelShape(
        "deepseek2", 154880, keys | {"expert_weights_scale": 1.8}, optional=("blk.*.exp_probs_b.bias",),
        only=lambda index: index >= 1,
    )  # fmt: skip


def _jamba() -> ModelShape:
    keys = _keys(32, 4096, 32, [8 if index % 8 == 4 else 0 for index in range(32)], 14336, context=262144)
    ssm = {"conv_kernel": 4, "state_size": 16, "time_step_rank": 256, "inner_size": 8192}
    more = {f"ssm.{key}": value for key, value in ssm.items()} | {"expert_count": 16, "expert_used_count": 2}
    return ModelShape(
        "jamba", 65536, keys | more, optional=("blk.*.ffn_gate_inp.weight",), only=lambda index: index % 2 == 1
    )


def _mixtral(layers: int, embd: int, heads: int, ff: int, context: int) -> ModelShape:
    keys = _keys(layers, embd, heads, 8, ff, context=context, eps=1e-5)
    return ModelShape("llama", 32000, keys | {"expert_count": 8, "expert_used_count": 2})


SHAPES: dict[str, ModelShape] = {
    "qwen1.5-moe-a2.7b": ModelShape(
        "qwen2moe", 151936, _keys(24, 2048, 16, 16, 5632, context=8192) | _experts(60, 4, 1408, 5632)
    ),
    "qwen2-57b-a14b": ModelShape(
        "qwen2moe", 151936, _keys(28, 3584, 28, 4, 18944, context=131072) | _experts(64, 8, 2560, 20480)
    ),
    "qwen3-30b-a3b": ModelShape(
        "qwen3moe", 151936, _keys(48, 2048, 32, 4, 6144, context=40960) | _experts(128, 8, 768)
    ),
    "qwen3-235b-a22b": ModelShape(
        "qwen3moe", 151936, _keys(94, 4096, 64, 4, 12288, context=40960) | _experts(128, 8, 1536)
    ),
    "qwen3-next-80b-a3b": _qwen3next("qwen3next", 48, 2048, (16, 2), 32, 151936, **_experts(512, 10, 512, 512)),
    "qwen3.5-35b-a3b": _qwen3next("qwen35moe", 40, 2048, (16, 2), 32, 248320, **_experts(256, 8, 512, 512)),
    "qwen3.5-122b-a10b": _qwen3next("qwen35moe", 48, 3072, (32, 2), 64, 248320, **_experts(256, 8, 1024, 1024)),
    "qwen3.5-397b-a17b": _qwen3next("qwen35moe", 60, 4096, (32, 2), 64, 248320, **_experts(512, 10, 1024, 1024)),
    "qwen3.5-27b": _qwen3next("qwen35", 64, 5120, (24, 4), 48, 248320, ff=17408),
    "granite-4.0-h-tiny": _granite(1536, (12, 4), 512, 48, _experts(64, 6, 512, 1024)),
    "granite-4.0-h-small": _granite(4096, (32, 8), 768, 128, _experts(72, 10, 768, 1536)),
    "nemotron-3-nano-30b-a3b": _nemotron_nano(),
    "jamba-v0.1": _jamba(),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 65536),
    "olmoe-1b-7b": ModelShape(
        "olmoe", 50304, _keys(16, 2048, 16, 16, 1024, context=4096, eps=1e-5, rope_base=1e4) | _experts(64, 8, 1024)
    ),
    "deepseek-v2-lite": _v2(lite=True),
    "deepseek-v2": _v2(lite=False),
    "deepseek-v3": _v3(),
    "kimi-k2": _kimi_k2(),
    "glm-4.7-flash": _glm_flash(),
    "glm-4.5-air": _glm(46, 4096, 128, 1408, (1, 10944), 1.0, qk_norm=False),
    "glm-4.5": _glm(92, 5120, 160, 1536, (3, 12288), 2.5, qk_norm=True),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "lfm2-8b-a1b": _lfm2(24, (2, 6, 10, 14, 18, 21)),
    "ling-mini-2.0": _ling(20, 2048, 16, 5120, 512),
    "ling-flash-2.0": _ling(32, 4096, 32, 9216, 1024),
    "minimax-m2": _minimax_m2(),
    "dots.llm1": _dots1(),
    "hunyuan-a13b": ModelShape(
        "hunyuan-moe",
        128167,
        _keys(32, 4096, 32, 8, 3072, context=32768, eps=1e-5, rope_base=1e4) | _experts(64, 8, 3072, 3072),
        tied=True,
    ),
    "ernie-4.5-21b-a3b": _ernie(28, 2560, (20, 4), 12288, _experts(64, 6, 1536, 3072), 1),
    "ernie-4.5-300b-a47b": _ernie(54, 8192, (64, 8), 28672, _experts(64, 8, 3584), 3),
    "granite-3.1-3b-a800m": _granite3(32, 1536, 24, 64, 512, 6.0, 40),
    "granite-3.3-8b": _granite3(40, 4096, 32, 128, 12800, 16.0),
    "phi-4": ModelShape("phi3", 100352, _keys(40, 5120, 40, 10, 17920, context=16384, eps=1e-5, rope_base=2.5e5)),
    "gemma3-1b": _gemma3(26, 1152, (4, 1), 6912, 256, 512),
    "gemma3-4b": _gemma3(34, 2560, (8, 4), 10240, 256, 1024),
    "gemma3-12b": _gemma3(48, 3840, (16, 8), 15360, 256, 1024),
    "gemma3-27b": _gemma3(62, 5376, (32, 16), 21504, 128, 1024),
    "qwen3-0.6b": ModelShape("qwen3", 151936, _keys(28, 1024, 16, 8, 3072, context=40960), tied=True),
    "qwen3-14b": ModelShape("qwen3", 151936, _keys(40, 5120, 40, 8, 17408, context=40960)),
    "llama-3.1-70b": ModelShape(
        "llama", 128256, _keys(80, 8192, 64, 8, 28672, eps=1e-5, rope_base=5e5), optional=("rope_freqs.weight",)
    ),
}
