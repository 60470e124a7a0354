"""Softmax attention: projections, q/k norms, rotation, paged cache, output gate."""

from __future__ import annotations

from rimuru.arch.spec import AttentionSpec
from rimuru.forward.context import BuildContext, concatenated_rows
from rimuru.ops.base import Act, Array, Step, Weight


class Attention:
    """out (+)= scale * (Wo attention(Wq a, Wk a, Wv a) + bo)."""

    def __init__(self, index: int, spec: AttentionSpec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.eps = build.config.norm_eps
        prefix = f"blk.{index}."
        self.q_stride = spec.key_dim * (2 if spec.output_gate else 1)
        self.widths = (spec.n_head * self.q_stride, spec.n_head_kv * spec.key_dim, spec.n_head_kv * spec.value_dim)
        self.weights, self.biases = self._projections(prefix, build)
        reader = build.reader
        self.output = reader.matrix(prefix + "attn_output.weight")
        self.output_bias = reader.required_vector(prefix + "attn_output.bias") if spec.output_bias else None
        self.q_norm = reader.vector(prefix + "attn_q_norm.weight") if spec.qk_norm != "none" else None
        self.k_norm = reader.vector(prefix + "attn_k_norm.weight") if spec.qk_norm != "none" else None
        self.sinks = reader.required_vector(prefix + "attn_sinks.weight") if spec.sinks else None
        self.rope = build.rope(spec.rope)
        self.rope_adjacent = spec.rope is not None and spec.rope.pairing == "adjacent"
        self.kv = build.kv_layer(index)
        self.out_width = spec.n_head * spec.value_dim
        for name, width in zip(("q", "k", "v"), self.widths, strict=True):
            self.workspace.need_array(name, width)
        self.workspace.need_act("mixed", self.out_width)
        most = self.workspace.max_tokens
        self.workspace.fixed_bytes += build.ops.reserve_attention(spec.n_head, self.kv.group, spec.value_dim, most)

    def _projections(self, prefix: str, build: BuildContext) -> tuple[list[Weight], list[Array | None]]:
        """attn_q, attn_k, attn_v: three tensors, or row ranges of one attn_qkv (all q, all k, all v rows)."""
        reader, spec = build.reader, self.spec
        names = [f"{prefix}attn_{part}" for part in "qkv"]
        if not spec.fused_qkv:
            weights = [reader.matrix(name + ".weight") for name in names]
        else:
            fused = reader.matrix(prefix + "attn_qkv.weight")
            weights = [fused.rows(start, stop) for start, stop in concatenated_rows(list(self.widths))]
        biases: list[Array | None] = [None, None, None]
        if spec.qkv_bias == "split":
            biases = [reader.required_vector(name + ".bias") for name in names]
        elif spec.qkv_bias == "fused":
            fused_bias = reader.required_vector(prefix + "attn_qkv.bias")
            biases = [fused_bias[start:stop] for start, stop in concatenated_rows(list(self.widths))]
        return weights, biases

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        """a: normed input [T, d]; out [T, d]."""
        spec, ops, n = self.spec, self.ops, step.host.n_tokens
        q, k, v = (self.workspace.array(name, n, width) for name, width in zip("qkv", self.widths, strict=True))
        ops.linear(a, self.weights, (q, k, v), self.biases)
        ops.prepare_qkv(
            q, k, v, self.q_norm, self.k_norm, spec.qk_norm, spec.qk_norm_after_rope, self.eps,
            self.rope, self.rope_adjacent, spec.n_head, self.q_stride, step, self.kv, may_wait=True,
        )  # fmt: skip
        mixed = self.workspace.act("mixed", n, self.out_width)
        ops.attention(
            q, spec.n_head, self.q_stride, spec.output_gate, step, self.kv, spec.scale, spec.window, self.sinks, mixed
        )
        ops.linear(mixed, (self.output,), (out,), (self.output_bias,), add=add, scale=scale)
