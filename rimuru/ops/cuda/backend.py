"""CudaOps: every verb on the device. Kernels live in cuda_src, launchers beside this file; here is what owns memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from rimuru.arch.spec import DeltaNetSpec, MoeSpec
from rimuru.batch import Batch
from rimuru.formats.quants import QuantFormat
from rimuru.memory.specs import KvGroupLayout
from rimuru.ops.base import Act, Array, MoeScratch, Step, Weight
from rimuru.ops.cuda import (
    attention,
    embed,
    head_linear,
    loader,
    matmul,
    moe,
    pointwise,
    pool,
    recurrent,
    residency,
    routing,
)
from rimuru.ops.cuda.copier import CudaCopier
from rimuru.ops.cuda.delta_chunks import DeltaChunks
from rimuru.ops.cuda.device import DeviceInfo, StagedBytes
from rimuru.ops.cuda.graphs import DecodeGraphs, bucket_of
from rimuru.ops.cuda.launch import Kernel, rehearsal
from rimuru.ops.cuda.sampling import KERNELS as SAMPLING_KERNELS
from rimuru.ops.cuda.sampling import Sampler
from rimuru.ops.cuda.upload import Uploader
from rimuru.ops.places import ExpertPlaces, LayerPlaces

_STEP_FIELDS = (
    "token_ids", "positions", "seq_of_token", "query_start", "context_len", "kv_pages", "ssm_pages", "conv_pages",
    "fresh_state", "logit_rows",
)  # fmt: skip


class CudaOps:
    """The CUDA backend. All work is queued on `stream`; one thread at a time may use it.

    deterministic: one kernel family and one order of sums for every batch size.
    """

    name = "cuda"
    overlaps = True

    def __init__(self, deterministic: bool = False, device_id: int = 0) -> None:
        self.deterministic = deterministic
        self.info = DeviceInfo.of(device_id)
        self._device = cupy.cuda.Device(device_id)
        self._device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._staged = StagedBytes()
        self._uploader = Uploader(self.info.host_pointers)
        self.attention = attention.Attention(deterministic, self.info.max_shared_bytes)
        self.prepare_qkv = self.attention.prepare_qkv
        self._attention_bytes = 0
        self._delta_chunks = DeltaChunks(deterministic)
        self.delta_net = partial(recurrent.delta_net, chunks=self._delta_chunks)
        self.sample = Sampler()
        self.choose_experts = routing.Router()
        self.graphs = DecodeGraphs(self.stage, self.stream)
        self._aside = residency.Aside()
        self._enter()

    def _enter(self) -> None:
        """Make device and stream current for the calling thread; launches go to its current stream."""
        self._device.use()
        self.stream.use()

    # ---- memory
    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        self._enter()
        return cupy.empty(tuple(shape), dtype)

    def upload(self, host: np.ndarray) -> Array:
        self._enter()
        return self._uploader.upload(host)

    def download(self, array: Array) -> np.ndarray:
        self._enter()
        return cupy.asnumpy(array, stream=self.stream)

    def fetch(self, array: Array) -> Callable[[], np.ndarray]:
        """A pinned copy on the way; CuPy keeps and reuses the pinned memory."""
        self._enter()
        n_bytes = array.nbytes
        pinned = cupy.cuda.alloc_pinned_memory(max(n_bytes, 1))
        cupy.cuda.runtime.memcpyAsync(pinned.ptr, array.data.ptr, n_bytes, 2, self.stream.ptr)
        event = self.stream.record(cupy.cuda.Event(disable_timing=True))

        def values() -> np.ndarray:
            event.synchronize()
            return np.frombuffer(pinned, array.dtype, array.size).reshape(array.shape).copy()

        return values

    def assign(self, target: Array, host: np.ndarray) -> None:
        self._enter()
        target.set(np.ascontiguousarray(host), stream=self.stream)

    def set_places(self, commands: Array, n_commands: int, places: ExpertPlaces) -> None:
        self._enter()  # called between steps
        residency.set_places(commands, n_commands, places)

    def fetch_aside(self, ids: Array, positions: Array, places: LayerPlaces) -> None:
        self._aside.fetch(ids, positions, places, self.stream)

    def fetch_ahead(self, ids: Array, positions: Array, places: LayerPlaces) -> None:
        self._aside.fetch(ids, positions, places, self.stream, foretells=True)

    def join_fetch(self) -> None:
        self._aside.join(self.stream)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def weight(self, raw: np.ndarray, fmt: QuantFormat, n_in: int) -> Weight:
        matmul.check_width(fmt, n_in)
        row_bytes = fmt.row_bytes(n_in)
        rows = np.ascontiguousarray(raw).reshape(-1).view(np.uint8).reshape(-1, row_bytes)
        return Weight(self.upload(rows), fmt, rows.shape[0], n_in)

    def act(self, n_tokens: int, width: int) -> Act:
        self._enter()
        return matmul.act(n_tokens, width, self.deterministic)

    def act_bytes(self, n_tokens: int, width: int) -> int:
        return matmul.act_bytes(n_tokens, width, self.deterministic)

    def moe_scratch(self, max_tokens: int, spec: MoeSpec, n_in: int) -> MoeScratch:
        self._enter()
        return moe.moe_scratch(max_tokens, spec, n_in, self.deterministic, self.info.sm_shared_bytes)

    def moe_scratch_bytes(self, max_tokens: int, spec: MoeSpec, n_in: int) -> int:
        return moe.moe_scratch_bytes(max_tokens, spec, n_in, self.deterministic)

    def reserve_pool(self, n_bytes: int, limit_bytes: int) -> pool.MappedPool | pool.PlainPool:
        self._enter()
        return pool.reserve(n_bytes, limit_bytes, self.info.id)

    def copier(self) -> CudaCopier:
        """Its copies come after the steps queued so far: those may still read or write what is copied over."""
        return CudaCopier(self.info.id, self.info.host_pointers, self.stream)

    def stage(self, batch: Batch) -> Step:
        """One asynchronous copy to a fixed block: equal shapes give equal addresses."""
        self._enter()
        arrays = [getattr(batch, name) for name in _STEP_FIELDS]
        if batch.expert_ids is not None:
            arrays.append(batch.expert_ids)
        self._staged.reserve(sum(array.nbytes + 16 for array in arrays))
        addresses = self._staged.send(arrays)
        views = [
            self._staged.view(address, array.shape, array.dtype)
            for address, array in zip(addresses, arrays, strict=True)
        ]
        return Step(batch, *views)  # expert_ids, the last field, only where the batch has them

    def run_decode(self, batch: Batch, forward: Callable[[Step], Array]) -> Array:
        """See Ops.run_decode: padded to its bucket, and from the third time on one graph launch."""
        self._enter()
        return self.graphs.run(batch, forward)

    def padded_sequences(self, n_seqs: int) -> int:
        return bucket_of(n_seqs)

    def reserve(self, max_tokens: int, max_seqs: int, kv_table_entries: int, state_columns: int) -> int:
        self.reserve_step(max_tokens, max_seqs, kv_table_entries, state_columns)
        self.sample.reserve(max_seqs)
        return self._staged.n_bytes + self.sample.n_bytes

    def close(self) -> None:
        """Forget graphs and scratch, unpin what was pinned for steps and uploads. Nothing may run any more."""
        self.stream.synchronize()
        self.graphs.clear()
        self._staged.close()
        self._uploader.release()

    def synchronize(self) -> None:
        self.stream.synchronize()

    # ---- what must exist before serving, so that nothing is allocated or compiled in a step
    def reserve_step(self, max_tokens: int, max_seqs: int, kv_table_entries: int, n_state_columns: int) -> None:
        """Room for the largest batch: kv_table_entries = groups x sequences x blocks, state columns = SSM + conv."""
        n_ints = 4 * max_tokens + 5 * max_seqs + kv_table_entries + n_state_columns * max_seqs
        self._enter()
        self._staged.reserve(4 * n_ints + 1024)

    def reserve_attention(self, n_head: int, group: KvGroupLayout, value_dim: int, max_queries: int) -> int:
        """Split scratch of the decode kernel, which all layers share; returns the bytes it grew by."""
        self._enter()
        n_bytes = 4 * attention.workspace_floats(n_head, group, value_dim, max_queries)
        self.attention.reserve(n_bytes // 4)
        before, self._attention_bytes = self._attention_bytes, max(self._attention_bytes, n_bytes)
        return self._attention_bytes - before

    def reserve_delta_net(self, spec: DeltaNetSpec, max_tokens: int) -> int:
        """Scratch of one window of chunks, which all layers share; returns the bytes it grew by."""
        self._enter()
        return self._delta_chunks.reserve(spec, max_tokens)

    def compile(self, kernels: Iterable[Kernel], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile kernels in parallel (from CuPy's disk cache where it has them)."""
        self._enter()
        loader.compile_all([kernel.source for kernel in kernels], progress)

    def prepare(
        self, forward: Callable[[Step], Array], batches: Iterable[Batch]
    ) -> Callable[[Callable[[int, int], None]], None]:
        """See Ops.prepare: the steps are gone through without launching, which tells the kernels that they use."""
        self._enter()
        with rehearsal() as used:
            for batch in batches:
                forward(self.stage(batch))
        kernels = dict.fromkeys(SAMPLING_KERNELS, 0) | used
        finish = loader.start_compiling([kernel.source for kernel in kernels])

        def ready(progress: Callable[[int, int], None]) -> None:
            finish(progress)
            self._enter()
            for kernel, shared_bytes in kernels.items():
                kernel.load(shared_bytes)

        return ready

    @staticmethod
    def common_kernels() -> list[Kernel]:
        """Kernels that every model uses."""
        return [*pointwise.KERNELS, *SAMPLING_KERNELS]

    # ---- pointwise
    embed = staticmethod(embed.embed)
    rms_norm = staticmethod(pointwise.rms_norm)
    add_norm = staticmethod(pointwise.add_norm)
    gated_norm = staticmethod(pointwise.gated_norm)
    glu = staticmethod(pointwise.glu)
    multiply = staticmethod(pointwise.multiply)
    row_gate = staticmethod(pointwise.row_gate)
    gather_rows = staticmethod(pointwise.gather_rows)
    finish_logits = staticmethod(pointwise.finish_logits)
    take_tokens = staticmethod(pointwise.take_tokens)

    # ---- attention and recurrent layers
    conv_update = staticmethod(recurrent.conv_update)
    mamba2 = staticmethod(recurrent.mamba2)
    mamba1 = staticmethod(recurrent.mamba1)

    # ---- matrices and experts
    linear = staticmethod(matmul.linear)
    head_linear = staticmethod(head_linear.head_linear)
    route = staticmethod(routing.route)
    replay_routing = staticmethod(routing.replay_routing)
    moe_experts = staticmethod(moe.moe_experts)
    moe_combine = staticmethod(moe.moe_combine)
    fetch_experts = staticmethod(residency.fetch_experts)
