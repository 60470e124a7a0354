"""ReferenceOps: the NumPy twin of every verb, slow and obvious, on host memory.

Inside a verb everything is float64; `dtype` is what float32 arrays of this backend really are. With float64 the result
is the truth that kernels are compared with. Stored things (KV elements, states) keep their own types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rimuru.arch.spec import DeltaNetSpec, MoeSpec
from rimuru.batch import Batch
from rimuru.formats.quants import QuantFormat
from rimuru.memory.specs import KvGroupLayout
from rimuru.ops.base import Act, Array, ExpertTable, MoeScratch, Step, Weight
from rimuru.ops.host import HostCopier, HostPool
from rimuru.ops.reference import attention, matmul, moe, pointwise, recurrent, residency, sampling


class ReferenceOps:
    """All verbs of `Ops` in NumPy. Activations carry no `quant`: matrices read the float values."""

    name = "reference"

    overlaps = False

    def __init__(self, dtype: Any = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return np.zeros(tuple(shape), self.dtype if np.dtype(dtype) == np.float32 else dtype)

    def upload(self, host: np.ndarray) -> Array:
        return np.array(host, self.dtype if host.dtype == np.float32 else host.dtype, order="C")

    def download(self, array: Array) -> np.ndarray:
        return np.array(array)

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        values = np.array(array)
        return lambda: values

    def take_tokens(self, ids: Array, previous: Array) -> None:
        late = ids < 0
        ids[late] = previous[-1 - ids[late]]

    def assign(self, target: Array, host: np.ndarray) -> None:
        target[...] = host

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def replay_routing(self, recorded: Array, layer_slot: int, ids: Array) -> None:
        ids[...] = recorded[:, layer_slot]

    def weight(self, raw: np.ndarray, fmt: QuantFormat, n_in: int) -> Weight:
        rows = np.ascontiguousarray(raw).reshape(-1, fmt.row_bytes(n_in))
        return Weight(rows, fmt, len(rows), n_in)

    def act(self, n_tokens: int, width: int) -> Act:
        return Act(self.empty((n_tokens, width), np.float32), None)

    def act_bytes(self, n_tokens: int, width: int) -> int:
        return n_tokens * width * self.dtype.itemsize

    def reserve_pool(self, n_bytes: int, limit_bytes: int) -> HostPool:
        return HostPool(n_bytes, limit_bytes)

    def copier(self) -> HostCopier:
        return HostCopier()

    def stage(self, batch: Batch) -> Step:
        return Step(
            host=batch,
            token_ids=batch.token_ids,
            positions=batch.positions,
            seq_of_token=batch.seq_of_token,
            query_start=batch.query_start,
            context_len=batch.context_len,
            kv_pages=batch.kv_pages,
            ssm_pages=batch.ssm_pages,
            conv_pages=batch.conv_pages,
            fresh_state=batch.fresh_state,
            logit_rows=batch.logit_rows,
            expert_ids=batch.expert_ids,
        )

    def run_decode(self, batch: Batch, forward: Callable[[Step], Array]) -> Array:
        return forward(self.stage(batch))

    def prepare(
        self, forward: Callable[[Step], Array], batches: Iterable[Batch]
    ) -> Callable[[Callable[[int, int], None]], None]:
        return lambda progress: None

    def padded_sequences(self, n_seqs: int) -> int:
        return n_seqs

    def reserve(self, max_tokens: int, max_seqs: int, kv_table_entries: int, state_columns: int) -> int:
        return 0

    def reserve_attention(self, n_head: int, group: KvGroupLayout, value_dim: int, max_queries: int) -> int:
        return 0

    def reserve_delta_net(self, spec: DeltaNetSpec, max_tokens: int) -> int:
        return 0

    def close(self) -> None:
        """Arrays are RAM."""

    def synchronize(self) -> None:
        """Nothing is ever queued."""

    def moe_scratch(self, max_tokens: int, spec: MoeSpec, n_in: int) -> MoeScratch:
        return MoeScratch(self.empty((max_tokens * spec.top_k, n_in), np.float32), None)

    def moe_scratch_bytes(self, max_tokens: int, spec: MoeSpec, n_in: int) -> int:
        return max_tokens * spec.top_k * n_in * 4

    def choose_experts(
        self, x: Act, router: Weight, router_bias: Array | None, logits: Array, spec: MoeSpec, bias: Array | None,
        ids: Array, weights: Array, ahead: tuple[ExpertTable, MoeScratch] | None = None,
    ) -> None:  # fmt: skip
        self.linear(x, (router,), (logits,), (router_bias,))
        self.route(logits, spec, bias, ids, weights)

    embed = staticmethod(pointwise.embed)
    rms_norm = staticmethod(pointwise.rms_norm)
    add_norm = staticmethod(pointwise.add_norm)
    gated_norm = staticmethod(pointwise.gated_norm)
    glu = staticmethod(pointwise.glu)
    multiply = staticmethod(pointwise.multiply)
    row_gate = staticmethod(pointwise.row_gate)
    gather_rows = staticmethod(pointwise.gather_rows)
    finish_logits = staticmethod(pointwise.finish_logits)
    linear = staticmethod(matmul.linear)
    head_linear = staticmethod(matmul.head_linear)
    prepare_qkv = staticmethod(attention.prepare_qkv)
    attention = staticmethod(attention.attention)
    route = staticmethod(moe.route)
    moe_experts = staticmethod(moe.moe_experts)
    moe_combine = staticmethod(moe.moe_combine)
    fetch_experts = staticmethod(residency.fetch_experts)
    fetch_aside = staticmethod(residency.fetch_aside)
    fetch_ahead = staticmethod(residency.fetch_ahead)
    join_fetch = staticmethod(residency.join_fetch)
    set_places = staticmethod(residency.set_places)
    conv_update = staticmethod(recurrent.conv_update)
    delta_net = staticmethod(recurrent.delta_net)
    mamba2 = staticmethod(recurrent.mamba2)
    mamba1 = staticmethod(recurrent.mamba1)
    sample = staticmethod(sampling.sample)
