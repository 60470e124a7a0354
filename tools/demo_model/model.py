"""The demo model in PyTorch: qwen35moe (or qwen35, its dense twin) as this engine runs it, for training.

Parameters have the names and the layouts of the GGUF tensors, with two exceptions that export.py undoes: `ssm_a` is
kept as the logarithm of its negative, and matrices are float32. Layers are functions of (hidden states, their
parameters), so that one compiled function serves all layers of a kind.

All experts are computed for every token and the routing weights, zero for all but the best, are multiplied in: at this
size that is cheaper on a GPU than sorting tokens, and gradients are those of the sparse model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Params = dict[str, Tensor]
CHUNK = 64
"""Tokens of a chunk of the delta rule."""


@dataclass(frozen=True)
class DemoShape:
    """Sizes of the model. `n_experts` 0: dense, with a feed-forward as wide as what a token uses of the experts."""

    n_vocab: int = 4096
    width: int = 256
    n_layers: int = 8
    attention_interval: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 32
    rope_base: float = 10000.0
    n_key_heads: int = 2
    n_value_heads: int = 4
    state_dim: int = 64
    conv_kernel: int = 4
    n_experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    shared_width: int = 128
    context: int = 2048
    eps: float = 1e-6

    @property
    def dense_width(self) -> int:
        return self.top_k * self.expert_width + self.shared_width

    @property
    def key_width(self) -> int:
        return self.n_key_heads * self.state_dim

    @property
    def value_width(self) -> int:
        return self.n_value_heads * self.state_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0


def mixer_shapes(shape: DemoShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Row-major shapes of a layer's tensors before the feed-forward, by name below `blk.N.`."""
    width = shape.width
    if shape.is_attention(layer):
        rows, kv_rows = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
        return {
            "attn_norm.weight": (width,),
            "attn_q.weight": (2 * rows, width),
            "attn_k.weight": (kv_rows, width),
            "attn_v.weight": (kv_rows, width),
            "attn_q_norm.weight": (shape.head_dim,),
            "attn_k_norm.weight": (shape.head_dim,),
            "attn_output.weight": (width, rows),
        }
    channels = 2 * shape.key_width + shape.value_width
    return {
        "attn_norm.weight": (width,),
        "attn_qkv.weight": (channels, width),
        "attn_gate.weight": (shape.value_width, width),
        "ssm_conv1d.weight": (channels, shape.conv_kernel),
        "ssm_dt.bias": (shape.n_value_heads,),
        "ssm_a": (shape.n_value_heads,),
        "ssm_beta.weight": (shape.n_value_heads, width),
        "ssm_alpha.weight": (shape.n_value_heads, width),
        "ssm_norm.weight": (shape.state_dim,),
        "ssm_out.weight": (width, shape.value_width),
    }


def ffn_shapes(shape: DemoShape) -> dict[str, tuple[int, ...]]:
    """Row-major shapes of a layer's feed-forward tensors."""
    width, n, inner = shape.width, shape.n_experts, shape.expert_width
    norm: dict[str, tuple[int, ...]] = {"post_attention_norm.weight": (width,)}
    if not n:
        dense = shape.dense_width
        return norm | {
            "ffn_gate.weight": (dense, width),
            "ffn_up.weight": (dense, width),
            "ffn_down.weight": (width, dense),
        }
    return norm | {
        "ffn_gate_inp.weight": (n, width),
        "ffn_gate_exps.weight": (n, inner, width),
        "ffn_up_exps.weight": (n, inner, width),
        "ffn_down_exps.weight": (n, width, inner),
        "ffn_gate_inp_shexp.weight": (width,),
        "ffn_gate_shexp.weight": (shape.shared_width, width),
        "ffn_up_shexp.weight": (shape.shared_width, width),
        "ffn_down_shexp.weight": (width, shape.shared_width),
    }


