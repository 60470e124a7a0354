"""The operations a backend offers. Forward code calls these and knows nothing else of the device.

Arrays are whatever the backend computes on (NumPy on the CPU, CuPy on CUDA), float32 unless stated, C-contiguous in
the last axis; the first axis of activations is tokens (T). Verbs write into given outputs and return nothing; none of
them allocates, so that a step can be captured as a graph. Every backend has the same verbs with the same signatures;
`ops/reference.py` is the slow NumPy twin of all of them.

Placement never changes a result, and on the CPU neither does the batch: a token's row of every output depends only on
that token's inputs and the cache, in a fixed order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rimuru.arch.spec import Activation as ActivationName
from rimuru.arch.spec import DeltaNetSpec, Mamba1Spec, Mamba2Spec, MoeSpec
from rimuru.batch import Batch
from rimuru.formats.quants import QuantFormat
from rimuru.memory.specs import ConvLayout, ExpertLayerLayout, KvGroupLayout, SsmLayout

if TYPE_CHECKING:
    from rimuru.ops.places import ExpertPlaces, LayerPlaces

Array = Any


@dataclass(slots=True)
class Weight:
    """A resident matrix [n_out, n_in] in its file format; y = W x."""

    data: Array  # uint8 [n_out, row_bytes]
    format: QuantFormat
    n_out: int
    n_in: int
    factor: float = 1.0
    """Of what `linear` makes of the matrix, bias included: NVFP4 tensors have one (forward/weights.py)."""

    def rows(self, start: int, stop: int) -> Weight:
        """The matrix of rows start..stop, sharing memory."""
        return Weight(self.data[start:stop], self.format, stop - start, self.n_in, self.factor)


@dataclass(slots=True)
class Act:
    """An activation that matrices will be applied to: float32 values, and what the backend derived from them.

    Whoever fills `f32` through a verb (`rms_norm`, `glu`, `attention`, ...) also fills `quant`, once, for all the
    matrices that read it. `quant` may be None where no matrix reads the rows as they are.
    """

    f32: Array  # [T, width]
    quant: Any  # the backend's own: 8-bit blocks with scales and sums, or scaled halves

    def head(self, n_tokens: int) -> Act:
        """The first n_tokens rows, sharing memory."""
        return Act(self.f32[:n_tokens], None if self.quant is None else self.quant.head(n_tokens))


@dataclass(slots=True)
class KvLayer:
    """One layer's window on the KV pages: what `prepare_qkv` writes and `attention` reads."""

    pool_base: int  # address of the pool
    page_bytes: int
    group: KvGroupLayout
    group_index: int  # row of Batch.kv_pages
    layer_offset_bytes: int  # of this layer inside a page


@dataclass(slots=True)
class StateLayer:
    """One recurrent layer's window on the SSM and conv pages; columns index Batch.ssm_pages / conv_pages."""

    pool_base: int
    ssm: SsmLayout | None
    ssm_column: int
    conv: ConvLayout | None
    conv_column: int


@dataclass(slots=True)
class ExpertTable:
    """Where the projections of one layer's experts are read from now.

    addresses[e, j] is the address of page j of expert e: a pool page, a loading buffer, or pinned host memory; 0 where
    the expert cannot be read (it is then not in `active`).
    """

    layout: ExpertLayerLayout
    page_bytes: int
    addresses: Array  # int64 [n_experts, n_pages]
    biases: dict[str, Array]  # "gate" | "up" | "down" -> [n_experts, n_rows] (gpt-oss), else empty
    factors: dict[str, Array] = field(default_factory=dict)
    """Of the products of "gate", "up" and "down", before the bias: float32 [n_experts] (NVFP4), else empty."""


@dataclass(slots=True)
class Step:
    """A Batch on the device: the same fields as backend arrays, at fixed addresses where graphs need it."""

    host: Batch
    token_ids: Array
    positions: Array
    seq_of_token: Array
    query_start: Array
    context_len: Array
    kv_pages: Array
    ssm_pages: Array
    conv_pages: Array
    fresh_state: Array
    logit_rows: Array
    expert_ids: Array | None = None


