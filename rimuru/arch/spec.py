"""What a model consists of, as frozen data. Every architecture module fills these and nothing else.

Widths and counts are in elements. Layers are numbered as in the file (`blk.N.`). A spec also says which of the
alternative tensors the file has (biases, fused matrices), so the list of tensors follows from it (arch/tensors.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu2", "swiglu_oai", "identity"]
Pairing = Literal["adjacent", "half"]
Gating = Literal["softmax", "sigmoid", "softmax_selected", "sqrt_softplus"]


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN frequency interpolation (arXiv:2309.00071), with the roundings that GGUF engines use."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first n_rot dims of a head (of the last n_rot for `tail`)."""

    n_rot: int
    pairing: Pairing
    freq_base: float
    freq_scale: float = 1.0
    yarn: YarnSpec | None = None
    magnitude: float = 1.0
    """Multiplier of cos and sin."""
    factors_tensor: str | None = None
    """Tensor of n_rot/2 divisors of the frequencies, e.g. `rope_freqs.weight`."""
    tail: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention with grouped query heads."""

    n_head: int
    n_head_kv: int
    key_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    qk_norm: Literal["none", "head", "vector"] = "none"
    qk_norm_after_rope: bool = False
    window: int | None = None
    """Keys visible to a query, itself included; None = all."""
    sinks: bool = False
    output_gate: bool = False
    """attn_q yields per head key_dim query values, then key_dim gate values (sigmoid, times the output)."""
    fused_qkv: bool = False
    """attn_qkv.weight holds all rows of q, then k, then v."""
    qkv_bias: Literal["none", "split", "fused"] = "none"
    """split: attn_q.bias, attn_k.bias, attn_v.bias (also beside a fused weight); fused: attn_qkv.bias."""
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2). The cache holds kv_lora_rank + rope.n_rot values a token."""

    n_head: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    fused_kv_b: bool = False
    """Older files: attn_kv_b (per head nope_dim key rows, then value_dim value rows), not attn_k_b and attn_v_b."""


@dataclass(frozen=True, slots=True)
class CompressedAttentionSpec:
    """DeepSeek-V4: one vector a token is key and value of all heads; a window of them, and compressed older blocks.

    compress_ratio: tokens of a block (0 = window only). Ratio 4 has an indexer that picks index_top_k blocks.
    """

    n_head: int
    head_dim: int
    q_lora_rank: int
    n_output_groups: int
    output_lora_rank: int
    window: int
    compress_ratio: int
    rope: RopeSpec
    scale: float
    n_index_heads: int
    index_dim: int
    index_top_k: int


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated DeltaNet. State per value head: head_dim x head_dim, float32."""

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_kernel: int
    head_order: Literal["grouped", "tiled"]
    """Key head of value head h: h // (Hv/Hk) when grouped, h % Hk when tiled."""
    fused_in: bool = False
    """Older files: ssm_in (per key head q, k, v, z) instead of attn_qkv and attn_gate."""
    fused_ba: bool = False
    """ssm_ba (per key head beta rows, then alpha rows) instead of ssm_beta and ssm_alpha."""

    @property
    def conv_channels(self) -> int:
        return (2 * self.n_key_heads + self.n_value_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """Mamba1 (Jamba). State: inner_size x state_size, float32."""

    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return self.inner_size


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba2. State: n_heads x (inner_size / n_heads) x state_size, float32."""

    inner_size: int
    state_size: int
    n_heads: int
    n_groups: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.n_groups * self.state_size


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """LFM2's gated short convolution: only a convolution state."""

    width: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        return self.width


Mixer = AttentionSpec | MlaSpec | CompressedAttentionSpec | DeltaNetSpec | Mamba1Spec | Mamba2Spec | ShortConvSpec


@dataclass(frozen=True, slots=True)
class DenseFfnSpec:
    """Feed-forward network. Gated: down(act(gate x) * up x); else down(act(up x))."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    fused_gate_up: bool = False
    """`ffn_up` holds the gate rows, then the up rows (phi3)."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    """The expert every token uses. `sigmoid_gate`: times sigmoid(ffn_gate_inp_shexp . x)."""

    width: int
    sigmoid_gate: bool


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts; the order of the router's operations is that of facts section 3.6."""

    n_experts: int
    top_k: int
    width: int
    gating: Gating = "softmax"
    renormalise: bool = False
    weights_scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    activation: Activation = "silu"
    gated: bool = True
    latent_size: int | None = None
    """Experts work on ffn_latent_down(x) of this width, and ffn_latent_up brings their sum back (nemotron)."""
    shared: SharedExpertSpec | None = None
    selection_bias: bool = False
    """exp_probs_b.bias is added to the scores for the selection only."""
    expert_bias: bool = False
    """ffn_gate_inp, ffn_gate_exps, ffn_up_exps and ffn_down_exps have a bias (gpt-oss)."""
    fused_gate_up: bool = False
    """ffn_gate_up_exps holds per expert the gate rows, then the up rows."""
    hash_routed: bool = False
    """The expert ids come from ffn_gate_tid2eid[token] (deepseek4's first layers)."""
    activation_limit: float | None = None
    """Limit of swiglu_clamp."""


Ffn = DenseFfnSpec | MoeSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One block: x += mixer(norm(x)); x += ffn(norm(x)). Either part may be absent.

    Norms are given by tensor name below `blk.N.`; the post norms are applied to the sublayer's output (gemma3).
    """

    index: int
    mixer: Mixer | None
    ffn: Ffn | None
    mixer_norm: str = "attn_norm.weight"
    ffn_norm: str = "ffn_norm.weight"
    post_mixer_norm: str | None = None
    post_ffn_norm: str | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model. `layers` are the trunk only; multi-token-prediction blocks are counted, not described.

    n_vocab is the number of rows of token_embd.weight. context_length is the file's, whatever is configured.
    """

    architecture: str
    name: str
    n_vocab: int
    n_embd: int
    context_length: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    n_mtp_blocks: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    """Logits are multiplied by this (granite's divisor is inverted by its module)."""
    final_softcap: float | None = None
    output_norm: str = "output_norm.weight"
    tied_head: bool = False
    """No output.weight: the head is token_embd.weight."""
    output_bias: bool = False
    n_streams: int = 1
    """Residual streams (deepseek4's hyper-connections)."""
    ignored_tensors: frozenset[str] = frozenset()
    """Tensors that such files may hold and that logits do not depend on."""

    @property
    def moe_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer.ffn, MoeSpec))
