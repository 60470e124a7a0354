"""Multi-head latent attention in its absorbed form (facts section 4.9).

A token's cache row is [norm(l) | rotated rope key], kv_lora_rank + n_rot values for all heads together. Queries are
brought into the latent space (q_h -> K_h^T q_h), so keys and values are never expanded:

    score = ([K_h^T q_nope | q_rope] . row) * scale       out_h = V_h (sum of softmax * first kv_lora_rank of row)
"""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import MlaSpec
from rimuru.formats.quants_ref import dequantize
from rimuru.forward.context import BuildContext
from rimuru.ops.base import Act, Array, Step, Weight


class LatentAttention:
    """out (+)= scale * Wo [V_h attention(...)]."""

    def __init__(self, index: int, spec: MlaSpec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.eps = build.config.norm_eps
        prefix, reader = f"blk.{index}.", build.reader
        self.latent = reader.matrix(prefix + "attn_kv_a_mqa.weight")
        self.latent_norm = reader.required_vector(prefix + "attn_kv_a_norm.weight")
        self.query_norm: Array | None = None
        if spec.q_lora_rank is None:
            self.query = reader.matrix(prefix + "attn_q.weight")
        else:
            self.query_low = reader.matrix(prefix + "attn_q_a.weight")
            self.query_norm = reader.required_vector(prefix + "attn_q_a_norm.weight")
            self.query = reader.matrix(prefix + "attn_q_b.weight")
        self.key_up, self.value_up = self._head_matrices(prefix, build)
        self.output = reader.matrix(prefix + "attn_output.weight")
        self.rope = build.rope(spec.rope)
        self.kv = build.kv_layer(index)
        self.key_dim = spec.kv_lora_rank + spec.rope.n_rot
        self._reserve()

    def _head_matrices(self, prefix: str, build: BuildContext) -> tuple[Weight, Weight]:
        """The heads' K_h^T [kv_lora_rank, nope_dim] and V_h [value_dim, kv_lora_rank], under each other.

        Older files have K_h instead. Blocks of a quantised K_h run along what become the columns, so its transpose is
        kept in float32.
        """
        spec, reader = self.spec, build.reader
        if not spec.fused_kv_b:
            return reader.matrix(prefix + "attn_k_b.weight"), reader.matrix(prefix + "attn_v_b.weight")
        name = prefix + "attn_kv_b.weight"
        rows = np.arange(spec.n_head * (spec.nope_dim + spec.value_dim)).reshape(spec.n_head, -1)
        values = reader.permuted(name, rows[:, spec.nope_dim :].reshape(-1))
        key_rows = reader.host(name)[rows[:, : spec.nope_dim].reshape(-1)]
        keys = dequantize(key_rows, build.gguf.tensors[name].format).reshape(spec.n_head, spec.nope_dim, -1)
        factors = reader.factors(name)
        keys = keys if factors is None else keys * factors
        return reader.computed(keys.transpose(0, 2, 1).reshape(-1, spec.nope_dim)), values

    def _reserve(self) -> None:
        spec, ws = self.spec, self.workspace
        ws.need_array("q", spec.n_head * (spec.nope_dim + spec.rope.n_rot))
        ws.need_array("k", self.key_dim)
        ws.need_array("latent_q", spec.n_head * self.key_dim)
        ws.need_array("latent_out", spec.n_head * spec.kv_lora_rank)
        ws.need_act("heads", spec.nope_dim, spec.n_head)
        ws.need_act("heads", spec.kv_lora_rank, spec.n_head)
        ws.need_act("mixed", spec.n_head * spec.value_dim)
        ws.fixed_bytes += self.ops.reserve_attention(spec.n_head, self.kv.group, spec.kv_lora_rank, ws.max_tokens)
        if spec.q_lora_rank is not None:
            ws.need_array("q_low", spec.q_lora_rank)
            ws.need_act("q_low", spec.q_lora_rank)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        """a: normed input [T, d]; out [T, d]."""
        spec, ops, ws, n = self.spec, self.ops, self.workspace, step.host.n_tokens
        n_head, rank = spec.n_head, spec.kv_lora_rank
        q = ws.array("q", n, n_head * (spec.nope_dim + spec.rope.n_rot))
        k = ws.array("k", n, self.key_dim)
        self._project(a, q, k, n)
        absorbed = Act(ws.array("latent_q", n, n_head * self.key_dim), None)
        ops.head_linear(q, self.key_up, n_head, ws.act("heads", n * n_head, spec.nope_dim), absorbed)
        ops.prepare_qkv(
            absorbed.f32, k, k, None, self.latent_norm, "head", False, self.eps, self.rope, True, n_head,
            self.key_dim, step, self.kv, rope_first=rank,
        )  # fmt: skip
        latent_out = Act(ws.array("latent_out", n, n_head * rank), None)
        ops.attention(absorbed.f32, n_head, self.key_dim, False, step, self.kv, spec.scale, None, None, latent_out)
        mixed = ws.act("mixed", n, n_head * spec.value_dim)
        ops.head_linear(latent_out.f32, self.value_up, n_head, ws.act("heads", n * n_head, rank), mixed)
        ops.linear(mixed, (self.output,), (out,), add=add, scale=scale)

    def _project(self, a: Act, q: Array, k: Array, n: int) -> None:
        """q and the cache rows before norm and rotation."""
        ops, ws, rank = self.ops, self.workspace, self.spec.q_lora_rank
        if rank is None:
            ops.linear(a, (self.query, self.latent), (q, k))
            return
        low = ws.array("q_low", n, rank)
        ops.linear(a, (self.query_low, self.latent), (low, k))
        normed = ws.act("q_low", n, rank)
        ops.rms_norm(low, self.query_norm, self.eps, normed)
        ops.linear(normed, (self.query,), (q,))
