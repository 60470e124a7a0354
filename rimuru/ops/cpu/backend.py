"""The class of the CPU backend: every verb from its file, activations made ready for the matrices that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rimuru.arch.spec import Activation
from rimuru.ops.base import Act, Array, KvLayer, Step, Weight
from rimuru.ops.cpu import attention, embed, matmul, moe, pointwise, qkv, quantize, recurrent, routing, sampling
from rimuru.ops.cpu.quantize import quantize_act
from rimuru.ops.cpu.simd_launch import set_threads
from rimuru.ops.reference import ReferenceOps


class CpuOps(ReferenceOps):
    """All verbs of `Ops` in Numba. Memory and batches are the reference's: NumPy arrays in RAM, used where they lie."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(np.float32)
        if threads is not None:
            set_threads(threads)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.empty(tuple(shape), dtype)

    def act(self, n_tokens: int, width: int) -> Act:
        return quantize.act(n_tokens, width)

    def act_bytes(self, n_tokens: int, width: int) -> int:
        return quantize.act_bytes(n_tokens, width)

    # ---- verbs that fill an Act: the float32 values, then their 8-bit form, once for all readers
    @staticmethod
    def rms_norm(x: Array, weight: Array, eps: float, out: Act, may_wait: bool = False) -> None:
        pointwise.rms_norm(x, weight, eps, out)
        quantize_act(out, x.shape[0])

    @staticmethod
    def gated_norm(x: Array, gate: Array, weight: Array, eps: float, n_groups: int, gate_first: bool, out: Act) -> None:
        pointwise.gated_norm(x, gate, weight, eps, n_groups, gate_first, out)
        quantize_act(out, x.shape[0])

    @staticmethod
    def glu(gate: Array | None, up: Array, activation: Activation, out: Act) -> None:
        pointwise.glu(gate, up, activation, out)
        quantize_act(out, up.shape[0])

    @staticmethod
    def multiply(a: Array, b: Array, out: Act) -> None:
        pointwise.multiply(a, b, out)
        quantize_act(out, a.shape[0])

    @staticmethod
    def head_linear(x: Array, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
        matmul.head_linear(x, weight, n_head, heads, out)
        quantize_act(out, x.shape[0])

    @staticmethod
    def attention(
        q: Array,
        n_head: int,
        q_stride: int,
        gated: bool,
        step: Step,
        kv: KvLayer,
        scale: float,
        window: int | None,
        sinks: Array | None,
        out: Act,
    ) -> None:
        attention.attention(q, n_head, q_stride, gated, step, kv, scale, window, sinks, out)
        quantize_act(out, q.shape[0])

    # ---- the rest
    embed = staticmethod(embed.embed)
    add_norm = staticmethod(pointwise.add_norm)
    row_gate = staticmethod(pointwise.row_gate)
    gather_rows = staticmethod(pointwise.gather_rows)
    finish_logits = staticmethod(pointwise.finish_logits)
    linear = staticmethod(matmul.linear)
    prepare_qkv = staticmethod(qkv.prepare_qkv)
    route = staticmethod(routing.route)
    moe_scratch = staticmethod(moe.moe_scratch)
    moe_scratch_bytes = staticmethod(moe.moe_scratch_bytes)
    moe_experts = staticmethod(moe.moe_experts)
    moe_combine = staticmethod(moe.moe_combine)
    conv_update = staticmethod(recurrent.conv_update)
    delta_net = staticmethod(recurrent.delta_net)
    mamba2 = staticmethod(recurrent.mamba2)
    mamba1 = staticmethod(recurrent.mamba1)
    sample = staticmethod(sampling.sample)
