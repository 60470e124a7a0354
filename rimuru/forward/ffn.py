"""Feed-forward parts: dense, and routed experts with an optional shared one."""

from __future__ import annotations

import numpy as np

from rimuru.arch.spec import Activation, DenseFfnSpec, MoeSpec
from rimuru.forward.context import BuildContext, LentExperts
from rimuru.ops.base import Act, Array, MoeScratch, Step, Weight


class DenseFfn:
    """out (+)= scale * row_scale[t] * (W_down (act(W_gate a) * W_up a)); without a gate W_down act(W_up a)."""

    def __init__(
        self,
        prefix: str,
        suffix: str,
        width: int,
        activation: Activation,
        gated: bool,
        fused: bool,
        build: BuildContext,
    ) -> None:
        self.ops, self.workspace, self.width = build.ops, build.workspace, width
        self.activation: Activation = activation
        reader = build.reader
        up = reader.matrix(f"{prefix}ffn_up{suffix}.weight")
        self.down = reader.matrix(f"{prefix}ffn_down{suffix}.weight")
        self.inputs: tuple[Weight, ...] = (up,)
        biases = [reader.vector(f"{prefix}ffn_up{suffix}.bias")]
        if fused:
            self.inputs = (up.rows(0, width), up.rows(width, 2 * width))
            biases = [None, None] if biases[0] is None else [biases[0][:width], biases[0][width:]]
        elif gated:
            self.inputs = (reader.matrix(f"{prefix}ffn_gate{suffix}.weight"), up)
            biases = [reader.vector(f"{prefix}ffn_gate{suffix}.bias"), *biases]
        self.biases = biases
        self.down_bias = reader.vector(f"{prefix}ffn_down{suffix}.bias")
        for name in ("gate", "up")[-len(self.inputs) :]:
            self.workspace.need_array(name, width)
        self.workspace.need_act("hidden", width)

    @classmethod
    def from_spec(cls, index: int, spec: DenseFfnSpec, build: BuildContext) -> DenseFfn:
        return cls(f"blk.{index}.", "", spec.width, spec.activation, spec.gated, spec.fused_gate_up, build)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step, row_scale: Array | None = None) -> None:
        ops, n = self.ops, step.host.n_tokens
        names = ("gate", "up")[-len(self.inputs) :]
        parts = [self.workspace.array(name, n, self.width) for name in names]
        ops.linear(a, self.inputs, parts, self.biases)
        hidden = self.workspace.act("hidden", n, self.width)
        ops.glu(parts[0] if len(parts) == 2 else None, parts[-1], self.activation, hidden)
        ops.linear(hidden, (self.down,), (out,), (self.down_bias,), add=add, scale=scale, row_scale=row_scale)


