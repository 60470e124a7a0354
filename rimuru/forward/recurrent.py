"""Recurrent mixers: gated DeltaNet, Mamba1, Mamba2 and LFM2's short convolution (facts sections 4.3 to 4.6, 4.12)."""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec, ShortConvSpec
from rimuru.forward.context import BuildContext, concatenated_rows
from rimuru.ops.base import Act, Array, Step, Weight


class DeltaNet:
    """Gated delta rule: conv over q, k, v; state update per value head; gated norm; output projection."""

    def __init__(self, index: int, spec: DeltaNetSpec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.eps = build.config.norm_eps
        self.state = build.state_layer(index)
        self.value_width = spec.n_value_heads * spec.head_dim
        prefix, reader = f"blk.{index}.", build.reader
        self.qkv, self.gate = self._input_projections(prefix, build)
        self.beta, self.alpha = self._beta_alpha(prefix, build)
        self.conv = reader.required_vector(prefix + "ssm_conv1d.weight")
        self.a = reader.required_vector(prefix + "ssm_a").reshape(-1)
        self.dt_bias = reader.required_vector(prefix + "ssm_dt.bias")
        self.norm = reader.required_vector(prefix + "ssm_norm.weight")
        self.output = reader.matrix(prefix + "ssm_out.weight")
        for name, width in (
            ("ssm_in", spec.conv_channels),
            ("ssm_conv", spec.conv_channels),
            ("ssm_gate", self.value_width),
            ("ssm_out", self.value_width),
            ("ssm_beta", spec.n_value_heads),
            ("ssm_alpha", spec.n_value_heads),
        ):
            self.workspace.need_array(name, width)
        self.workspace.need_act("mixed", self.value_width)
        self.workspace.fixed_bytes += self.ops.reserve_delta_net(spec, self.workspace.max_tokens)

    def _input_projections(self, prefix: str, build: BuildContext) -> tuple[Weight, Weight]:
        """attn_qkv and attn_gate, or their rows picked out of the older ssm_in (per key head: q, k, v, z)."""
        reader, spec = build.reader, self.spec
        if not spec.fused_in:
            return reader.matrix(prefix + "attn_qkv.weight"), reader.matrix(prefix + "attn_gate.weight")
        d, ratio = spec.head_dim, spec.n_value_heads // spec.n_key_heads
        rows = np.arange(spec.n_key_heads * (2 + 2 * ratio) * d).reshape(spec.n_key_heads, -1)
        q, k, v, z = (rows[:, start:stop] for start, stop in concatenated_rows([d, d, ratio * d, ratio * d]))
        qkv = np.concatenate([part.reshape(-1) for part in (q, k, v)])
        name = prefix + "ssm_in.weight"
        return reader.permuted(name, qkv), reader.permuted(name, z.reshape(-1))

    def _beta_alpha(self, prefix: str, build: BuildContext) -> tuple[Weight, Weight]:
        """ssm_beta and ssm_alpha, or their rows picked out of ssm_ba (per key head: r beta rows, r alpha rows)."""
        reader, spec = build.reader, self.spec
        if not spec.fused_ba:
            return reader.matrix(prefix + "ssm_beta.weight"), reader.matrix(prefix + "ssm_alpha.weight")
        ratio = spec.n_value_heads // spec.n_key_heads
        rows = np.arange(2 * spec.n_value_heads).reshape(spec.n_key_heads, 2, ratio)
        name = prefix + "ssm_ba.weight"
        return reader.permuted(name, rows[:, 0].reshape(-1)), reader.permuted(name, rows[:, 1].reshape(-1))

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        spec, ops, ws, n = self.spec, self.ops, self.workspace, step.host.n_tokens
        u = ws.array("ssm_in", n, spec.conv_channels)
        z = ws.array("ssm_gate", n, self.value_width)
        beta = ws.array("ssm_beta", n, spec.n_value_heads)
        alpha = ws.array("ssm_alpha", n, spec.n_value_heads)
        ops.linear(a, (self.qkv, self.gate, self.beta, self.alpha), (u, z, beta, alpha))
        qkv = ws.array("ssm_conv", n, spec.conv_channels)
        ops.conv_update(u, self.conv, None, True, step, self.state, qkv)
        o = ws.array("ssm_out", n, self.value_width)
        ops.delta_net(qkv, beta, alpha, self.a, self.dt_bias, spec, self.eps, step, self.state, o)
        mixed = ws.act("mixed", n, self.value_width)
        ops.gated_norm(o, z, self.norm, self.eps, spec.n_value_heads, False, mixed)
        ops.linear(mixed, (self.output,), (out,), add=add, scale=scale)


class Mamba2:
    """Mamba2: z, x, B, C and dt from one projection; conv over x, B, C; gate, then grouped norm."""

    def __init__(self, index: int, spec: Mamba2Spec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.eps = build.config.norm_eps
        self.state = build.state_layer(index)
        prefix, reader = f"blk.{index}.", build.reader
        fused = reader.matrix(prefix + "ssm_in.weight")
        rows = concatenated_rows([spec.inner_size, spec.conv_channels, spec.n_heads])
        self.projections = tuple(fused.rows(start, stop) for start, stop in rows)
        self.conv = reader.required_vector(prefix + "ssm_conv1d.weight")
        self.conv_bias = reader.vector(prefix + "ssm_conv1d.bias")
        self.dt_bias = reader.required_vector(prefix + "ssm_dt.bias")
        self.a = reader.required_vector(prefix + "ssm_a").reshape(-1)
        self.d = reader.required_vector(prefix + "ssm_d").reshape(-1)
        self.norm = reader.required_vector(prefix + "ssm_norm.weight").reshape(-1)
        self.output = reader.matrix(prefix + "ssm_out.weight")
        for name, width in (
            ("ssm_gate", spec.inner_size),
            ("ssm_in", spec.conv_channels),
            ("ssm_conv", spec.conv_channels),
            ("ssm_alpha", spec.n_heads),
            ("ssm_out", spec.inner_size),
        ):
            self.workspace.need_array(name, width)
        self.workspace.need_act("mixed", spec.inner_size)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        spec, ops, ws, n = self.spec, self.ops, self.workspace, step.host.n_tokens
        z = ws.array("ssm_gate", n, spec.inner_size)
        u = ws.array("ssm_in", n, spec.conv_channels)
        dt = ws.array("ssm_alpha", n, spec.n_heads)
        ops.linear(a, self.projections, (z, u, dt))
        xbc = ws.array("ssm_conv", n, spec.conv_channels)
        ops.conv_update(u, self.conv, self.conv_bias, True, step, self.state, xbc)
        y = ws.array("ssm_out", n, spec.inner_size)
        ops.mamba2(xbc, dt, self.a, self.d, self.dt_bias, spec, step, self.state, y)
        mixed = ws.act("mixed", n, spec.inner_size)
        ops.gated_norm(y, z, self.norm, self.eps, spec.n_groups, True, mixed)
        ops.linear(mixed, (self.output,), (out,), add=add, scale=scale)


class Mamba1:
    """Mamba1 as Jamba has it: dt, B and C are normed after their projection."""

    def __init__(self, index: int, spec: Mamba1Spec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.eps = build.config.norm_eps
        self.state = build.state_layer(index)
        prefix, reader = f"blk.{index}.", build.reader
        fused = reader.matrix(prefix + "ssm_in.weight")
        self.input = (fused.rows(0, spec.inner_size), fused.rows(spec.inner_size, 2 * spec.inner_size))
        self.conv = reader.required_vector(prefix + "ssm_conv1d.weight")
        self.conv_bias = reader.vector(prefix + "ssm_conv1d.bias")
        x_proj = reader.matrix(prefix + "ssm_x.weight")
        rows = concatenated_rows([spec.dt_rank, spec.state_size, spec.state_size])
        self.x_projections = tuple(x_proj.rows(start, stop) for start, stop in rows)
        self.norms = tuple(reader.required_vector(f"{prefix}ssm_{part}_norm.weight") for part in ("dt", "b", "c"))
        self.dt_weight = reader.matrix(prefix + "ssm_dt.weight")
        self.dt_bias = reader.required_vector(prefix + "ssm_dt.bias")
        self.a = reader.required_vector(prefix + "ssm_a")
        self.d = reader.required_vector(prefix + "ssm_d").reshape(-1)
        self.output = reader.matrix(prefix + "ssm_out.weight")
        ws = self.workspace
        for name, width in (
            ("ssm_in", spec.inner_size),
            ("ssm_gate", spec.inner_size),
            ("ssm_conv", spec.inner_size),
            ("ssm_low", spec.dt_rank),
            ("ssm_beta", spec.state_size),
            ("ssm_alpha", spec.state_size),
            ("ssm_dt", spec.inner_size),
            ("ssm_out", spec.inner_size),
        ):
            ws.need_array(name, width)
        for name, width in (
            ("mixed", spec.inner_size),
            ("ssm_low", spec.dt_rank),
            ("ssm_b", spec.state_size),
            ("ssm_c", spec.state_size),
        ):
            ws.need_act(name, width)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        spec, ops, ws, n = self.spec, self.ops, self.workspace, step.host.n_tokens
        u = ws.array("ssm_in", n, spec.inner_size)
        z = ws.array("ssm_gate", n, spec.inner_size)
        ops.linear(a, self.input, (u, z))
        x = ws.act("mixed", n, spec.inner_size)
        convolved = ws.array("ssm_conv", n, spec.inner_size)
        ops.conv_update(u, self.conv, self.conv_bias, True, step, self.state, convolved)
        ops.glu(None, convolved, "identity", x)
        raw = (
            ws.array("ssm_low", n, spec.dt_rank),
            ws.array("ssm_beta", n, spec.state_size),
            ws.array("ssm_alpha", n, spec.state_size),
        )
        ops.linear(x, self.x_projections, raw)
        low, b, c = (
            ws.act("ssm_low", n, spec.dt_rank),
            ws.act("ssm_b", n, spec.state_size),
            ws.act("ssm_c", n, spec.state_size),
        )
        for values, norm, normed in zip(raw, self.norms, (low, b, c), strict=True):
            ops.rms_norm(values, norm, self.eps, normed)
        dt = ws.array("ssm_dt", n, spec.inner_size)
        ops.linear(low, (self.dt_weight,), (dt,), (self.dt_bias,))
        y = ws.array("ssm_out", n, spec.inner_size)
        ops.mamba1(convolved, dt, b.f32, c.f32, self.a, self.d, spec, step, self.state, y)
        ops.glu(z, y, "silu", x)
        ops.linear(x, (self.output,), (out,), add=add, scale=scale)


class ShortConv:
    """LFM2: out = W_out (C * conv(B * X)) with [B | C | X] = W_in a; the state holds the last inputs B * X."""

    def __init__(self, index: int, spec: ShortConvSpec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace = spec, build.ops, build.workspace
        self.state = build.state_layer(index)
        prefix, reader = f"blk.{index}.", build.reader
        fused = reader.matrix(prefix + "shortconv.in_proj.weight")
        self.input = tuple(fused.rows(start, stop) for start, stop in concatenated_rows([spec.width] * 3))
        self.conv = reader.required_vector(prefix + "shortconv.conv.weight")
        self.output = reader.matrix(prefix + "shortconv.out_proj.weight")
        for name in ("ssm_beta", "ssm_gate", "ssm_in", "ssm_conv"):
            self.workspace.need_array(name, spec.width)
        self.workspace.need_act("mixed", spec.width)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        width, ops, ws, n = self.spec.width, self.ops, self.workspace, step.host.n_tokens
        b, c, x = (ws.array(name, n, width) for name in ("ssm_beta", "ssm_gate", "ssm_in"))
        ops.linear(a, self.input, (b, c, x))
        mixed = ws.act("mixed", n, width)
        ops.multiply(b, x, mixed)
        convolved = ws.array("ssm_conv", n, width)
        ops.conv_update(mixed.f32, self.conv, None, False, step, self.state, convolved)
        ops.multiply(c, convolved, mixed)
        ops.linear(mixed, (self.output,), (out,), add=add, scale=scale)