class Copier(Protocol):
    """Moves bytes between host memory, the file's staging buffers and the pool. Addresses are integers."""

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        """uint8 [n_bytes] of host memory that the device can copy from fast (pinned where there is a device)."""

    def is_pinned(self, array: np.ndarray) -> bool:
        """True where the device can read an array of alloc_host in place."""

    def copy_in(self, address: int, source: np.ndarray) -> None:
        """Queue a copy of the bytes of `source` to a pool address. `source` stays untouched until `wait`."""

    def copy_out(self, target: np.ndarray, address: int) -> None:
        """Queue a copy from a pool address to host memory."""

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        """Queue a copy between pool addresses that do not overlap."""

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        """Queue filling pool bytes with one value."""

    def record(self) -> Any:
        """A marker after all queued copies."""

    def done(self, marker: Any) -> bool:
        """True once everything before the marker has happened."""

    def wait(self, marker: Any | None = None) -> None:
        """Block until everything queued (or everything before the marker) has happened."""

    def close(self) -> None:
        """Wait, and give the memory of alloc_host back."""


class PoolMemory(Protocol):
    """The range of addresses that the pool lies in."""

    base: int

    @property
    def mapped_bytes(self) -> int: ...

    def resize(self, n_bytes: int) -> None:
        """Map or unmap memory at the end of the range; addresses that stay mapped keep their content."""

    def close(self) -> None: ...


