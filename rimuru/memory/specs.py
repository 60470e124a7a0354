"""How many bytes each kind of tensor takes in the pool: the single home of size arithmetic.

The planner (memory/planner.py) fills these; allocator, views, stores, converters and the estimates read them.

    huge page (L1)  P_h = lcm(P_e, P_s)
      expert page / SSM page (L2)
        KV page / conv page (L3), carved from an L2 page whose size it divides

A page id counts pages of its own kind's size from the pool's base: address = base + id * page_bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rimuru.arch.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DeltaNetSpec,
    Mamba1Spec,
    Mamba2Spec,
    Mixer,
    MlaSpec,
    ShortConvSpec,
)
from rimuru.base.units import ceil_div
from rimuru.formats.quants import QuantFormat

PageKind = Literal["expert", "ssm", "kv", "conv"]
ProjectionName = Literal["gate", "up", "down"]
STATE_ELEMENT_BYTES = 4
"""Recurrent and convolution states are float32."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What attention layers must share to share KV pages. Elements of one token and layer: token_elements."""

    n_head_kv: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def token_elements(self) -> int:
        return self.n_head_kv * (self.key_dim + self.value_dim)


def kv_geometries(mixer: Mixer | None) -> tuple[KvGeometry, ...]:
    """What a mixer keeps per token; empty for recurrent ones. Compressed attention: window, then older blocks."""
    if isinstance(mixer, AttentionSpec):
        return (KvGeometry(mixer.n_head_kv, mixer.key_dim, mixer.value_dim, mixer.window),)
    if isinstance(mixer, MlaSpec):
        return (KvGeometry(1, mixer.kv_lora_rank + mixer.rope.n_rot, 0, None),)
    if isinstance(mixer, CompressedAttentionSpec):
        inside = KvGeometry(1, mixer.head_dim, 0, mixer.window)
        if mixer.compress_ratio == 0:
            return (inside,)
        # One entry per compress_ratio tokens; counted as the elements that a token adds on average.
        per_block = mixer.head_dim + (mixer.index_dim if mixer.compress_ratio == 4 else 0)
        return inside, KvGeometry(1, ceil_div(per_block, mixer.compress_ratio), 0, None)
    return ()


def state_bytes(mixer: Mixer | None) -> int:
    """Bytes of a mixer's recurrent state of one sequence; 0 where it has none."""
    elements = 0
    if isinstance(mixer, DeltaNetSpec):
        elements = mixer.n_value_heads * mixer.head_dim * mixer.head_dim
    elif isinstance(mixer, (Mamba1Spec, Mamba2Spec)):
        elements = mixer.inner_size * mixer.state_size
    elif isinstance(mixer, CompressedAttentionSpec) and mixer.compress_ratio == 128:
        elements = mixer.compress_ratio * 2 * mixer.head_dim
    return elements * STATE_ELEMENT_BYTES


def conv_shape(mixer: Mixer | None) -> tuple[int, int] | None:
    """(rows, bytes of a row) of a mixer's convolution state of one sequence; None where it has none."""
    if isinstance(mixer, (DeltaNetSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec)):
        return mixer.conv_kernel - 1, mixer.conv_channels * STATE_ELEMENT_BYTES
    if isinstance(mixer, CompressedAttentionSpec) and mixer.compress_ratio == 4:
        return 2 * mixer.compress_ratio, 2 * 2 * (mixer.head_dim + mixer.index_dim) * STATE_ELEMENT_BYTES
    return None


