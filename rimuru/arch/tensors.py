"""Which tensors a model of a given description has, with their shapes in ne order, and the check against a file.

The list follows from the specs alone (facts section 4). A file must hold exactly these tensors, apart from those of
prediction blocks and a few that logits do not depend on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Literal

from rimuru.arch.common import Gguf
from rimuru.arch.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelConfig,
    MoeSpec,
    ShortConvSpec,
)
from rimuru.base.errors import FileFormatError, UnsupportedModelError
from rimuru.formats.gguf import TensorInfo

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
_PER_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One projection of a layer's experts: rows tensor_row .. tensor_row + n_rows of each expert's tensor_rows rows."""

    projection: Literal["gate", "up", "down"]
    tensor: str
    tensor_row: int
    tensor_rows: int
    n_rows: int
    n_in: int


def model_tensors(config: ModelConfig) -> dict[str, Shape]:
    """All tensors that a file of this model must hold: name -> shape."""
    width = config.n_embd
    shapes: dict[str, Shape] = {
        "token_embd.weight": (width, config.n_vocab),
        config.output_norm: (width,),
    }
    if not config.tied_head:
        shapes["output.weight"] = (width, config.n_vocab)
    if config.output_bias:
        shapes["output.bias"] = (config.n_vocab,)
    if config.n_streams > 1:
        n = config.n_streams
        shapes |= {"output_hc_fn.weight": (n * width, n), "output_hc_base.weight": (n,), "output_hc_scale.weight": (1,)}
    for layer in config.layers:
        shapes |= layer_tensors(config, layer)
    return shapes


def layer_tensors(config: ModelConfig, layer: LayerSpec) -> dict[str, Shape]:
    """The tensors of one block, by full name."""
    width = config.n_embd
    found: dict[str, Shape] = {}
    if layer.mixer is not None:
        found[layer.mixer_norm] = (width,)
        found |= dict(mixer_tensors(layer.mixer, width))
    if layer.ffn is not None:
        found[layer.ffn_norm] = (width,)
        found |= dict(_ffn_tensors(layer.ffn, width, config.n_vocab))
    for norm in (layer.post_mixer_norm, layer.post_ffn_norm):
        if norm is not None:
            found[norm] = (width,)
    if config.n_streams > 1:
        n = config.n_streams
        for part in ("attn", "ffn"):
            found[f"hc_{part}_fn.weight"] = (n * width, 2 * n + n * n)
            found[f"hc_{part}_base.weight"] = (2 * n + n * n,)
            found[f"hc_{part}_scale.weight"] = (3,)
    return {f"blk.{layer.index}.{name}": shape for name, shape in found.items()}


@singledispatch
def mixer_tensors(spec: object, width: int) -> Named:
    """Tensors of a mixer in a model of this width, named below `blk.N.`."""
    raise TypeError(f"no mixer: {type(spec).__name__}")


@mixer_tensors.register
def _(spec: AttentionSpec, width: int) -> Named:
    rows = {
        "q": spec.n_head * spec.key_dim * (2 if spec.output_gate else 1),
        "k": spec.n_head_kv * spec.key_dim,
        "v": spec.n_head_kv * spec.value_dim,
    }
    if spec.fused_qkv:
        yield "attn_qkv.weight", (width, sum(rows.values()))
    else:
        for part, n_rows in rows.items():
            yield f"attn_{part}.weight", (width, n_rows)
    if spec.qkv_bias == "fused":
        yield "attn_qkv.bias", (sum(rows.values()),)
    elif spec.qkv_bias == "split":
        for part, n_rows in rows.items():
            yield f"attn_{part}.bias", (n_rows,)
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "vector"
        yield "attn_q_norm.weight", (spec.key_dim * (spec.n_head if whole else 1),)
        yield "attn_k_norm.weight", (spec.key_dim * (spec.n_head_kv if whole else 1),)
    if spec.sinks:
        yield "attn_sinks.weight", (spec.n_head,)
    yield "attn_output.weight", (spec.n_head * spec.value_dim, width)
    if spec.output_bias:
        yield "attn_output.bias", (width,)