def model_shapes(shape: DemoShape) -> dict[str, tuple[int, ...]]:
    """Row-major shapes of all tensors by their GGUF names. The head is the embedding."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.n_vocab, shape.width)}
    for layer in range(shape.n_layers):
        tensors = mixer_shapes(shape, layer) | ffn_shapes(shape)
        found |= {f"blk.{layer}.{name}": dims for name, dims in tensors.items()}
    return found | {"output_norm.weight": (shape.width,)}


def initial(name: str, dims: tuple[int, ...], n_layers: int, generator: torch.Generator) -> Tensor:
    """First values of a tensor: outputs that add to the residual are small, forgetting is slow in some heads."""
    kind = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.split(".")[-1]
    if kind.endswith("norm"):
        return torch.ones(dims)
    if kind == "ssm_a":
        return torch.log(torch.rand(dims, generator=generator) * 15 + 1)
    if kind == "ssm_dt":
        step = torch.exp(torch.rand(dims, generator=generator) * math.log(100) + math.log(1e-3))
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    std = 0.5 / math.sqrt(dims[-1])
    if kind in ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp"):
        std /= math.sqrt(2 * n_layers)
    return torch.randn(dims, generator=generator) * std


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, T, C], weight [C, K], the last column for the token itself -> [B, T, C]."""
    kernel = weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    return sum((padded[:, j : j + x.shape[1]] * weight[:, j] for j in range(kernel)), torch.zeros_like(x))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """The gated delta rule from an empty state, in chunks.

    q, k, v [B, H, T, d] with unit k and scaled q; g (log of the decay) and beta [B, H, T] -> [B, H, T, d]. T is a
    multiple of `chunk`. Per token: S = exp(g) S; e = beta (v - S^T k); S += k e^T; o = S^T q.
    """
    batch, heads, n_tokens, dim = q.shape
    n = n_tokens // chunk
    q, k, v = (x.reshape(batch * heads, n, chunk, dim) for x in (q, k, v))
    g, beta = (x.reshape(batch * heads, n, chunk) for x in (g, beta))
    total = g.cumsum(-1)
    decay = total[..., :, None] - total[..., None, :]
    row = torch.arange(chunk, device=q.device)
    decay = torch.exp(decay.masked_fill(row[:, None] < row[None, :], float("-inf")))
    strict = (row[:, None] > row[None, :]).to(q.dtype)
    within = beta[..., None] * (k @ k.transpose(-1, -2)) * decay * strict
    sides = torch.cat([beta[..., None] * v, (beta * torch.exp(total))[..., None] * k], -1)
    unit = torch.eye(chunk, device=q.device, dtype=q.dtype)
    solved = torch.linalg.solve_triangular(within + unit, sides, upper=False, unitriangular=True)
    values, keys = solved.split(dim, -1)
    last = total[..., -1:]
    into = (k * torch.exp(last - total)[..., None]).transpose(-1, -2)
    keep = torch.exp(last)[..., None]
    state = torch.zeros(batch * heads, dim, dim, device=q.device, dtype=q.dtype)
    states, news = [], []
    for i in range(n):
        states.append(state)
        new = torch.baddbmm(values[:, i], keys[:, i], state, alpha=-1)
        news.append(new)
        state = torch.baddbmm(keep[:, i] * state, into[:, i], new)
    before, new = torch.stack(states, 1), torch.stack(news, 1)
    out = (q * torch.exp(total)[..., None]) @ before + ((q @ k.transpose(-1, -2)) * decay) @ new
    return out.reshape(batch, heads, n_tokens, dim)


def delta_mixer(x: Tensor, p: Params, shape: DemoShape) -> Tensor:
    batch, n_tokens, _ = x.shape
    n = rms_norm(x, p["attn_norm.weight"], shape.eps)
    u = F.linear(n, p["attn_qkv.weight"])
    z = F.linear(n, p["attn_gate.weight"]).float()
    b = F.linear(n, p["ssm_beta.weight"]).float()
    a = F.linear(n, p["ssm_alpha.weight"]).float()
    with torch.autocast(x.device.type, enabled=False):
        c = F.silu(causal_conv(u.float(), p["ssm_conv1d.weight"]))
        q, k, v = c.split([shape.key_width, shape.key_width, shape.value_width], -1)
        q, k, v = (t.unflatten(-1, (-1, shape.state_dim)).transpose(1, 2) for t in (q, k, v))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + shape.eps) * shape.state_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + shape.eps)
        times = shape.n_value_heads // shape.n_key_heads
        q, k = q.repeat(1, times, 1, 1), k.repeat(1, times, 1, 1)  # value head h is served by key head h % n
        g = (-torch.exp(p["ssm_a"]) * F.softplus(a + p["ssm_dt.bias"])).transpose(1, 2)
        o = delta_rule(q, k, v, g, torch.sigmoid(b).transpose(1, 2))
        o = rms_norm(o.transpose(1, 2), p["ssm_norm.weight"], shape.eps).reshape(batch, n_tokens, -1) * F.silu(z)
    return F.linear(o, p["ssm_out.weight"])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, T, H, D]: the first 2 r dims turned by angles [T, r], pair i of dims i and i + r."""
    r = angles.shape[1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split([r, r, x.shape[-1] - 2 * r], -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def attention_mixer(x: Tensor, p: Params, shape: DemoShape) -> Tensor:
    n_tokens, dim = x.shape[1], shape.head_dim
    n = rms_norm(x, p["attn_norm.weight"], shape.eps)
    q, gate = F.linear(n, p["attn_q.weight"]).unflatten(-1, (shape.n_head, 2, dim)).unbind(-2)
    k = F.linear(n, p["attn_k.weight"]).unflatten(-1, (shape.n_head_kv, dim))
    v = F.linear(n, p["attn_v.weight"]).unflatten(-1, (shape.n_head_kv, dim))
    powers = torch.arange(shape.n_rot // 2, device=x.device, dtype=torch.float32) * (-2.0 / shape.n_rot)
    angles = torch.arange(n_tokens, device=x.device, dtype=torch.float32)[:, None] * shape.rope_base**powers
    q = rotate(rms_norm(q, p["attn_q_norm.weight"], shape.eps), angles)
    k = rotate(rms_norm(k, p["attn_k_norm.weight"], shape.eps), angles)
    times = shape.n_head // shape.n_head_kv
    q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return F.linear((o * torch.sigmoid(gate)).flatten(2), p["attn_output.weight"])


def experts(x: Tensor, p: Params, shape: DemoShape) -> tuple[Tensor, Tensor]:
    """(y, balance): balance is 1 where all experts are used alike, and grows with the skew."""
    m = rms_norm(x, p["post_attention_norm.weight"], shape.eps).flatten(0, 1)
    with torch.autocast(x.device.type, enabled=False):
        chances = F.linear(m, p["ffn_gate_inp.weight"]).softmax(-1)
        best, ids = chances.topk(shape.top_k)
        weights = torch.zeros_like(chances).scatter(1, ids, best / best.sum(-1, keepdim=True))
        share = (weights > 0).float().mean(0) / shape.top_k
        balance = shape.n_experts * (share * chances.mean(0)).sum()
        gate = torch.sigmoid(m @ p["ffn_gate_inp_shexp.weight"])[:, None]
    inner = F.silu(F.linear(m, p["ffn_gate_exps.weight"].flatten(0, 1)))
    inner = inner * F.linear(m, p["ffn_up_exps.weight"].flatten(0, 1))
    inner = (inner.unflatten(1, (shape.n_experts, -1)) * weights[..., None].to(inner.dtype)).flatten(1)
    routed = inner @ p["ffn_down_exps.weight"].transpose(1, 2).flatten(0, 1).to(inner.dtype)
    shared = F.silu(F.linear(m, p["ffn_gate_shexp.weight"])) * F.linear(m, p["ffn_up_shexp.weight"])
    shared = F.linear(shared, p["ffn_down_shexp.weight"])
    return (routed + gate * shared).view(x.shape), balance


def dense(x: Tensor, p: Params, shape: DemoShape) -> Tensor:
    m = rms_norm(x, p["post_attention_norm.weight"], shape.eps)
    inner = F.silu(F.linear(m, p["ffn_gate.weight"])) * F.linear(m, p["ffn_up.weight"])
    return F.linear(inner, p["ffn_down.weight"])


def block(x: Tensor, p: Params, shape: DemoShape, is_attention: bool) -> tuple[Tensor, Tensor]:
    """One layer: (hidden states, balance of its experts)."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        x = x + (attention_mixer if is_attention else delta_mixer)(x, p, shape)
        if not shape.n_experts:
            return x + dense(x, p, shape), x.new_zeros(())
        y, balance = experts(x, p, shape)
        return x + y, balance


