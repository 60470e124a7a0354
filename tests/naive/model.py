"""Whole-model forward pass in plain NumPy float64 on dequantised weights: the oracle of all that is above kernels.

Written from the formulas of the architecture facts, one function per formula; shares no code with rimuru.forward or
rimuru.ops. One sequence, all positions at once, no caches: slow and obvious.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rimuru.arch.registry import read_config
from rimuru.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    DenseFfnSpec,
    LayerSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    ShortConvSpec,
)
from rimuru.formats.gguf import GgufFile
from rimuru.formats.quants_ref import dequantize

Array = np.ndarray[Any, np.dtype[np.float64]]
MIN_WEIGHT_SUM = 6.103515625e-5


def naive_logits(gguf: GgufFile, token_ids: Any, context: int | None = None) -> Array:
    """Next-token logits after each token: float64 [n, n_vocab]. `context` as configured (rope factors only)."""
    return naive_run(gguf, token_ids, context)[0]


def naive_run(gguf: GgufFile, token_ids: Any, context: int | None = None) -> tuple[Array, dict[str, Array]]:
    """The logits, and the recurrent states after the last token by prefix ("blk.0."): [heads, k, v] (DeltaNet),
    [heads, p, n] (Mamba2), [inner, n] (Mamba1)."""
    config = read_config(gguf, context)
    w = Weights(gguf)
    x = config.embedding_scale * w["token_embd.weight"][np.asarray(token_ids)]
    for layer in config.layers:
        x = block(x, config, layer, w.below(f"blk.{layer.index}."), w)
    x = rms(x, w[config.output_norm], config.norm_eps)
    logits = x @ w["token_embd.weight" if config.tied_head else "output.weight"].T
    if config.output_bias:
        logits += w["output.bias"]
    logits *= config.logit_scale
    if config.final_softcap is not None:
        logits = config.final_softcap * np.tanh(logits / config.final_softcap)
    return logits, w.states


class Weights:
    """Tensors by name as float64, numpy order (the reverse of ne)."""

    def __init__(self, gguf: GgufFile, prefix: str = "") -> None:
        self.gguf, self.prefix = gguf, prefix
        self.states: dict[str, Array] = {}
        """Filled by the recurrent mixers; shared with what is below."""

    def below(self, prefix: str) -> Weights:
        lower = Weights(self.gguf, prefix)
        lower.states = self.states
        return lower

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.gguf.tensors

    def __getitem__(self, name: str) -> Array:
        info = self.gguf.tensors[self.prefix + name]
        raw = self.gguf.raw(info.name).reshape(info.n_rows, info.row_bytes)
        values = dequantize(raw, info.format).astype(np.float64).reshape(info.shape[::-1])
        companion = info.name.removesuffix(".weight") + ".scale"
        if info.format.name == "nvfp4" and companion in self.gguf.tensors:  # one number, or one for each expert
            factors = self.gguf.raw(companion).view("<f4").astype(np.float64)
            values = values * factors.reshape(-1, *[1] * (values.ndim - 1))
        return values

    def linear(self, x: Array, name: str) -> Array:
        """W x, plus the bias where there is one."""
        y = x @ self[name + ".weight"].T
        return y + self[name + ".bias"] if name + ".bias" in self else y


def block(x: Array, config: ModelConfig, layer: LayerSpec, w: Weights, top: Weights) -> Array:
    eps, scale = config.norm_eps, config.residual_scale
    if layer.mixer is not None:
        n = rms(x, w[layer.mixer_norm], eps)
        y = MIXERS[type(layer.mixer)](n, layer.mixer, w, eps, top)
        if layer.post_mixer_norm:
            y = rms(y, w[layer.post_mixer_norm], eps)
        x = x + scale * y
    if layer.ffn is not None:
        n = rms(x, w[layer.ffn_norm], eps)
        y = dense(n, layer.ffn, w, "") if isinstance(layer.ffn, DenseFfnSpec) else moe(n, layer.ffn, w)
        if layer.post_ffn_norm:
            y = rms(y, w[layer.post_ffn_norm], eps)
        x = x + scale * y
    return x


# ---------------------------------------------------------------- pieces
def rms(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def activate(name: str, gate: Array | None, up: Array) -> Array:
    if gate is None:
        return np.maximum(up, 0) ** 2 if name == "relu2" else silu(up)
    if name == "silu":
        return silu(gate) * up
    if name == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if name == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    raise ValueError(name)


def rope(x: Array, spec: RopeSpec | None, top: Weights) -> Array:
    """Rotate the first n_rot dims of x [T, heads, dim]; token t is at position t."""
    if spec is None:
        return x
    n, half = spec.n_rot, spec.n_rot // 2
    i = np.arange(half)
    theta = np.arange(len(x))[:, None] * spec.freq_base ** (-2.0 * i / n)
    if spec.factors_tensor is not None:
        theta = theta / top[spec.factors_tensor]
    if spec.yarn is not None:
        low, high = (
            n * np.log(spec.yarn.original_context / (beta * 2 * np.pi)) / (2 * np.log(spec.freq_base))
            for beta in (spec.yarn.beta_fast, spec.yarn.beta_slow)
        )
        low, high = max(0.0, np.floor(low)), min(n - 1.0, np.ceil(high))
        ramp = np.clip((i - low) / max(0.001, high - low), 0, 1)
        theta = theta / spec.yarn.factor * ramp + theta * (1 - ramp)
    theta = theta * spec.freq_scale
    cos, sin = (spec.magnitude * f(theta)[:, None, :] for f in (np.cos, np.sin))
    first = slice(0, n, 2) if spec.pairing == "adjacent" else slice(0, half)
    second = slice(1, n, 2) if spec.pairing == "adjacent" else slice(half, n)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def attend(q: Array, k: Array, v: Array, scale: float, window: int | None = None, sinks: Array | None = None) -> Array:
    """Causal attention. q [T, H, D], k [T, K, D], v [T, K, V] -> [T, H * V]."""
    n, n_head = q.shape[:2]
    k, v = (np.repeat(part, n_head // k.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * scale
    t, s = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = (s <= t) if window is None else (s <= t) & (t - s < window)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.einsum("hts,shv->thv", p / total, v).reshape(n, -1)


def conv(x: Array, w: Weights, name: str) -> Array:
    """Causal depthwise convolution of x [T, C]; the last tap belongs to the current token."""
    taps = w[name + ".weight"]  # (C, K)
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
    y = np.zeros_like(x)
    for i in range(taps.shape[1]):
        y += padded[i : i + len(x)] * taps[:, i]
    return y + w[name + ".bias"] if name + ".bias" in w else y


# ---------------------------------------------------------------- mixers
def attention(n: Array, spec: AttentionSpec, w: Weights, eps: float, top: Weights) -> Array:
    n_tokens, n_head, n_kv, dim = len(n), spec.n_head, spec.n_head_kv, spec.key_dim
    if spec.fused_qkv:
        both = w.linear(n, "attn_qkv")
        at = np.cumsum([n_head * dim, n_kv * dim])
        q, k, v = np.split(both, at, axis=1)
        if "attn_q.bias" in w:
            q, k, v = q + w["attn_q.bias"], k + w["attn_k.bias"], v + w["attn_v.bias"]
    else:
        q, k, v = (w.linear(n, f"attn_{part}") for part in "qkv")
    gate = None
    if spec.output_gate:
        both = q.reshape(n_tokens, n_head, 2 * dim)
        q, gate = both[..., :dim].reshape(n_tokens, -1), both[..., dim:].reshape(n_tokens, -1)
    if spec.qk_norm == "vector":
        q, k = rms(q, w["attn_q_norm.weight"], eps), rms(k, w["attn_k_norm.weight"], eps)
    q, k = (part.reshape(n_tokens, heads, dim) for part, heads in ((q, n_head), (k, n_kv)))
    v = v.reshape(n_tokens, n_kv, spec.value_dim)
    if spec.qk_norm_after_rope:
        q, k = rope(q, spec.rope, top), rope(k, spec.rope, top)
    if spec.qk_norm == "head":
        q, k = rms(q, w["attn_q_norm.weight"], eps), rms(k, w["attn_k_norm.weight"], eps)
    if not spec.qk_norm_after_rope:
        q, k = rope(q, spec.rope, top), rope(k, spec.rope, top)
    o = attend(q, k, v, spec.scale, spec.window, w["attn_sinks.weight"] if spec.sinks else None)
    if gate is not None:
        o = o * sigmoid(gate)
    y = o @ w["attn_output.weight"].T
    return y + w["attn_output.bias"] if spec.output_bias else y


def latent_attention(n: Array, spec: MlaSpec, w: Weights, eps: float, top: Weights) -> Array:
    """The un-absorbed form: full keys and values per head."""
    n_tokens, n_head, rank, nope = len(n), spec.n_head, spec.kv_lora_rank, spec.nope_dim
    if spec.q_lora_rank is None:
        q = w.linear(n, "attn_q")
    else:
        q = w.linear(rms(w.linear(n, "attn_q_a"), w["attn_q_a_norm.weight"], eps), "attn_q_b")
    q = q.reshape(n_tokens, n_head, -1)
    both = w.linear(n, "attn_kv_a_mqa")
    c = rms(both[:, :rank], w["attn_kv_a_norm.weight"], eps)
    shared = rope(both[:, None, rank:], spec.rope, top)
    if spec.fused_kv_b:
        kv = w.linear(c, "attn_kv_b").reshape(n_tokens, n_head, -1)
        k_nope, v = kv[..., :nope], kv[..., nope:]
    else:
        k_nope = np.einsum("tc,hcn->thn", c, w["attn_k_b.weight"])
        v = np.einsum("tc,hvc->thv", c, w["attn_v_b.weight"])
    q = np.concatenate([q[..., :nope], rope(q[..., nope:], spec.rope, top)], axis=-1)
    k = np.concatenate([k_nope, np.repeat(shared, n_head, axis=1)], axis=-1)
    return w.linear(attend(q, k, v, spec.scale), "attn_output")


def delta_net(n: Array, spec: DeltaNetSpec, w: Weights, eps: float, top: Weights) -> Array:
    n_tokens, n_key, n_value, d = len(n), spec.n_key_heads, spec.n_value_heads, spec.head_dim
    ratio = n_value // n_key
    if spec.fused_in:
        parts = np.split(w.linear(n, "ssm_in").reshape(n_tokens, n_key, -1), np.cumsum([d, d, ratio * d]), axis=-1)
        q, k, v, z = (part.reshape(n_tokens, -1) for part in parts)
        u = np.concatenate([q, k, v], axis=1)
    else:
        u, z = w.linear(n, "attn_qkv"), w.linear(n, "attn_gate")
    if spec.fused_ba:
        ba = w.linear(n, "ssm_ba").reshape(n_tokens, n_key, 2 * ratio)
        b, a = ba[..., :ratio].reshape(n_tokens, -1), ba[..., ratio:].reshape(n_tokens, -1)
    else:
        b, a = w.linear(n, "ssm_beta"), w.linear(n, "ssm_alpha")
    c = silu(conv(u, w, "ssm_conv1d"))
    q, k, v = np.split(c, np.cumsum([n_key * d, n_key * d]), axis=1)
    q, k, v = (part.reshape(n_tokens, -1, d) for part in (q, k, v))
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + eps) for part in (q, k))
    q = q / np.sqrt(d)
    heads = np.arange(n_value) // ratio if spec.head_order == "grouped" else np.arange(n_value) % n_key
    q, k = q[:, heads], k[:, heads]
    beta, g = sigmoid(b), w["ssm_a"].reshape(-1) * softplus(a + w["ssm_dt.bias"])
    state = np.zeros((n_value, d, d))  # [head, k dim, v dim]
    o = np.zeros((n_tokens, n_value, d))
    for t in range(n_tokens):
        state *= np.exp(g[t])[:, None, None]
        e = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t][:, :, None] * e[:, None, :]
        o[t] = np.einsum("hkv,hk->hv", state, q[t])
    w.states[w.prefix] = state
    o = rms(o, w["ssm_norm.weight"], eps).reshape(n_tokens, -1) * silu(z)
    return w.linear(o, "ssm_out")


def mamba2(n: Array, spec: Mamba2Spec, w: Weights, eps: float, top: Weights) -> Array:
    n_tokens, inner, heads, groups, size = len(n), spec.inner_size, spec.n_heads, spec.n_groups, spec.state_size
    z, xbc, dt = np.split(w.linear(n, "ssm_in"), np.cumsum([inner, inner + 2 * groups * size]), axis=1)
    x, b, c = np.split(silu(conv(xbc, w, "ssm_conv1d")), np.cumsum([inner, groups * size]), axis=1)
    x = x.reshape(n_tokens, heads, -1)
    b, c = (np.repeat(part.reshape(n_tokens, groups, size), heads // groups, axis=1) for part in (b, c))
    dt = softplus(dt + w["ssm_dt.bias"])
    decay = np.exp(dt * w["ssm_a"].reshape(-1))
    state = np.zeros((heads, x.shape[2], size))
    y: Array = np.zeros_like(x)
    for t in range(n_tokens):
        state = decay[t][:, None, None] * state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        y[t] = np.einsum("hpn,hn->hp", state, c[t]) + w["ssm_d"].reshape(-1)[:, None] * x[t]
    w.states[w.prefix] = state
    y = (y.reshape(n_tokens, -1) * silu(z)).reshape(n_tokens, groups, -1)
    y = rms(y, w["ssm_norm.weight"].reshape(groups, -1), eps).reshape(n_tokens, -1)
    return w.linear(y, "ssm_out")


def mamba1(n: Array, spec: Mamba1Spec, w: Weights, eps: float, top: Weights) -> Array:
    n_tokens, size, rank = len(n), spec.state_size, spec.dt_rank
    x, z = np.split(w.linear(n, "ssm_in"), 2, axis=1)
    x = silu(conv(x, w, "ssm_conv1d"))
    parts = np.split(w.linear(x, "ssm_x"), np.cumsum([rank, size]), axis=1)
    dt, b, c = (
        rms(part, w[f"ssm_{name}_norm.weight"], eps) for part, name in zip(parts, ("dt", "b", "c"), strict=True)
    )
    dt = softplus(w.linear(dt, "ssm_dt"))
    a = w["ssm_a"]  # (inner, size)
    state = np.zeros_like(a)
    y = np.zeros_like(x)
    for t in range(n_tokens):
        state = np.exp(dt[t][:, None] * a) * state + (dt[t] * x[t])[:, None] * b[t]
        y[t] = state @ c[t] + w["ssm_d"] * x[t]
    w.states[w.prefix] = state
    return w.linear(y * silu(z), "ssm_out")


def short_conv(n: Array, spec: ShortConvSpec, w: Weights, eps: float, top: Weights) -> Array:
    b, c, x = np.split(w.linear(n, "shortconv.in_proj"), 3, axis=1)
    return w.linear(c * conv(b * x, w, "shortconv.conv"), "shortconv.out_proj")


MIXERS: dict[type, Callable[..., Array]] = {
    AttentionSpec: attention,
    MlaSpec: latent_attention,
    DeltaNetSpec: delta_net,
    Mamba2Spec: mamba2,
    Mamba1Spec: mamba1,
    ShortConvSpec: short_conv,
}


# ---------------------------------------------------------------- feed-forward
def dense(n: Array, spec: DenseFfnSpec, w: Weights, suffix: str) -> Array:
    up = w.linear(n, f"ffn_up{suffix}")
    gate: Array | None = None
    if spec.fused_gate_up:
        gate, up = np.split(up, 2, axis=1)
    elif spec.gated:
        gate = w.linear(n, f"ffn_gate{suffix}")
    return w.linear(activate(spec.activation, gate, up), f"ffn_down{suffix}")


def route(n: Array, spec: MoeSpec, w: Weights) -> tuple[NDArray[np.int64], Array]:
    """Expert ids and weights [T, k]; ties go to the lowest id."""
    logits = w.linear(n, "ffn_gate_inp")
    scores = {
        "softmax": softmax,
        "sigmoid": sigmoid,
        "softmax_selected": lambda x: x,
        "sqrt_softplus": lambda x: np.sqrt(softplus(x)),
    }[spec.gating](logits)
    choice = scores + w["exp_probs_b.bias"] if spec.selection_bias else scores.copy()
    if spec.n_groups > 1:
        by_group = choice.reshape(len(n), spec.n_groups, -1)
        best = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
        kept = np.argsort(-best, axis=1, kind="stable")[:, : spec.n_groups_used]
        for t in range(len(n)):
            dropped = np.setdiff1d(np.arange(spec.n_groups), kept[t])
            by_group[t, dropped] = -np.inf
        choice = by_group.reshape(len(n), -1)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if spec.gating == "softmax_selected":
        weights = softmax(weights)
    if spec.renormalise:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    return ids, weights * spec.weights_scale


def moe(n: Array, spec: MoeSpec, w: Weights) -> Array:
    ids, weights = route(n, spec, w)
    x = n @ w["ffn_latent_down.weight"].T if spec.latent_size is not None else n
    y = np.zeros_like(x)
    gates: Array | None
    if spec.fused_gate_up:
        gates, ups = np.split(w["ffn_gate_up_exps.weight"], 2, axis=1)
    else:
        gates, ups = w["ffn_gate_exps.weight"] if spec.gated else None, w["ffn_up_exps.weight"]
    downs = w["ffn_down_exps.weight"]
    biases = {part: w[f"ffn_{part}_exps.bias"] for part in ("gate", "up", "down")} if spec.expert_bias else {}
    for e in np.unique(ids):
        rows, slots = np.nonzero(ids == e)
        up: Array = x[rows] @ ups[e].T
        gate: Array | None = None if gates is None else x[rows] @ gates[e].T
        if biases:
            up = up + biases["up"][e]
            gate = None if gate is None else gate + biases["gate"][e]
        out = activate(spec.activation, gate, up) @ downs[e].T
        if biases:
            out = out + biases["down"][e]
        y[rows] += weights[rows, slots][:, None] * out
    if spec.latent_size is not None:
        y = y @ w["ffn_latent_up.weight"].T
    if spec.shared is not None:
        shared = dense(n, DenseFfnSpec(spec.shared.width, spec.activation, spec.gated), w, "_shexp")
        if spec.shared.sigmoid_gate:
            shared = shared * sigmoid(n @ w["ffn_gate_inp_shexp.weight"].reshape(-1))[:, None]
        y = y + shared
    return y