@mixer_tensors.register
def _(spec: MlaSpec, width: int) -> Named:
    n_rot, rank, n_head = spec.rope.n_rot, spec.kv_lora_rank, spec.n_head
    q_rows = n_head * (spec.nope_dim + n_rot)
    if spec.q_lora_rank is None:
        yield "attn_q.weight", (width, q_rows)
    else:
        yield "attn_q_a.weight", (width, spec.q_lora_rank)
        yield "attn_q_a_norm.weight", (spec.q_lora_rank,)
        yield "attn_q_b.weight", (spec.q_lora_rank, q_rows)
    yield "attn_kv_a_mqa.weight", (width, rank + n_rot)
    yield "attn_kv_a_norm.weight", (rank,)
    if spec.fused_kv_b:
        yield "attn_kv_b.weight", (rank, n_head * (spec.nope_dim + spec.value_dim))
    else:
        yield "attn_k_b.weight", (spec.nope_dim, rank, n_head)
        yield "attn_v_b.weight", (rank, spec.value_dim, n_head)
    yield "attn_output.weight", (n_head * spec.value_dim, width)


@mixer_tensors.register
def _(spec: CompressedAttentionSpec, width: int) -> Named:
    dim, n_groups, ratio = spec.head_dim, spec.n_output_groups, spec.compress_ratio
    yield "attn_sinks.weight", (spec.n_head,)
    yield "attn_q_a.weight", (width, spec.q_lora_rank)
    yield "attn_q_a_norm.weight", (spec.q_lora_rank,)
    yield "attn_q_b.weight", (spec.q_lora_rank, spec.n_head * dim)
    yield "attn_kv.weight", (width, dim)
    yield "attn_kv_a_norm.weight", (dim,)
    yield "attn_output_a.weight", (spec.n_head * dim // n_groups, spec.output_lora_rank * n_groups)
    yield "attn_output_b.weight", (spec.output_lora_rank * n_groups, width)
    if ratio:
        yield from _compressor("attn_compressor", width, dim, ratio)
    if ratio == 4:
        yield "indexer.proj.weight", (width, spec.n_index_heads)
        yield "indexer.attn_q_b.weight", (spec.q_lora_rank, spec.n_index_heads * spec.index_dim)
        yield from _compressor("indexer_compressor", width, spec.index_dim, ratio)


def _compressor(name: str, width: int, dim: int, ratio: int) -> Named:
    # Blocks of ratio 4 overlap: each token has one projection for its own block and one for the next.
    n_rows = 2 * dim if ratio == 4 else dim
    yield f"{name}_kv.weight", (width, n_rows)
    yield f"{name}_gate.weight", (width, n_rows)
    yield f"{name}_ape.weight", (n_rows, ratio)
    yield f"{name}_norm.weight", (dim,)


@mixer_tensors.register
def _(spec: DeltaNetSpec, width: int) -> Named:
    key, value, n_value = spec.n_key_heads * spec.head_dim, spec.n_value_heads * spec.head_dim, spec.n_value_heads
    if spec.fused_in:
        yield "ssm_in.weight", (width, 2 * key + 2 * value)
    else:
        yield "attn_qkv.weight", (width, 2 * key + value)
        yield "attn_gate.weight", (width, value)
    yield "ssm_conv1d.weight", (spec.conv_kernel, spec.conv_channels)
    yield "ssm_dt.bias", (n_value,)
    yield "ssm_a", (n_value,)
    if spec.fused_ba:
        yield "ssm_ba.weight", (width, 2 * n_value)
    else:
        yield "ssm_beta.weight", (width, n_value)
        yield "ssm_alpha.weight", (width, n_value)
    yield "ssm_norm.weight", (spec.head_dim,)
    yield "ssm_out.weight", (value, width)


@mixer_tensors.register
def _(spec: Mamba2Spec, width: int) -> Named:
    inner, n_groups = spec.inner_size, spec.n_groups
    yield "ssm_in.weight", (width, inner + spec.conv_channels + spec.n_heads)
    yield "ssm_conv1d.weight", (spec.conv_kernel, spec.conv_channels)
    yield "ssm_conv1d.bias", (spec.conv_channels,)
    yield "ssm_dt.bias", (spec.n_heads,)
    yield "ssm_a", (1, spec.n_heads)
    yield "ssm_d", (1, spec.n_heads)
    yield "ssm_norm.weight", (inner // n_groups, n_groups)
    yield "ssm_out.weight", (inner, width)


@mixer_tensors.register
def _(spec: Mamba1Spec, width: int) -> Named:
    inner, state, rank = spec.inner_size, spec.state_size, spec.dt_rank
    yield "ssm_in.weight", (width, 2 * inner)
    yield "ssm_conv1d.weight", (spec.conv_kernel, inner)
    yield "ssm_conv1d.bias", (inner,)
    yield "ssm_x.weight", (inner, rank + 2 * state)
    yield "ssm_dt_norm.weight", (rank,)
    yield "ssm_b_norm.weight", (state,)
    yield "ssm_c_norm.weight", (state,)
    yield "ssm_dt.weight", (rank, inner)
    yield "ssm_dt.bias", (inner,)
    yield "ssm_a", (state, inner)
    yield "ssm_d", (inner,)
    yield "ssm_out.weight", (inner, width)


@mixer_tensors.register
def _(spec: ShortConvSpec, width: int) -> Named:
    yield "shortconv.in_proj.weight", (width, 3 * spec.width)
    yield "shortconv.conv.weight", (spec.conv_kernel, spec.width)
    yield "shortconv.out_proj.weight", (spec.width, width)


def _ffn_tensors(spec: DenseFfnSpec | MoeSpec, width: int, n_vocab: int) -> Named:
    if isinstance(spec, MoeSpec):
        yield from _moe_tensors(spec, width, n_vocab)
        return
    yield from _gated("", spec.width, width, spec.gated and not spec.fused_gate_up)
    if spec.fused_gate_up:
        yield "ffn_up.weight", (width, 2 * spec.width)
    if spec.bias:
        for part in ("gate", "up") if spec.gated else ("up",):
            yield f"ffn_{part}.bias", (spec.width,)
        yield "ffn_down.bias", (width,)


def _gated(suffix: str, width: int, n_embd: int, gated: bool) -> Named:
    if gated:
        yield f"ffn_gate{suffix}.weight", (n_embd, width)
    yield f"ffn_up{suffix}.weight", (n_embd, width)
    yield f"ffn_down{suffix}.weight", (width, n_embd)


def _moe_tensors(spec: MoeSpec, width: int, n_vocab: int) -> Named:
    n = spec.n_experts
    expert_in = spec.latent_size or width
    yield "ffn_gate_inp.weight", (width, n)
    if spec.hash_routed:
        yield "ffn_gate_tid2eid.weight", (spec.top_k, n_vocab)
    if spec.selection_bias:
        yield "exp_probs_b.bias", (n,)
    if spec.latent_size is not None:
        yield "ffn_latent_down.weight", (width, expert_in)
        yield "ffn_latent_up.weight", (expert_in, width)
    if spec.fused_gate_up:
        yield "ffn_gate_up_exps.weight", (expert_in, 2 * spec.width, n)
    else:
        for part in ("gate", "up") if spec.gated else ("up",):
            yield f"ffn_{part}_exps.weight", (expert_in, spec.width, n)
    yield "ffn_down_exps.weight", (spec.width, expert_in, n)
    if spec.expert_bias:
        yield "ffn_gate_inp.bias", (n,)
        for part in ("gate", "up") if spec.gated else ("up",):
            yield f"ffn_{part}_exps.bias", (spec.width, n)
        yield "ffn_down_exps.bias", (expert_in, n)
    if spec.shared is not None:
        yield from _gated("_shexp", spec.shared.width, width, spec.gated)
        if spec.shared.sigmoid_gate:
            yield "ffn_gate_inp_shexp.weight", (width,)


def expert_tensors(config: ModelConfig) -> dict[int, tuple[ExpertTensor, ...]]:
    """Block index -> the projections of its routed experts in storage order: gate (where there is one), up, down."""
    found: dict[int, tuple[ExpertTensor, ...]] = {}
    for layer in config.moe_layers:
        spec = layer.ffn
        assert isinstance(spec, MoeSpec)
        prefix, width, n_in = f"blk.{layer.index}.ffn_", spec.width, spec.latent_size or config.n_embd
        if spec.fused_gate_up:
            both = f"{prefix}gate_up_exps.weight"
            first = [
                ExpertTensor("gate", both, 0, 2 * width, width, n_in),
                ExpertTensor("up", both, width, 2 * width, width, n_in),
            ]
        else:
            first = [ExpertTensor("up", f"{prefix}up_exps.weight", 0, width, width, n_in)]
            if spec.gated:
                first.insert(0, ExpertTensor("gate", f"{prefix}gate_exps.weight", 0, width, width, n_in))
        found[layer.index] = (*first, ExpertTensor("down", f"{prefix}down_exps.weight", 0, n_in, n_in, width))
    return found


def check_tensors(config: ModelConfig, gguf: Gguf) -> None:
    """Compare a file's tensors with those that its description asks for.

    Raises FileFormatError for a missing tensor, a wrong shape, and a tensor that nothing would use (the model would
    not be the one the file means); UnsupportedModelError for the per-expert layout of old Mixtral files.
    """
    tensors = gguf.tensors
    legacy = next((name for name in tensors if _PER_EXPERT.fullmatch(name)), None)
    if legacy is not None:
        raise UnsupportedModelError(
            f"{gguf.path}: per-expert tensor layout (pre-2024) not supported ({legacy}); convert the model again"
        )
    wanted = model_tensors(config)
    for name, shape in wanted.items():
        _check_shape(gguf, name, shape)
    for name in _ROPE_FACTORS:
        if name in tensors:
            _check_rope_factors(config, gguf, name)
    unused = next((name for name in tensors if name not in wanted and not _may_stay(config, tensors, name)), None)
    if unused is not None:
        raise FileFormatError(
            f"{gguf.path}: tensor {unused} has no place in a {config.architecture} model with these keys"
        )


def _check_shape(gguf: Gguf, name: str, shape: Shape) -> None:
    info = gguf.tensors.get(name)
    if info is None:
        raise FileFormatError(f"{gguf.path}: tensor {name} of shape {list(shape)} is missing")
    n_dims = max(len(shape), len(info.shape))
    if _padded(info.shape, n_dims) != _padded(shape, n_dims):
        raise FileFormatError(f"{gguf.path}: tensor {name} has shape {list(info.shape)}, expected {list(shape)}")


def _padded(shape: Shape, n_dims: int) -> Shape:
    return shape + (1,) * (n_dims - len(shape))


def _check_rope_factors(config: ModelConfig, gguf: Gguf, name: str) -> None:
    ropes = (getattr(layer.mixer, "rope", None) for layer in config.layers)
    n_rot = next((rope.n_rot for rope in ropes if rope is not None), None)
    if n_rot is not None:
        _check_shape(gguf, name, (n_rot // 2,))


def _may_stay(config: ModelConfig, tensors: Mapping[str, TensorInfo], name: str) -> bool:
    """Tensors that may be in a file without being used by plain logits."""
    if name in config.ignored_tensors or name in _ROPE_FACTORS or name.endswith(".input_scale"):
        return True
    block = _BLOCK.match(name)
    if block and len(config.layers) <= int(block.group(1)) < len(config.layers) + config.n_mtp_blocks:
        return True
    return _is_factor(tensors, name)


def _is_factor(tensors: Mapping[str, TensorInfo], name: str) -> bool:
    """Whether this is the factor of an NVFP4 tensor's products: one number, or one for each expert."""
    base = tensors.get(name.removesuffix(".scale") + ".weight")
    if not name.endswith(".scale") or base is None or base.format.name != "nvfp4":
        return False
    n_wanted = base.shape[2] if base.name.endswith("_exps.weight") else 1
    return tensors[name].format.is_float and tensors[name].n_elements == n_wanted
