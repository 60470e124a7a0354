"""Runs a trace through the real control plane, with a time model in place of the backend.

arrivals -> Scheduler -> SequenceCache, ExpertRoom, residency (all real, on a pool without memory behind it)
         -> synthetic router -> SimulatedStore -> TimeModel: the clock moves on by the step's time
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rimuru.arch.common import Gguf
from rimuru.arch.registry import read_config
from rimuru.base.errors import BadInputError, NotEnoughMemoryError
from rimuru.base.units import human_bytes
from rimuru.engine.build import FIXED_SHARE
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.engine.resolve import MIN_CONTEXT_TOKENS, longest_request, staying_experts
from rimuru.engine.room import ExpertRoom
from rimuru.engine.scheduler import Admission, Scheduler
from rimuru.experts.device_places import n_loading_buffers
from rimuru.experts.residency import ResidencyPolicy
from rimuru.experts.routing import SyntheticRouter, router_for
from rimuru.experts.store import even_quotas, pages_of
from rimuru.inspect import dense_weight_bytes
from rimuru.memory.cache import SequenceCache
from rimuru.memory.page_pool import PagePool
from rimuru.memory.planner import plan_layout
from rimuru.plan import StepPlan
from rimuru.request import SamplingParams, Sequence
from rimuru.simulate.cards import Card
from rimuru.simulate.model_cost import model_cost
from rimuru.simulate.report import Recorder, Result
from rimuru.simulate.store import SimulatedPlaces, SimulatedStore
from rimuru.simulate.timing import StepLoad, TimeModel, Ways
from rimuru.simulate.traces import PREFIX_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated. memory_bytes: dense weights, scratch_bytes and the pool."""

    memory_bytes: int
    card: Card
    policy: str = "cost"
    residency: ResidencyPolicy = "auto"
    resident_experts: int | float | None = None
    expert_offload_limit: int | None = None
    admission: Admission = "optimistic"
    max_step_tokens: int = 2048
    max_sequences: int = 256
    buffer_experts: int = 0
    scratch_bytes: int = 0
    ram_bytes: int | None = None
    kv_element_bytes: int = 2
    fill_on_read: bool = True
    by_device: bool = False
    """Whether the device decides who is resident, where experts fill on read: for forecasts of what a card does."""
    has_buffers: bool = False
    """Whether as many loading buffers are taken as the engine takes on a device, besides buffer_experts."""
    prefix_cache: bool = True
    ways: Ways = field(default_factory=Ways)
    router: str = "auto"
    n_topics: int | None = None
    profile_tokens: int = 400
    """Tokens of other text that the hot set's offline profile was measured on; 0 = no profile."""
    seed: int = 0
    audit: bool = False


class NoMemory:
    """Addresses that nobody reads."""

    def __init__(self, n_bytes: int) -> None:
        self.base, self.mapped_bytes = 1 << 40, n_bytes

    def resize(self, n_bytes: int) -> None:
        self.mapped_bytes = n_bytes

    def close(self) -> None:
        self.mapped_bytes = 0


