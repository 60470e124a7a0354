"""The activation between an expert's projections, over float32 buffers whose rows are padded to 16."""

from __future__ import annotations

from functools import cache, partial

from rimuru.arch.spec import Activation
from rimuru.ops.cpu import simd_build
from rimuru.ops.cpu.simd import F32X16, Isa, Kernel, V

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2)/2 (Cephes expf)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(k: Kernel, x: V) -> V:
    """e^x within 2 units of the last place; results outside float32's normal range stop at its ends."""
    x = x.compare("<", -87.0).select(-87.0, x)
    x = x.compare(">", 88.0).select(88.0, x)
    n = k.intrinsic("llvm.roundeven", F32X16, x * _LOG2_E)
    r = k.fma(n, k.const(-_LN2_HIGH, F32X16), x)
    r = k.fma(n, k.const(-_LN2_LOW, F32X16), r)
    p = k.const(_EXP[0], F32X16)
    for coefficient in _EXP[1:]:
        p = k.fma(p, r, k.const(coefficient, F32X16))
    y = k.fma(p * r, r, r) + 1.0
    return y * ((n.to_i32_saturating() + 127) << 23).bitcast(F32X16)


def _sigmoid(k: Kernel, x: V) -> V:
    return k.const(1.0, F32X16) / (exp(k, -x) + 1.0)


def _apply(k: Kernel, name: Activation, z: V) -> V:
    if name == "silu":
        return z * _sigmoid(k, z)
    if name == "gelu_tanh":
        # 0.5 (1 + tanh y) = sigmoid(2 y)
        y = (z + z * z * z * 0.044715) * 0.7978845608028654
        return z * _sigmoid(k, y * 2.0)
    positive = z.compare("<", 0.0).select(0.0, z)
    return positive * positive


def _swiglu_oai(k: Kernel, gate: V, up: V) -> V:
    g = gate.compare(">", 7.0).select(7.0, gate)
    u = up.compare(">", 7.0).select(7.0, up)
    u = u.compare("<", -7.0).select(-7.0, u)
    return g * _sigmoid(k, g * 1.702) * (u + 1.0)


def emit_glu(name: Activation, gated: bool, k: Kernel, gate: V, up: V, out: V, n: V) -> None:
    """out[i] = act(gate[i]) * up[i], or act(up[i]); n is rounded up to 16, and buffers must have room for that."""
    with k.loop(n, step=16) as i:
        u = k.load(up + i * 4, F32X16)
        if not gated:
            value = _apply(k, name, u)
        elif name == "swiglu_oai":
            value = _swiglu_oai(k, k.load(gate + i * 4, F32X16), u)
        else:
            value = _apply(k, name, k.load(gate + i * 4, F32X16)) * u
        k.store(value, out + i * 4)


@cache
def glu_kernel(name: Activation, gated: bool, isa: Isa | None = None) -> int:
    """Address of emit_glu for an activation."""
    variant = isa or simd_build.host_isa()
    return simd_build.build(f"glu_{name}_{'gated' if gated else 'plain'}", 4, partial(emit_glu, name, gated), variant)