def head_loss(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Mean cross entropy; targets below 0 are left out."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = F.linear(rms_norm(x, norm, eps), embedding)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)


class DemoModel(nn.Module):
    """Parameters by GGUF name (with `/` for `.`), and the functions above over all layers."""

    def __init__(self, shape: DemoShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.tensors = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(initial(name, dims, shape.n_layers, generator))
                for name, dims in model_shapes(shape).items()
            }
        )
        self.run_block: Callable[..., tuple[Tensor, Tensor]] = block
        self.run_head: Callable[..., Tensor] = head_loss

    def compile_layers(self) -> None:
        """One compiled function per kind of layer, and one for the head."""
        self.run_block = torch.compile(block, dynamic=False)
        self.run_head = torch.compile(head_loss, dynamic=False)

    def gguf_tensors(self) -> dict[str, Tensor]:
        """Tensors by GGUF name, as they are trained."""
        return {name.replace("/", "."): tensor for name, tensor in self.tensors.items()}

    def layer(self, index: int) -> Params:
        """A layer's tensors by their names below `blk.N.`."""
        names = mixer_shapes(self.shape, index) | ffn_shapes(self.shape)
        return {name: self.tensors[f"blk/{index}/{name.replace('.', '/')}"] for name in names}

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states before the final norm [B, T, width], mean balance of the layers' experts)."""
        x = F.embedding(ids, self.tensors["token_embd/weight"])
        balances = []
        for index in range(self.shape.n_layers):
            x, balance = self.run_block(x, self.layer(index), self.shape, self.shape.is_attention(index))
            balances.append(balance)
        return x, torch.stack(balances).mean()

    def loss(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(mean cross entropy, balance) for ids and targets [B, T], T a multiple of CHUNK."""
        x, balance = self.hidden(ids)
        norm, embedding = self.tensors["output_norm/weight"], self.tensors["token_embd/weight"]
        return self.run_head(x, norm, embedding, targets, self.shape.eps), balance

    def logits(self, ids: Tensor) -> Tensor:
        """float [B, T, n_vocab] for any T."""
        n_tokens = ids.shape[1]
        x, _ = self.hidden(F.pad(ids, (0, -n_tokens % CHUNK)))
        x = rms_norm(x[:, :n_tokens], self.tensors["output_norm/weight"], self.shape.eps)
        return F.linear(x, self.tensors["token_embd/weight"])