class Ops(Protocol):
    """Verbs of a backend. T = tokens of the step, S = sequences, d = n_embd."""

    name: str
    overlaps: bool
    """Work is queued: the host may plan the next step while one runs."""

    # ---- memory
    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Uninitialised array on the device."""

    def upload(self, host: np.ndarray) -> Array:
        """A device copy of a host array."""

    def download(self, array: Array) -> np.ndarray:
        """A host copy of a device array; waits for pending work on it."""

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """Queue a copy to the host; the result waits for it and gives the values as they are now."""

    def take_tokens(self, ids: Array, previous: Array) -> None:
        """Replace ids -1 - r by previous[r]: tokens of the step before that only the device knows. int32."""

    def assign(self, target: Array, host: np.ndarray) -> None:
        """Write host values over a device array of the same shape and type, in order with the work queued before."""

    def weight(self, raw: np.ndarray, fmt: QuantFormat, n_in: int) -> Weight:
        """Upload the raw bytes of a matrix with rows of n_in elements."""

    def act(self, n_tokens: int, width: int) -> Act:
        """Storage for an activation."""

    def act_bytes(self, n_tokens: int, width: int) -> int:
        """Bytes that `act` takes; for the ledger."""

    def reserve_pool(self, n_bytes: int, limit_bytes: int) -> PoolMemory:
        """Memory for the pool, n_bytes now, able to grow to limit_bytes."""

    def copier(self) -> Copier:
        """A mover of bytes between host memory and the pool."""

    def stage(self, batch: Batch) -> Step:
        """Bring a batch to the device."""

    def run_decode(self, batch: Batch, forward: Callable[[Step], Array]) -> Array:
        """forward(step) of a batch in which every sequence brings one token and wants its logits.

        A device may pad the batch (up to padded_sequences(S)) and replay what it captured; rows beyond S of the result
        hold nothing of use.
        """

    def prepare(
        self, forward: Callable[[Step], Array], batches: Iterable[Batch]
    ) -> Callable[[Callable[[int, int], None]], None]:
        """Begin to make ready what steps of these shapes use: a device compiles their kernels, side by side.

        forward(step) launches a whole step. Nothing is computed: only shapes count. The result waits until all is ready
        and calls progress(done, total) on the way.
        """

    def padded_sequences(self, n_seqs: int) -> int:
        """Most sequences that `run_decode` may pad a batch of n_seqs to: what buffers must hold."""

    def reserve(self, max_tokens: int, max_seqs: int, kv_table_entries: int, state_columns: int) -> int:
        """Make what the largest step needs besides the workspace, so that no step allocates; its bytes.

        kv_table_entries = KV groups x sequences x blocks; state_columns = SSM and conv columns of a sequence.
        """

    def reserve_attention(self, n_head: int, group: KvGroupLayout, value_dim: int, max_queries: int) -> int:
        """Make the scratch that attention of this shape needs for up to max_queries queries; its new bytes."""

    def reserve_delta_net(self, spec: DeltaNetSpec, max_tokens: int) -> int:
        """Make the scratch that delta_net of this shape needs for pieces of up to max_tokens tokens; its new bytes."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def close(self) -> None:
        """Give back what the backend holds besides the arrays it made."""

    # ---- pointwise
    def embed(self, table: Weight, token_ids: Array, scale: float, out: Array) -> None:
        """out[t] = scale * dequantised row token_ids[t] of table. out [T, d]."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Act, may_wait: bool = False) -> None:
        """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight. x [T, w], weight [w].

        may_wait: a backend may leave it to the first verb that gets `out` as an Act; x stays as it is until then.
        """

    def add_norm(self, x: Array, delta: Array, weight: Array, eps: float, scale: float) -> None:
        """x += scale * rms_norm(delta; weight) in place: the post-norms of gemma3. x, delta [T, d]."""

    def gated_norm(
        self, x: Array, gate: Array, weight: Array, eps: float, n_groups: int, gate_first: bool, out: Act
    ) -> None:
        """RMS norm over each of n_groups equal parts of a row, with a silu gate.

        gate_first: norm(x * silu(gate)) * weight (Mamba2); else norm(x) * weight * silu(gate) (DeltaNet).
        x, gate [T, w]; weight [w] or [w / n_groups] (then used for every group).
        """

    def glu(self, gate: Array | None, up: Array, activation: ActivationName, out: Act) -> None:
        """out = act(gate) * up, or act(up) where gate is None. gate, up [T, w].

        silu: z sigmoid(z); gelu_tanh; relu2: max(0, z)^2; identity: z;
        swiglu_oai: g = min(gate, 7), u = clamp(up, -7, 7), g sigmoid(1.702 g) (u + 1).
        """

    def multiply(self, a: Array, b: Array, out: Act) -> None:
        """out = a * b elementwise. a, b [T, w]."""

    def row_gate(self, x: Act, weight: Array, out: Array) -> None:
        """out[t] = sigmoid(weight . x[t]); weight [w], out [T]."""

    def gather_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[i] = x[rows[i]]. x [T, w], rows int32 [R], out [R, w]."""

    def finish_logits(self, logits: Array, scale: float, softcap: float | None) -> None:
        """logits *= scale; then softcap * tanh(logits / softcap) if given. In place, [R, n_vocab]."""

    # ---- matrices
    def linear(
        self,
        x: Act,
        weights: Sequence[Weight],
        outs: Sequence[Array],
        biases: Sequence[Array | None] | None = None,
        add: bool = False,
        scale: float = 1.0,
        row_scale: Array | None = None,
    ) -> None:
        """outs[i] (+)= scale * row_scale[t] * weights[i].factor * (weights[i] x + biases[i]) for matrices that share x.

        outs[i] [T, n_out_i]; `add` accumulates into outs; row_scale [T].
        """

    def head_linear(self, x: Array, weight: Weight, n_head: int, heads: Act, out: Act) -> None:
        """Every head through a matrix of its own: out[t, h] = [factor * W_h x[t, h, :n_in] | x[t, h, n_in:]].

        x [T, n_head * (n_in + rest)]; weight: the n_head matrices [n_out, n_in] under each other; out [T, n_head *
        (n_out + rest)]. What follows the n_in inputs of a head is carried over. heads [T * n_head, n_in]: scratch.
        """

    # ---- attention
    def prepare_qkv(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        norm_kind: str,
        norm_after_rope: bool,
        eps: float,
        rope: Array | None,
        rope_adjacent: bool,
        n_head: int,
        q_stride: int,
        step: Step,
        kv: KvLayer,
        rope_first: int = 0,
        may_wait: bool = False,
    ) -> None:
        """Norms and rotates q and k in place and writes k and v of every token into the KV pages.

        q [T, n_head * q_stride] (the first key_dim of each stride is the query, the rest an output gate or nothing),
        k [T, n_head_kv * key_dim], v [T, n_head_kv * value_dim]; v is not read where value_dim is 0.
        norm_kind "none" | "head" (over the first len(weight) dims of a head) | "vector" (weight over all heads of the
        row); no norm where the weight is None.
        rope [n_positions, n_rot] float32: n_rot/2 cosines, then n_rot/2 sines, for the n_rot dims of a head from
        rope_first on; rope_adjacent: pairs (2i, 2i+1), else (i, i + n_rot/2). None = no rotation.
        may_wait: a backend may leave it to the `attention` of this q, and then leaves q and k as they are.
        """

    def attention(
        self,
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
        """Causal paged attention. Query head h reads KV head h // (n_head / n_head_kv).

        out [T, n_head * value_dim]; where no values are stored (value_dim 0), a key's first elements are its value, as
        many as out has for a head. A key at p is visible at t iff p <= t and (window is None or t - p < window).
        sinks [n_head]: extra logit in the softmax's denominator. gated: out *= sigmoid(gate part of q's stride).
        Slots that were never written must not influence the result (select, never multiply by zero).
        """

    # ---- experts
    def route(self, logits: Array, spec: MoeSpec, bias: Array | None, ids: Array, weights: Array) -> None:
        """Top-k experts and their weights (facts section 3.6); ties go to the lowest id.

        logits [T, n_experts], bias [n_experts] (for the selection only), ids int32 [T, k], weights [T, k].
        """

    def choose_experts(
        self,
        x: Act,
        router: Weight,
        router_bias: Array | None,
        logits: Array,
        spec: MoeSpec,
        bias: Array | None,
        ids: Array,
        weights: Array,
        ahead: tuple[ExpertTable, MoeScratch] | None = None,
    ) -> None:
        """`linear` of the router, whose output is `logits`, and `route`.

        ahead: table and scratch of the one `moe_experts` that takes these ids, where until then nothing writes to ids
        or table: a backend may look up at once where those experts lie.
        """

    def replay_routing(self, recorded: Array, layer_slot: int, ids: Array) -> None:
        """ids[t] = recorded[t, layer_slot]: a recording's experts instead of the router's choice, whose weights stay.

        recorded int32 [T, n MoE layers, k], ids int32 [T, k].
        """

    def moe_experts(
        self, x: Act, ids: Array, table: ExpertTable, active: Array | None, spec: MoeSpec, scratch: MoeScratch
    ) -> None:
        """For every (token, slot) whose expert is active: scratch.out[t * k + slot] = expert(x[t]).

        active: bool [n_experts] or None = all. ids may hold an expert twice in a row of tokens.
        """

    def moe_combine(self, scratch: MoeScratch, weights: Array, out: Array, add: bool, scale: float) -> None:
        """out[t] (+)= scale * sum over slots, in order, of weights[t, slot] * scratch.out[t * k + slot]. out [T, w]."""

    def fetch_experts(self, ids: Array, positions: Array, places: LayerPlaces) -> None:
        """Count what a layer's tokens chose, and bring experts that are in no place into places: empty ones first, then
        those of experts that no token of the step chose. ids int32 [T, k]: rows at position -1 are not counted and
        become -1. Who finds no place stays where it is."""

    def fetch_aside(self, ids: Array, positions: Array, places: LayerPlaces) -> None:
        """The same, while what is queued next may already use the experts of places.now. Those of places.later can be
        read by what is queued after join_fetch."""

    def fetch_ahead(self, ids: Array, positions: Array, places: LayerPlaces) -> None:
        """Bring experts that a layer's tokens will likely choose into places, beside what is queued next; nothing is
        counted. ids int32 [T, k]. Its copies have to be joined before the layer's turn."""

    def join_fetch(self) -> None:
        """What is queued from now on comes after the copies of the last fetch_aside or fetch_ahead."""

    def set_places(self, commands: Array, n_commands: int, places: ExpertPlaces) -> None:
        """Give places other pages, to which their bytes have been copied, or new ones; zeros take them away, and who
        held one is read in host memory again. commands int64 [n, 4 + max pages] (ops/places.py)."""

    def address(self, array: Array) -> int:
        """Address of an array's first element, for a Copier."""

    def moe_scratch(self, max_tokens: int, spec: MoeSpec, n_in: int) -> MoeScratch:
        """Everything the expert kernels need for up to max_tokens tokens of input width n_in."""

    def moe_scratch_bytes(self, max_tokens: int, spec: MoeSpec, n_in: int) -> int:
        """Bytes that `moe_scratch` takes, for the ledger."""

    # ---- recurrent layers (states are read and written in their pages)
    def conv_update(
        self, u: Array, weight: Array, bias: Array | None, silu: bool, step: Step, state: StateLayer, out: Array
    ) -> None:
        """Causal depthwise convolution with the carried state (facts section 3.7). u, out [T, C]; weight [C, K].

        The state rows hold the last K - 1 inputs, oldest first.
        """

    def delta_net(
        self,
        qkv: Array,
        beta: Array,
        alpha: Array,
        a: Array,
        dt_bias: Array,
        spec: DeltaNetSpec,
        eps: float,
        step: Step,
        state: StateLayer,
        out: Array,
    ) -> None:
        """Gated delta rule (facts section 4.3, steps 3 to 5). qkv [T, conv_channels] after conv and silu;
        beta, alpha [T, Hv] raw projections; a, dt_bias [Hv]; out [T, Hv * head_dim].

        State page: [Hv][d_v][d_k] float32."""

    def mamba2(
        self,
        xbc: Array,
        dt: Array,
        a: Array,
        d: Array,
        dt_bias: Array,
        spec: Mamba2Spec,
        step: Step,
        state: StateLayer,
        out: Array,
    ) -> None:
        """Mamba2 recurrence (facts section 4.4, step 2). xbc [T, inner + 2 G N] after conv and silu; dt [T, n_heads]
        raw; a, d, dt_bias [n_heads]; out [T, inner]. State page: [heads][head dim][state_size] float32."""

    def mamba1(
        self,
        x: Array,
        dt: Array,
        b: Array,
        c: Array,
        a: Array,
        d: Array,
        spec: Mamba1Spec,
        step: Step,
        state: StateLayer,
        out: Array,
    ) -> None:
        """Mamba1 recurrence (facts section 4.6). x, dt [T, inner] (dt projected, bias added, before softplus);
        b, c [T, state_size]; a [inner, state_size]; d [inner]; out [T, inner]. State page: [inner][state_size]."""

    # ---- sampling
    def sample(self, logits: Array, params: SampleParams, out_ids: Array) -> None:
        """One token per row of logits [R, n_vocab]; out_ids int32 [R]. Order of the filters: see SampleParams."""


@dataclass(slots=True)
class MoeScratch:
    """Buffers of the expert kernels; `out` is the verb's result, the rest is the backend's own."""

    out: Array  # [max_tokens * k, n_out]
    private: Any
    only_summed: bool = False
    """Nothing but `moe_combine`, which follows the last `moe_experts`, reads `out`: it need not be written."""


@dataclass(slots=True)
class SampleParams:
    """Per-row sampling parameters as arrays [R], in the order in which they are applied.

    1. logit bias   2. repetition penalty (l > 0: l / p, else l * p; once per distinct id of prompt and output)
    3. frequency and presence penalties (output tokens)   4. top_k   5. top_p   6. min_p   7. temperature, then a draw.
    temperature 0 = argmax after steps 1 to 3, lowest id on ties. top_k 0 = off.
    top_p keeps a token when the likelier ones (of those kept by top_k, equal logits by id) sum to less than top_p;
    min_p when its probability is at least min_p times the best. The best token is always kept. The draw walks the kept
    tokens by ascending id to the first whose cumulative share exceeds `uniform`.
    """

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    uniform: np.ndarray  # float32 in [0, 1): the draw, made by the host from the request's seed and token index
    repetition_penalty: np.ndarray  # float32
    presence_penalty: np.ndarray  # float32
    frequency_penalty: np.ndarray  # float32
    history: list[np.ndarray]  # per row: distinct token ids seen in prompt and output, int32
    output_ids: list[np.ndarray]  # per row: distinct output token ids, int32
    output_counts: list[np.ndarray]  # per row: their counts, int32
    bias_ids: list[np.ndarray]  # per row: int32
    bias_values: list[np.ndarray]  # per row: float32
