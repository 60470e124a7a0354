"""The whole model: embed, layers, final norm, head."""

from __future__ import annotations

from itertools import pairwise

from rimuru.arch.spec import MoeSpec
from rimuru.forward.context import BuildContext
from rimuru.forward.ffn import MoeFfn
from rimuru.forward.layer import Sublayer, build_layer
from rimuru.ops.base import Array, Step


class Model:
    """Weights bound to verbs. `hidden` runs the trunk; `logits` applies the head to chosen rows of its result.

    Two calls, because a scoring run wants logits of every token and cannot hold them all at once.
    """

    def __init__(self, build: BuildContext, max_logit_rows: int) -> None:
        self.config, self.ops, self.workspace = build.config, build.ops, build.workspace
        self.max_logit_rows, self.tap = max_logit_rows, build.tap
        reader, d = build.reader, self.config.n_embd
        self.embedding = reader.matrix("token_embd.weight")
        self.head = self.embedding if self.config.tied_head else reader.matrix("output.weight")
        self.head_bias = reader.required_vector("output.bias") if self.config.output_bias else None
        self.output_norm = reader.required_vector(self.config.output_norm)
        self.workspace.need_array("x", d)
        self.workspace.need_act("normed", d)
        self.layers: list[Sublayer] = []
        layer_slot = 0
        for spec in self.config.layers:
            self.layers += build_layer(spec, layer_slot, build)
            layer_slot += isinstance(spec.ffn, MoeSpec)
        experts = [layer.part for layer in self.layers if isinstance(layer.part, MoeFfn)]
        for part, successor in pairwise(experts):
            part.successor = successor
        self._rows = self.ops.empty((max_logit_rows * d,), "float32")
        self._row_act = self.ops.act(max_logit_rows, d)
        self._logits = self.ops.empty((max_logit_rows, self.config.n_vocab), "float32")

    @property
    def logit_bytes(self) -> int:
        """Bytes of the head's own buffers; for the ledger."""
        d = self.config.n_embd
        return self.max_logit_rows * 4 * (d + self.config.n_vocab) + self.ops.act_bytes(self.max_logit_rows, d)

    def hidden(self, step: Step) -> None:
        """Run the trunk over the step's tokens, leaving the residual stream [T, d] in the workspace."""
        x = self.workspace.array("x", step.host.n_tokens, self.config.n_embd)
        self.ops.embed(self.embedding, step.token_ids, self.config.embedding_scale, x)
        for layer in self.layers:
            layer.forward(x, step)

    def logits(self, step: Step, rows: Array, n_rows: int) -> Array:
        """float32 [n_rows, n_vocab] of the given token rows (int32 [n_rows], at most max_logit_rows)."""
        d = self.config.n_embd
        x = self.workspace.array("x", step.host.n_tokens, d)
        picked = self._rows[: n_rows * d].reshape(n_rows, d)
        self.ops.gather_rows(x, rows, picked)
        normed = self._row_act.head(n_rows)
        self.ops.rms_norm(picked, self.output_norm, self.config.norm_eps, normed)
        logits = self._logits[:n_rows]
        self.ops.linear(normed, (self.head,), (logits,), (self.head_bias,))
        if self.config.logit_scale != 1.0 or self.config.final_softcap is not None:
            self.ops.finish_logits(logits, self.config.logit_scale, self.config.final_softcap)
        return logits