class NoCopier:
    """Counts the bytes that would move inside the pool."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def alloc_host(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def is_pinned(self, array: np.ndarray) -> bool:
        return True

    def copy_in(self, address: int, source: np.ndarray) -> None:
        self.n_bytes += source.nbytes

    def copy_out(self, target: np.ndarray, address: int) -> None:
        self.n_bytes += target.nbytes

    def copy_within(self, target: int, source: int, n_bytes: int) -> None:
        self.n_bytes += n_bytes

    def fill(self, address: int, n_bytes: int, value: int) -> None:
        return None

    def record(self) -> object:
        return None

    def done(self, marker: object) -> bool:
        return True

    def wait(self, marker: object = None) -> None:
        return None

    def close(self) -> None:
        return None


class Simulation:
    """One model, one set of settings; `run` takes a trace through it, or `start` and `step` do, step by step."""

    def __init__(self, gguf: Gguf, settings: Settings) -> None:
        """Raises NotEnoughMemoryError where the dense weights, or a fixed number of experts, do not fit."""
        self.settings = settings
        self.config = read_config(gguf)
        self.layout = plan_layout(self.config, gguf, settings.kv_element_bytes)
        if self.layout.expert is None:
            raise BadInputError("this model has no routed experts: there is nothing to simulate")
        self.cost = model_cost(self.config, gguf.tensors, self.layout)
        self.experts = self.layout.expert
        dense = dense_weight_bytes(self.config, gguf.tensors)
        pool_bytes = settings.memory_bytes - dense - settings.scratch_bytes
        if pool_bytes < self.layout.huge_bytes:
            raise NotEnoughMemoryError(
                f"dense weights ({human_bytes(dense)}) and scratch ({human_bytes(settings.scratch_bytes)}) leave "
                f"nothing of {human_bytes(settings.memory_bytes)}; give more --memory"
            )
        self.copier = NoCopier()
        memory = NoMemory(pool_bytes // self.layout.huge_bytes * self.layout.huge_bytes)
        self.pool = PagePool(memory, self.layout, None, self.copier)
        self._build()

    def _build(self) -> None:
        settings, layout = self.settings, self.layout
        self._streams: set[int] = set()
        self._n_requests = 0
        """Of all traces so far: no request has the number of another one."""
        n_buffers, quotas = settings.buffer_experts, self._quotas()
        if self._is_by_device and settings.has_buffers:
            fixed_bytes = pages_of(self.experts, quotas) * self.experts.page_bytes
            n_buffers += n_loading_buffers(self.experts, self.pool.total_bytes, fixed_bytes)
        for _ in range(n_buffers):
            if self.pool.reserve_buffer(self.experts.max_pages) is None:
                raise NotEnoughMemoryError("the loading buffers do not fit; give more --memory")
        if quotas is None:
            self._check_room(n_buffers)
        self.cache = SequenceCache(self.pool, layout, prefix_cache=settings.prefix_cache)
        self.room: CompactingRoom
        may_grow: Callable[[int], bool] = _never
        if quotas is None:
            policy = "paper" if settings.policy == "paper" else "cost"
            self.room = ExpertRoom(self.cache, self.pool, layout, settings.expert_offload_limit, policy)  # type: ignore[arg-type]
            may_grow = self.room.may_grow
        else:
            self.room = CompactingRoom(self.cache, self.pool, layout)
        self.store = self._make_store(quotas, may_grow)
        self.room.store = self.store
        if self._is_by_device:
            self.store.n_buffers = n_buffers
        self.router = self._router(settings.seed)
        if settings.profile_tokens:
            self.store.residency.load_profile(self._profile(settings.profile_tokens))
        n_loaded = self.store.preload()
        if quotas is not None and n_loaded < sum(quotas):
            asked = f"{sum(quotas)} resident experts were asked for"
            if settings.policy == "static" and settings.resident_experts is None:
                asked = f"policy static keeps all {sum(quotas)} experts resident"
            raise NotEnoughMemoryError(f"{asked}, but only {n_loaded} fit; give more --memory or another --policy")
        self.scheduler = Scheduler(
            self.cache, self.room, settings.max_step_tokens, settings.max_sequences, settings.admission
        )
        self.scheduler.clock = lambda: self.now_s
        disk_share = 0.0
        if settings.ram_bytes is not None:
            disk_share = max(0.0, 1.0 - settings.ram_bytes / (self.experts.n_pages * self.experts.page_bytes))
        self.time = TimeModel(self.cost, settings.card, settings.ways, disk_share)

    def _check_room(self, n_buffers: int) -> None:
        """Refuse, as an engine would, where experts that may not leave have the pages of the shortest request."""
        limit = self.settings.expert_offload_limit
        n_staying = staying_experts(self.experts, None, limit)
        reserved = n_buffers * self.experts.max_pages + pages_of(self.experts, n_staying)
        if longest_request(self.layout, self.pool.total_bytes, reserved, MIN_CONTEXT_TOKENS) < MIN_CONTEXT_TOKENS:
            beside = f" beside the {sum(n_staying)} experts that may not leave (--expert-offload-limit {limit})"
            raise NotEnoughMemoryError(
                f"a pool of {human_bytes(self.pool.total_bytes)} holds no request of {MIN_CONTEXT_TOKENS} tokens"
                f"{beside if limit is not None else ''}; give more --memory or a higher --expert-offload-limit"
            )

    @property
    def _is_by_device(self) -> bool:
        return self.settings.by_device and self.settings.fill_on_read

    def _make_store(self, quotas: list[int] | None, may_grow: Callable[[int], bool]) -> SimulatedStore:
        settings = self.settings
        if self._is_by_device:
            return SimulatedPlaces(self.experts, self.pool, quotas, may_grow, settings.residency)
        return SimulatedStore(self.experts, self.pool, quotas, may_grow, settings.fill_on_read, settings.residency)

    def _quotas(self) -> list[int] | None:
        settings, n_experts = self.settings, self.experts.n_experts
        if settings.resident_experts is not None:
            asked = settings.resident_experts
            n_resident = round(asked * n_experts) if isinstance(asked, float) else asked
            return even_quotas(self.experts, min(n_resident, n_experts))
        if settings.policy == "static":
            return even_quotas(self.experts, n_experts)
        if settings.policy == "fixed":
            pages = int(FIXED_SHARE * self.pool.allocator.free_pages("expert"))
            return even_quotas(self.experts, min(n_experts, pages * n_experts // self.experts.n_pages))
        return None

    def _router(self, seed: int) -> SyntheticRouter:
        layers = self.experts.layers
        width = max(layer.n_experts for layer in layers)
        if any(layer.n_experts != width for layer in layers):
            raise BadInputError("layers with different numbers of experts cannot be simulated")
        params = router_for(width, self.settings.router)
        return SyntheticRouter(len(layers), width, self.cost.top_k, params, seed, self.settings.n_topics)

    def _profile(self, n_tokens: int) -> np.ndarray:
        """Routing probabilities of other text on the same router: 16 streams of their own."""
        counts = np.zeros(self.store.residency.resident.shape, np.int32)
        for stream in range(-16, 0):
            self.router.open(stream)
            for _ in range(max(1, n_tokens // 16)):
                self.router.route(stream, 1, counts)
            self.router.close(stream)
        return counts / (16 * max(1, n_tokens // 16))

    # ---- running
    def run(self, trace: list[TraceRequest]) -> Result:
        """Until every request has been answered. Raises NotEnoughMemoryError for one that can never fit."""
        self.start(trace)
        while self.step():
            pass
        if self.settings.audit:
            self.audit()
        return self.recorder.result(self.now_s, self.room.decisions if isinstance(self.room, ExpertRoom) else None)

    def start(self, trace: list[TraceRequest]) -> None:
        """At time 0, with nothing running: for who wants to look at `store`, `recorder` and `now_s` between steps."""
        self.now_s = 0.0
        self.recorder = Recorder(self.pool, self.scheduler, self.store)
        self._pending = deque(enumerate(trace, self._n_requests))
        self._n_requests += len(trace)

    def stop(self) -> None:
        """End whoever runs or waits; residency and rates stay as they are, for another `start`."""
        self._pending.clear()
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        if sequence.seq_id in self._streams:
            self.router.close(sequence.seq_id)
            self._streams.discard(sequence.seq_id)

    def step(self) -> bool:
        """Whoever has come by now, and one step; False, and nothing happens, where every request has been answered."""
        pending = self._pending
        if not pending and not self.scheduler.has_work:
            return False
        if not self.scheduler.has_work:
            self.now_s = max(self.now_s, pending[0][1].arrival_s)
        while pending and pending[0][1].arrival_s <= self.now_s:
            number, request = pending.popleft()
            sequence = self._sequence(number, request)
            self.recorder.arrived(sequence, request.arrival_s)
            self.scheduler.add(sequence)
        self.now_s = self._step(self.now_s, self.recorder)
        return True

    def _sequence(self, number: int, request: TraceRequest) -> Sequence:
        tokens = [_own_token(number)] * request.n_prompt  # no other request's, so that nothing is shared by accident
        for block, prefix in enumerate(request.prefix):
            start = block * PREFIX_BLOCK_TOKENS
            stop = min(start + PREFIX_BLOCK_TOKENS, request.n_prompt)
            tokens[start:stop] = [-1 - prefix] * max(0, stop - start)
        params = SamplingParams(max_tokens=request.n_output, temperature=0.0, ignore_eos=True)
        return Sequence(
            number, tokens, len(tokens), params, _RNG, frozenset(), len(tokens) + request.n_output
        )  # fmt: skip

    def _step(self, now: float, recorder: Recorder) -> float:
        """One step; returns when it ends."""
        plan = self.scheduler.schedule()
        if plan.failed:
            raise plan.failed[0].error or NotEnoughMemoryError(
                f"request {plan.failed[0].seq_id} needs more pages at {plan.failed[0].n_tokens} tokens than requests "
                "can get; give more --memory, or let more experts leave (--resident-experts, --expert-offload-limit)"
            )
        load = self._load(plan)
        time = self.time.step(load)
        now += time.step_s
        store = self.store
        expanded = min(load.queued_bytes, max(0.0, time.step_s / self.time.seconds_per_byte - time.link_bytes))
        store.pass_bytes(expanded)
        waited_s = time.step_s - time.compute_s
        store.rates.observe(plan.n_tokens, time.step_s, waited_s, int(time.link_bytes), time.link_s)
        recorder.step(plan, time, expanded, now)
        self._commit(plan, now, recorder)
        if self.settings.audit and recorder.n_steps % 50 == 0:
            self.audit()
        return now

    def _load(self, plan: StepPlan) -> StepLoad:
        counts = np.zeros(self.store.residency.resident.shape, np.int32)
        self.router.begin_step()
        context = 0
        for item in plan.items:
            sequence = item.sequence
            if sequence.seq_id not in self._streams:
                self._streams.add(sequence.seq_id)
                self.router.open(sequence.seq_id)
            self.router.route(sequence.seq_id, item.n_tokens, counts)
            context += sequence.n_cached + item.n_tokens
        queued_bytes = self.store.queued_bytes
        per_slot = self.store.use(counts, plan.n_tokens)
        used, missed, absent, in_place = (self._by_layer(values) for values in per_slot)
        n_rows = sum(item.samples for item in plan.items)
        return StepLoad(plan.n_tokens, n_rows, context, len(plan.items), used, missed, absent, queued_bytes, in_place)

    def _by_layer(self, per_slot: np.ndarray) -> np.ndarray:
        found = np.zeros(len(self.cost.slot_of_layer))
        slots = np.array(self.cost.slot_of_layer)
        found[slots >= 0] = per_slot[slots[slots >= 0]]
        return found

    def _commit(self, plan: StepPlan, now: float, recorder: Recorder) -> None:
        for item in plan.items:
            sequence, begin = item.sequence, item.sequence.n_cached
            self.cache.commit(sequence.seq_id, sequence.tokens[begin : begin + item.n_tokens])
            sequence.n_cached += item.n_tokens
            if not item.samples:
                continue
            sequence.append(_own_token(sequence.seq_id) | 1)
            recorder.token(sequence, now)
            if sequence.finish_reason is not None:
                self._end(sequence)

    def audit(self) -> None:
        """Check every structure's invariants."""
        self.pool.audit()
        self.cache.audit()
        self.store.audit()


def _own_token(number: int) -> int:
    """A token id (int32) that only this request has; they come again after half a million requests."""
    return (number + 1) % (1 << 19) << 12


def _never(n_pages: int) -> bool:
    return False


_RNG = np.random.default_rng(0)
