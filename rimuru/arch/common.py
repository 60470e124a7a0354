"""What all architecture modules share: the common metadata keys, their checks, and the specs built from them.

`Base` holds the keys of facts section 2 as read and checked; a module turns it into a ModelConfig. Every refusal names
the file and the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rimuru.arch.rope import rope_spec
from rimuru.arch.spec import AttentionSpec, DenseFfnSpec, Gating, LayerSpec, ModelConfig, MoeSpec, RopeSpec
from rimuru.base.errors import FileFormatError, UnsupportedModelError
from rimuru.formats.gguf import KeyValues, TensorInfo

MAX_BLOCKS = 512
MAX_EXPERTS = 1024
SOFTMAX, SIGMOID, SOFTMAX_SELECTED, SQRT_SOFTPLUS = 1, 2, 3, 4
_GATINGS: dict[int, Gating] = {
    SOFTMAX: "softmax",
    SIGMOID: "sigmoid",
    SOFTMAX_SELECTED: "softmax_selected",
    SQRT_SOFTPLUS: "sqrt_softplus",
}


class Gguf(Protocol):
    """What a model description is read from: an open file, or a built-in shape (arch/shapes.py)."""

    @property
    def kv(self) -> KeyValues: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def architecture(self) -> str: ...
    @property
    def path(self) -> Any: ...


@dataclass(frozen=True)
class Base:
    """The common keys of a file, checked. Per-layer tuples have n_blocks entries (trunk, then MTP blocks).

    `context` is the configured context in tokens (the file's own where none is given); only rope factors depend on it.
    """

    gguf: Gguf
    context: int
    name: str
    n_blocks: int
    n_layers: int
    n_embd: int
    n_vocab: int
    context_length: int
    norm_eps: float
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    ffn_width: tuple[int, ...]
    key_dim: int
    value_dim: int

    # ---- keys of the architecture, without its prefix
    @property
    def architecture(self) -> str:
        return self.gguf.architecture

    def key(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"

    def count(self, suffix: str, default: int | None = None, minimum: int = 0) -> int:
        """An integer key of at least `minimum`; required where no default is given."""
        return read_int(self.gguf, self.key(suffix), default, minimum)

    def number(self, suffix: str, default: float | None = None) -> float:
        key = self.key(suffix)
        return self.gguf.kv.require(key, float) if default is None else self.gguf.kv.get(key, float, default)

    def flag(self, suffix: str, default: bool) -> bool:
        return self.gguf.kv.get(self.key(suffix), bool, default)

    def per_layer(self, suffix: str, default: int | Sequence[int] | None = None) -> tuple[int, ...]:
        """One non-negative integer per block (scalar or array key)."""
        values = self.gguf.kv.per_layer(self.key(suffix), int, self.n_blocks, default)
        if min(values) < 0:
            raise self.error(f"key {self.key(suffix)} has a negative entry ({min(values)})")
        return values

    def has(self, layer: int, name: str) -> bool:
        return f"blk.{layer}.{name}" in self.gguf.tensors

    def error(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.gguf.path}: {what}")

    def check(self, right: bool, what: str) -> None:
        """Raise FileFormatError with `what` unless `right`."""
        if not right:
            raise self.error(what)

    # ---- specs
    def rope(
        self, pairing: str, n_rot: int | None = None, freq_base: float | None = None, scaled: bool = True
    ) -> RopeSpec:
        """The rotation that the rope.* keys describe; of n_rot dims (default: rope.dimension_count, else key_dim)."""
        n_rot = self.count("rope.dimension_count", self.key_dim) if n_rot is None else n_rot
        return rope_spec(self, pairing, n_rot, freq_base, scaled)

    def attention(self, layer: int, rope: RopeSpec | None, bias: str = "optional", **more: Any) -> AttentionSpec:
        """Grouped-query attention of a block. `bias`: "optional" = those that the file has, "required" = q, k and v.

        Keywords are further fields of AttentionSpec, in place of what is found here.
        """
        n_head, n_head_kv = self.n_head[layer], self.n_head_kv[layer]
        where = f"block {layer}"
        self.check(
            n_head > 0 and n_head_kv > 0, f"{where} has {n_head} query and {n_head_kv} KV heads; both must be positive"
        )
        self.check(n_head % n_head_kv == 0, f"{where}: {n_head} query heads are no multiple of {n_head_kv} KV heads")
        self.check(
            self.key_dim > 0 and self.value_dim > 0, f"{where} has heads of width {self.key_dim} and {self.value_dim}"
        )
        if rope is not None:
            self.check(rope.n_rot <= self.key_dim, f"{rope.n_rot} rotated dims do not fit in heads of {self.key_dim}")
        fields: dict[str, Any] = {
            "n_head": n_head,
            "n_head_kv": n_head_kv,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "scale": 1 / math.sqrt(self.key_dim),
            "rope": rope,
            "fused_qkv": self.has(layer, "attn_qkv.weight"),
            "qkv_bias": "fused" if self.has(layer, "attn_qkv.bias") else "split" if bias == "required" else "none",
            "output_bias": self.has(layer, "attn_output.bias"),
        }
        if any(self.has(layer, f"attn_{part}.bias") for part in "qkv"):
            fields["qkv_bias"] = "split"
        return AttentionSpec(**fields | more)

    def qk_norm(self, layer: int) -> str:
        """Per-head norms of q and k, where the block has their tensors."""
        return "head" if self.has(layer, "attn_q_norm.weight") else "none"

    def dense(self, layer: int, **more: Any) -> DenseFfnSpec:
        """A gated feed-forward network of width feed_forward_length."""
        width = self.ffn_width[layer]
        self.check(width > 0, f"block {layer} has a feed-forward network, but {self.key('feed_forward_length')} is 0")
        return DenseFfnSpec(**{"width": width, "bias": self.has(layer, "ffn_down.bias")} | more)

    def moe(self, layer: int, width: int, **more: Any) -> MoeSpec:
        """Routed experts of a block; keywords are the fields in which the architectures differ (facts section 3.6)."""
        n_experts = self.count("expert_count", 0)
        top_k = self.per_layer("expert_used_count", 0)[layer]
        self.check(
            1 <= n_experts <= MAX_EXPERTS, f"{self.key('expert_count')} is {n_experts}, must be 1 to {MAX_EXPERTS}"
        )
        self.check(
            1 <= top_k <= n_experts, f"{self.key('expert_used_count')} is {top_k}, must be 1 to the {n_experts} experts"
        )
        self.check(width > 0, f"block {layer} has experts of width {width}")
        fields: dict[str, Any] = {
            "n_experts": n_experts,
            "top_k": top_k,
            "width": width,
            "fused_gate_up": self.has(layer, "ffn_gate_up_exps.weight"),
            "selection_bias": self.has(layer, "exp_probs_b.bias"),
        }
        return MoeSpec(**fields | self._groups(n_experts, top_k) | more)

    def _groups(self, n_experts: int, top_k: int) -> dict[str, int]:
        n_groups = self.count("expert_group_count", 0)
        if n_groups <= 1:
            return {}
        used = self.count("expert_group_used_count", 0)
        self.check(n_experts % n_groups == 0, f"{n_experts} experts do not fall into {n_groups} equal groups")
        self.check(n_experts // n_groups >= 2, f"{n_groups} groups of {n_experts} experts: a group needs two")
        self.check(
            1 <= used < n_groups, f"{self.key('expert_group_used_count')} is {used}, must be 1 to {n_groups - 1}"
        )
        self.check(
            used * (n_experts // n_groups) >= top_k,
            f"{used} of {n_groups} expert groups hold fewer than {top_k} experts",
        )
        return {"n_groups": n_groups, "n_groups_used": used}

    def gating(self, default: int | None) -> Gating:
        """The router's function from expert_gating_func (0 and an absent key mean `default`; None = required)."""
        key = self.key("expert_gating_func")
        value = self.count("expert_gating_func", None if default is None else 0) or (default or 0)
        if value not in _GATINGS:
            raise UnsupportedModelError(f"{self.gguf.path}: key {key} is {value}; known are {sorted(_GATINGS)}")
        return _GATINGS[value]

    def weights_scale(self) -> float:
        """Multiplier of the routing weights; 0 and 1 both mean none."""
        return self.number("expert_weights_scale", 0.0) or 1.0

    def layers(self, build: Callable[[int], LayerSpec]) -> tuple[LayerSpec, ...]:
        return tuple(build(index) for index in range(self.n_layers))

    def config(self, layers: Iterable[LayerSpec], tied: bool = True, **more: Any) -> ModelConfig:
        """The model of these layers. `tied`: the head may be the embedding; else output.weight is required."""
        fields: dict[str, Any] = {
            "architecture": self.architecture,
            "name": self.name,
            "n_vocab": self.n_vocab,
            "n_embd": self.n_embd,
            "context_length": self.context_length,
            "norm_eps": self.norm_eps,
            "layers": tuple(layers),
            "n_mtp_blocks": self.n_blocks - self.n_layers,
            "tied_head": tied and "output.weight" not in self.gguf.tensors,
        }
        return ModelConfig(**fields | more)


def read_int(gguf: Gguf, key: str, default: int | None, minimum: int) -> int:
    value = gguf.kv.require(key, int) if default is None else gguf.kv.get(key, int, default)
    if value < minimum:
        raise FileFormatError(f"{gguf.path}: key {key} is {value}, must be at least {minimum}")
    return value


def read_base(gguf: Gguf, context: int | None = None, eps_key: str = "attention.layer_norm_rms_epsilon") -> Base:
    """Read and check the keys that all architectures have (facts sections 2 and 10.3)."""
    prefix = gguf.architecture + "."
    kv = gguf.kv

    def error(what: str) -> FileFormatError:
        return FileFormatError(f"{gguf.path}: {what}")

    n_blocks = read_int(gguf, prefix + "block_count", None, 1)
    if n_blocks > MAX_BLOCKS:
        raise error(f"key {prefix}block_count is {n_blocks}, must be 1 to {MAX_BLOCKS}")
    n_mtp = read_int(gguf, prefix + "nextn_predict_layers", 0, 0)
    if n_mtp >= n_blocks:
        raise error(f"{n_mtp} prediction blocks leave none of the {n_blocks} blocks for the model itself")
    n_embd = read_int(gguf, prefix + "embedding_length", None, 1)
    context_length = read_int(gguf, prefix + "context_length", None, 1)
    eps = kv.require(prefix + eps_key, float)
    if eps <= 0:
        raise error(f"key {prefix}{eps_key} is {eps}, must be positive")
    n_head = kv.per_layer(prefix + "attention.head_count", int, n_blocks, 0)
    n_head_kv = kv.per_layer(prefix + "attention.head_count_kv", int, n_blocks, n_head)
    ffn_width = kv.per_layer(prefix + "feed_forward_length", int, n_blocks, 0)
    for what, values in (
        ("attention.head_count", n_head),
        ("attention.head_count_kv", n_head_kv),
        ("feed_forward_length", ffn_width),
    ):
        if min(values) < 0:
            raise error(f"key {prefix}{what} has a negative entry ({min(values)})")
    head_dim = n_embd // next((n for n in n_head if n), n_embd)
    return Base(
        gguf=gguf,
        context=context or context_length,
        name=kv.get("general.name", str, gguf.architecture),
        n_blocks=n_blocks,
        n_layers=n_blocks - n_mtp,
        n_embd=n_embd,
        n_vocab=_n_vocab(gguf, n_embd),
        context_length=context_length,
        norm_eps=eps,
        n_head=n_head,
        n_head_kv=n_head_kv,
        ffn_width=ffn_width,
        key_dim=read_int(gguf, prefix + "attention.key_length", head_dim, 1),
        value_dim=read_int(gguf, prefix + "attention.value_length", head_dim, 1),
    )


def _n_vocab(gguf: Gguf, n_embd: int) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise FileFormatError(f"{gguf.path}: tensor token_embd.weight is missing; the file holds no model that can run")
    shape = embedding.shape + (1,) * (2 - len(embedding.shape))
    if shape[0] != n_embd or len(shape) != 2 or shape[1] < 1:
        raise FileFormatError(
            f"{gguf.path}: tensor token_embd.weight has shape {list(shape)}, expected [{n_embd}, n_vocab]"
        )
    tokens = gguf.kv.get_list("tokenizer.ggml.tokens", str)
    if tokens is not None and len(tokens) != shape[1]:
        raise FileFormatError(
            f"{gguf.path}: tensor token_embd.weight has {shape[1]} rows, but the tokenizer has {len(tokens)} tokens"
        )
    return shape[1]
