"""Launchers of the routing kernels (cuda_src/moe/router.cu, route_topk.cu)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from rimuru.arch.spec import MoeSpec
from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.ops.base import Act, Array, ExpertTable, MoeScratch, Weight
from rimuru.ops.cuda.activations import ACT_SIGNATURE, act_arguments, pending_norm
from rimuru.ops.cuda.launch import Kernel
from rimuru.ops.cuda.matmul import linear

MAX_EXPERTS = 1024
MAX_ROUTER_TOKENS = 64
"""Up to this many tokens the blocks of a router make the choice too."""

ITEM_WORDS = 16
"""Words of 8 bytes of an item of the expert kernels (cuda_src/common/items.cuh)."""

MAX_ITEM_PAGES = ITEM_WORDS - 1
"""Most pages of an expert that are listed with every item."""

LINED_TOKENS = range(5, 17)
"""Of so many tokens' choices a router makes items. More are sorted (ops/cuda/moe.py); for fewer, whose blocks all run
at once, the look-up costs the router as much as it saves them (tools/LOG.md)."""

_ROUTER_WARPS = 8
_GATINGS = {"softmax": 0, "sigmoid": 1, "softmax_selected": 2, "sqrt_softplus": 3}


@cache
def _route_kernel(per_lane: int) -> Kernel:
    signature = (
        "logits: f32*, bias: f32*, ids: i32*, weights: f32*, n_tokens: i32, n_experts: i32, top_k: i32, gating: i32,"
        "n_groups: i32, n_groups_used: i32, renormalise: i32, scale: f32"
    )
    return Kernel("moe/route_topk.cu", "route_topk", signature, {"PER_LANE": per_lane})


@cache
def router_kernel(n_experts: int, tile: int, norm_width: int = 0) -> Kernel:
    """Router and choice for `tile` tokens a block; norm_width: of their norm, where it has not been made."""
    signature = (
        f"x: f32*, norm_weight: f32*, norm_eps: f32, normed: f32*, {ACT_SIGNATURE}, weight: *, weight_bias: f32*,"
        "weight_scale: f32, logits: f32*, posted: *, bias: f32*, ids: i32*, weights: f32*, width: i32, n_tokens: i32,"
        "n_experts: i32, top_k: i32, gating: i32, n_groups: i32, n_groups_used: i32, renormalise: i32, scale: f32,"
        "addresses: i64*, n_pages: i32, lines: i64*"
    )
    defines = route_kernel(n_experts).defines | {
        "TOKEN_TILE": tile, "NORM_WIDTH": norm_width, "BLOCK_WARPS": _ROUTER_WARPS,
    }  # fmt: skip
    return Kernel("moe/router.cu", "router", signature, defines)


REPLAY_KERNEL = Kernel(
    "moe/replay_ids.cu", "replay_ids",
    "recorded: i32*, ids: i32*, n: i32, top_k: i32, row_ids: i32, first: i32",
)  # fmt: skip


def replay_routing(recorded: Array, layer_slot: int, ids: Array) -> None:
    """See Ops.replay_routing."""
    n_tokens, n_layers, top_k = recorded.shape
    if ids.shape != (n_tokens, top_k) or not 0 <= layer_slot < n_layers:
        raise RimuruError(f"recorded routing of shape {recorded.shape} does not fit layer {layer_slot}, {ids.shape}")
    n = n_tokens * top_k
    REPLAY_KERNEL((ceil_div(n, 128),), (128,), (recorded, ids, n, top_k, n_layers * top_k, layer_slot * top_k))


def route_kernel(n_experts: int) -> Kernel:
    """The routing kernel for a number of experts; raises where it has none."""
    if not 1 <= n_experts <= MAX_EXPERTS:
        raise RimuruError(f"{n_experts} experts in a layer: the CUDA kernels take 1 to {MAX_EXPERTS}")
    return _route_kernel(ceil_div(n_experts, 32))


def route(logits: Array, spec: MoeSpec, bias: Array | None, ids: Array, weights: Array) -> None:
    """See Ops.route."""
    n_tokens, n_experts = logits.shape
    warps = 4 if n_tokens > 132 else 1
    route_kernel(n_experts)(
        (ceil_div(n_tokens, warps),),
        (32 * warps,),
        (logits, bias, ids, weights, n_tokens, *_choice(spec, n_experts)),
    )


def _choice(spec: MoeSpec, n_experts: int) -> tuple[Any, ...]:
    """Arguments of both kernels, from the number of experts on."""
    if spec.top_k > n_experts or spec.n_groups > 32:
        raise RimuruError(f"cannot choose {spec.top_k} of {n_experts} experts in {spec.n_groups} groups")
    return (
        n_experts, spec.top_k, _GATINGS[spec.gating], spec.n_groups, spec.n_groups_used, int(spec.renormalise),
        spec.weights_scale or 1.0,
    )  # fmt: skip


def _lines(n_tokens: int, ahead: tuple[ExpertTable, MoeScratch] | None) -> tuple[Any, ...]:
    """The last arguments of a router: the experts' table, and where the items go that moe_experts will find there."""
    if ahead is None:
        return None, 0, None
    table, scratch = ahead
    if n_tokens not in LINED_TOKENS or table.layout.n_pages > MAX_ITEM_PAGES:
        return None, 0, None
    scratch.private.lined = table
    return table.addresses, table.layout.n_pages, scratch.private.items


def choose_by_two_launches(
    x: Act,
    router: Weight,
    router_bias: Array | None,
    logits: Array,
    spec: MoeSpec,
    bias: Array | None,
    ids: Array,
    weights: Array,
    ahead: tuple[ExpertTable, MoeScratch] | None = None,
) -> None:
    """The verb `choose_experts` as the matrix kernels and `route` have it: for many tokens, any router."""
    linear(x, (router,), (logits,), (router_bias,))
    route(logits, spec, bias, ids, weights)


class Router:
    """The verb `choose_experts`: one launch for few tokens, with their norm where that is still to be made.

    Owns the words by which blocks tell each other their logits.
    """

    def __init__(self) -> None:
        self.posted: dict[int, Any] = {}
        """By number of experts: zeros before and after each launch."""

    def __call__(
        self,
        x: Act,
        router: Weight,
        router_bias: Array | None,
        logits: Array,
        spec: MoeSpec,
        bias: Array | None,
        ids: Array,
        weights: Array,
        ahead: tuple[ExpertTable, MoeScratch] | None = None,
    ) -> None:
        n_tokens, n_experts = logits.shape
        width = x.f32.shape[1]
        if router.format.name != "f32" or n_tokens > MAX_ROUTER_TOKENS:
            choose_by_two_launches(x, router, router_bias, logits, spec, bias, ids, weights)
            return
        if n_experts not in self.posted:
            import cupy

            self.posted[n_experts] = cupy.zeros(MAX_ROUTER_TOKENS * n_experts, np.uint32)
        norm, tile = pending_norm(x), 1 if n_tokens <= 8 else 2
        before: tuple[Any, ...] = (x.f32, None, 0.0, None, None, None, None)
        if norm is not None:
            before = (norm.x, norm.weight, norm.eps, x.f32, *act_arguments(x))
            x.quant.norm = None
        router_kernel(n_experts, tile, 0 if norm is None else width)(
            (ceil_div(n_experts, _ROUTER_WARPS), ceil_div(n_tokens, tile)),
            (32 * _ROUTER_WARPS,),
            (
                *before, router.data, router_bias, router.factor, logits, self.posted[n_experts], bias, ids, weights,
                width, n_tokens, *_choice(spec, n_experts), *_lines(n_tokens, ahead),
            ),
        )  # fmt: skip