@dataclass(frozen=True, slots=True)
class ProjectionLayout:
    """One matrix of an expert, as whole rows in `n_pages` pages.

    Row n lies in page first_page + n // rows_per_page at byte (n % rows_per_page) * row_bytes (Eq. (1) of the paper,
    for more than one page a projection). The tail of each page is padding.
    """

    name: ProjectionName
    tensor: str
    """GGUF tensor that holds the projection of all experts of the layer."""
    tensor_row: int
    """First row of the projection among one expert's rows of that tensor (not 0 only in ffn_gate_up_exps)."""
    tensor_rows: int
    """Rows of one expert in that tensor."""
    n_rows: int
    n_in: int
    row_bytes: int
    format: QuantFormat
    rows_per_page: int
    n_pages: int
    first_page: int

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class ExpertLayerLayout:
    """The experts of one block. All experts of a block have the same layout."""

    layer: int
    n_experts: int
    n_pages: int
    projections: tuple[ProjectionLayout, ...]

    @property
    def useful_bytes(self) -> int:
        """Bytes of one expert's rows, without padding."""
        return sum(p.n_bytes for p in self.projections)

    def projection(self, name: str) -> ProjectionLayout | None:
        return next((p for p in self.projections if p.name == name), None)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """All routed experts of a model; `layers` has one entry per block with experts ("layer slot")."""

    page_bytes: int
    layers: tuple[ExpertLayerLayout, ...]

    @property
    def n_experts(self) -> int:
        return sum(layer.n_experts for layer in self.layers)

    @property
    def n_pages(self) -> int:
        return sum(layer.n_experts * layer.n_pages for layer in self.layers)

    @property
    def max_pages(self) -> int:
        """Pages of the largest expert."""
        return max(layer.n_pages for layer in self.layers)


@dataclass(frozen=True, slots=True)
class KvGroupLayout:
    """Attention layers that share KV pages. A page holds page_tokens tokens of all of them.

    In a page, layer slot s starts at byte s * layer_bytes:
        keys   [n_head_kv][page_tokens][key_dim]    elements
        values [n_head_kv][page_tokens][value_dim]  elements (absent for MLA: value_dim = 0, n_head_kv = 1)
    """

    layers: tuple[int, ...]
    n_head_kv: int
    key_dim: int
    value_dim: int
    page_tokens: int
    window: int | None
    element_bytes: int
    bfloat: bool = False
    """Two-byte elements are bf16 instead of f16."""

    @property
    def element(self) -> Literal["f32", "f16", "bf16"]:
        """Type of the stored elements."""
        if self.element_bytes == 4:
            return "f32"
        return "bf16" if self.bfloat else "f16"

    @property
    def layer_bytes(self) -> int:
        return self.n_head_kv * self.page_tokens * (self.key_dim + self.value_dim) * self.element_bytes

    @property
    def useful_bytes(self) -> int:
        return self.layer_bytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV pages of a model: one page size, one or more groups of layers."""

    page_bytes: int
    groups: tuple[KvGroupLayout, ...]
    parent: Literal["expert", "ssm"]
    """The L2 kind that a KV page is carved from by preference; page_bytes divides that kind's size."""

    def pages_for(self, n_tokens: int) -> int:
        """Pages of a sequence of n_tokens, all groups together, without giving back what left a window."""
        return sum(-(-n_tokens // group.page_tokens) for group in self.groups)

    def peak_pages(self, n_tokens: int, n_step_tokens: int) -> int:
        """Most pages that a sequence of n_tokens holds at a time, written at most n_step_tokens at a time."""
        n_unit = math.lcm(*(group.page_tokens for group in self.groups))
        n_pages = 0
        for group in self.groups:
            n_columns = ceil_div(n_tokens, group.page_tokens)
            if group.window is not None:  # a step's tokens, what its first one sees, and the rest of that one's unit
                n_seen = ceil_div(group.window + n_step_tokens, group.page_tokens)
                n_columns = min(n_columns, n_seen + 1 + n_unit // group.page_tokens)
            n_pages += n_columns
        return n_pages


@dataclass(frozen=True, slots=True)
class SsmLayout:
    """Recurrent states: one page per (sequence, recurrent layer), float32, padded to page_bytes."""

    page_bytes: int
    state_bytes: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """Convolution states [n_rows, channels]: n_rows consecutive pages of one float32 row per (sequence, layer)."""

    page_bytes: int
    row_bytes: int
    n_rows: int
    layers: tuple[int, ...]
    parent: Literal["expert", "ssm"]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Page sizes and contents of the whole pool. Depends on the model file and the KV type only."""

    huge_bytes: int
    expert: ExpertLayout | None
    kv: KvLayout | None
    ssm: SsmLayout | None
    conv: ConvLayout | None
    slab_bytes: int
    """L2 size where a model has neither experts nor SSM states (dense models): equals huge_bytes then; else 0."""

    def page_bytes(self, kind: PageKind) -> int:
        """Page size of a kind; 0 where the model has none."""
        part = getattr(self, kind)
        return 0 if part is None else part.page_bytes