class MoeFfn:
    """Router, routed experts through the expert store, shared expert."""

    def __init__(self, index: int, layer_slot: int, spec: MoeSpec, build: BuildContext) -> None:
        self.spec, self.ops, self.workspace, self.layer_slot = spec, build.ops, build.workspace, layer_slot
        assert build.experts is not None, "a model with experts needs an expert store"
        self.experts, self.tap = build.experts, build.tap
        self.successor: MoeFfn | None = None
        """The experts of the next layer that has some."""
        prefix, reader, d = f"blk.{index}.", build.reader, build.config.n_embd
        self.router = reader.matrix(prefix + "ffn_gate_inp.weight")
        self.router_bias = reader.required_vector(prefix + "ffn_gate_inp.bias") if spec.expert_bias else None
        self.selection_bias = reader.required_vector(prefix + "exp_probs_b.bias") if spec.selection_bias else None
        self.expert_width = spec.latent_size or d
        self.latent = (
            (reader.matrix(prefix + "ffn_latent_down.weight"), reader.matrix(prefix + "ffn_latent_up.weight"))
            if spec.latent_size
            else None
        )
        self.shared: DenseFfn | None = None
        self.shared_gate: Array | None = None
        if spec.shared is not None:
            width = spec.shared.width
            self.shared = DenseFfn(prefix, "_shexp", width, spec.activation, spec.gated, False, build)
            if spec.shared.sigmoid_gate:
                self.shared_gate = reader.required_vector(prefix + "ffn_gate_inp_shexp.weight").reshape(-1)
        ws = self.workspace
        ws.need_array("router", spec.n_experts)
        ws.need_array("expert_ids", spec.top_k, np.int32)
        ws.need_array("expert_weights", spec.top_k)
        ws.need_array("foretold_ids", spec.top_k, np.int32)
        ws.need_array("foretold_weights", spec.top_k)
        ws.need_array("shared_gate", 1)
        ws.need_moe(spec, self.expert_width)
        if self.latent:
            ws.need_array("latent", self.expert_width)
            ws.need_act("latent", self.expert_width)

    def forward(self, a: Act, out: Array, add: bool, scale: float, step: Step) -> None:
        spec, ops, ws, n = self.spec, self.ops, self.workspace, step.host.n_tokens
        logits = ws.array("router", n, spec.n_experts)
        ids = ws.array("expert_ids", n, spec.top_k)
        weights = ws.array("expert_weights", n, spec.top_k)
        scratch = ws.moe(spec, self.expert_width)
        table = self.experts.settled(self.layer_slot) if step.expert_ids is None else None
        ahead = None if table is None else (table, scratch)
        ops.choose_experts(a, self.router, self.router_bias, logits, spec, self.selection_bias, ids, weights, ahead)
        if step.expert_ids is not None:
            ops.replay_routing(step.expert_ids, self.layer_slot, ids)
        if self.tap.chosen is not None:
            self.tap.chosen(self.layer_slot, ids)
        source = self._latent_input(a, n) if self.latent else a
        lent = self.experts.lend(self.layer_slot, source, ids, weights, spec)
        for wave in self.experts.waves(self.layer_slot, ids, step.positions):
            ops.moe_experts(source, ids, wave.table, wave.active, spec, scratch)
        if self.latent:
            self._latent_output(scratch, weights, lent, out, add, scale, n)
        else:
            self._sum(scratch, weights, lent, out, add, scale)
        if self.shared is not None:
            gate = None
            if self.shared_gate is not None:
                gate = ws.vector("shared_gate", n)
                ops.row_gate(a, self.shared_gate, gate)
            self.shared.forward(a, out, True, scale, step, gate)
        if self.successor is not None and self.experts.foresees:
            self._foresee(a, self.successor, step)

    def _foresee(self, a: Act, successor: MoeFfn, step: Step) -> None:
        """The next layer's router on this layer's input: most of what it names will be chosen there."""
        n, spec = step.host.n_tokens, successor.spec
        logits = self.workspace.array("router", n, spec.n_experts)
        ids = self.workspace.array("foretold_ids", n, spec.top_k)
        weights = self.workspace.array("foretold_weights", n, spec.top_k)
        self.ops.choose_experts(
            a, successor.router, successor.router_bias, logits, spec, successor.selection_bias, ids, weights
        )
        if step.expert_ids is not None:
            self.ops.replay_routing(step.expert_ids, step.expert_ids.shape[1] // 2 + successor.layer_slot, ids)
        self.experts.foresee(successor.layer_slot, ids, step.positions)

    def _latent_input(self, a: Act, n: int) -> Act:
        """The experts' input in the latent space, as an activation of its own."""
        assert self.latent is not None
        values = self.workspace.array("latent", n, self.expert_width)
        self.ops.linear(a, (self.latent[0],), (values,))
        latent = self.workspace.act("latent", n, self.expert_width)
        self.ops.glu(None, values, "identity", latent)
        return latent

    def _sum(
        self, scratch: MoeScratch, weights: Array, lent: LentExperts | None, out: Array, add: bool, scale: float
    ) -> None:
        self.ops.moe_combine(scratch, weights, out, add, scale)
        if lent is not None:
            lent.add_to(out, scale)

    def _latent_output(
        self, scratch: MoeScratch, weights: Array, lent: LentExperts | None, out: Array, add: bool, scale: float, n: int
    ) -> None:
        assert self.latent is not None
        values = self.workspace.array("latent", n, self.expert_width)
        self._sum(scratch, weights, lent, values, False, 1.0)
        latent = self.workspace.act("latent", n, self.expert_width)
        self.ops.glu(None, values, "identity", latent)
        self.ops.linear(latent, (self.latent[1],), (out,), add=add, scale=scale)
