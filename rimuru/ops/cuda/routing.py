"""Launcher of the routing kernel (cuda_src/moe/route_topk.cu)."""

from __future__ import annotations

from functools import cache

from rimuru.arch.spec import MoeSpec
from rimuru.base.errors import RimuruError
from rimuru.base.units import ceil_div
from rimuru.ops.base import Array
from rimuru.ops.cuda.launch import Kernel

MAX_EXPERTS = 1024
_GATINGS = {"softmax": 0, "sigmoid": 1, "softmax_selected": 2, "sqrt_softplus": 3}


@cache
def _route_kernel(per_lane: int) -> Kernel:
    signature = (
        "logits: f32*, bias: f32*, ids: i32*, weights: f32*, n_tokens: i32, n_experts: i32, top_k: i32, gating: i32,"
        "n_groups: i32, n_groups_used: i32, renormalise: i32, scale: f32"
    )
    return Kernel("moe/route_topk.cu", "route_topk", signature, {"PER_LANE": per_lane})


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
    if spec.top_k > n_experts or spec.n_groups > 32:
        raise RimuruError(f"cannot choose {spec.top_k} of {n_experts} experts in {spec.n_groups} groups")
    warps = 4 if n_tokens > 132 else 1
    route_kernel(n_experts)(
        (ceil_div(n_tokens, warps),),
        (32 * warps,),
        (
            logits, bias, ids, weights, n_tokens, n_experts, spec.top_k, _GATINGS[spec.gating], spec.n_groups,
            spec.n_groups_used, int(spec.renormalise), spec.weights_scale or 1.0,
        ),
    )  # fmt: skip
