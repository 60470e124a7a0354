"""Model path + configuration -> a running engine: the one place where everything is wired."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rimuru.ops as backends
from rimuru.arch.registry import can_run, read_config, require_runnable
from rimuru.arch.spec import ModelConfig
from rimuru.arch.tensors import check_tensors
from rimuru.base.errors import FileFormatError, NotEnoughMemoryError
from rimuru.base.units import ceil_div, human_bytes
from rimuru.config import EngineConfig, parse_share
from rimuru.engine.branches import call_openers
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.engine.engine import Engine
from rimuru.engine.rehearse import rehearsal_steps
from rimuru.engine.resize import resize_model
from rimuru.engine.resolve import (
    MIN_CONTEXT_TOKENS,
    Resolved,
    check_context,
    dense_tensor_bytes,
    kv_element,
    longest_request,
    n_resident_experts,
    piece_lengths,
    pool_limit_bytes,
    request_bytes,
    resolve,
    snapshot_ram_bytes,
    staying_experts,
    swap_ram_bytes,
    wanted_pool_bytes,
    whole_granules,
)
from rimuru.engine.room import ElasticPolicy, ExpertRoom
from rimuru.engine.runner import Runner
from rimuru.engine.sampler import Sampler
from rimuru.engine.scheduler import Scheduler
from rimuru.engine.stores import (
    ExpertStore,
    LateStore,
    StoreParts,
    cpu_share,
    expert_ram_bytes,
    may_read_in_place,
    needs_disk,
    wave_buffers,
)
from rimuru.experts.device_places import n_loading_buffers, places_bytes
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.hotset import find_profile
from rimuru.experts.source import ExpertSource, GgufExpertSource, open_model
from rimuru.experts.store import even_quotas, pages_of
from rimuru.experts.tiered_store import TieredExpertStore
from rimuru.formats.gguf import GgufFile, check_formats
from rimuru.forward.context import BuildContext
from rimuru.forward.model import Model
from rimuru.forward.weights import TensorReader, expert_biases, expert_factors
from rimuru.forward.workspace import Workspace
from rimuru.memory.cache import SequenceCache
from rimuru.memory.move_budget import STEP_MOVE_BYTES, MoveBudget
from rimuru.memory.page_pool import PagePool
from rimuru.memory.planner import plan_layout
from rimuru.memory.specs import PoolLayout
from rimuru.ops.base import Array, Ops, PoolMemory
from rimuru.text.chat_template import ChatTemplate
from rimuru.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
FIXED_SHARE = 0.75
"""Of the pool, for a fixed number of experts that nobody has named."""
ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(slots=True)
class LoadedModel:
    """The wired parts of one loaded model. `close` gives everything back, in the reverse order of building."""

    gguf: GgufFile
    config: ModelConfig
    layout: PoolLayout
    resolved: Resolved
    ops: Ops
    engine: Engine
    pool: PagePool
    pool_memory: PoolMemory
    store: ExpertStore | None
    room: CompactingRoom
    source: ExpertSource | None
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    dense_bytes: int
    scratch_bytes: int
    least_pool_bytes: int
    load_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def memory_report(self) -> dict[str, Any]:
        """The pool as numbers; keys of design section 7, `llm.memory()`."""
        report = self.pool.stats()
        report["pool_bytes"] = report["total_bytes"]
        report["dense_bytes"], report["scratch_bytes"] = self.dense_bytes, self.scratch_bytes
        report["total_bytes"] = self.dense_bytes + self.scratch_bytes + report["pool_bytes"]
        report["resident_experts"] = [] if self.store is None else self.store.residency.resident_per_layer()
        report["requests"] = self.engine.cache.requests()
        report["swap"] = self.engine.cache.swap.stats()
        if self.store is not None:
            report["hit_rate"] = self.store.counters.hit_rate
            report["read_bytes"] = self.store.counters.read_bytes
            report["forecasts"] = self.store.rates.forecasts.snapshot()
            report["decisions"] = self.room.decisions.snapshot()
        if isinstance(self.store, DeviceExpertStore):
            report["ways"] = self.store.chooser.report()
        if isinstance(self.store, TieredExpertStore):
            report["tiers"] = self.store.tiers()
        return report

    def resize(self, memory_bytes: int) -> None:
        """Change the memory budget at once."""
        for _ in self.resize_steps(memory_bytes):
            pass

    def resize_steps(self, memory_bytes: int) -> Iterator[None]:
        """Change the memory budget, in pieces between which steps may run; one such change at a time."""
        return resize_model(self, memory_bytes)

    def close(self) -> None:
        self.ops.synchronize()
        if self.store is not None:
            self.store.close()
        if self.source is not None:
            self.source.close()
        if self.pool.copier is not None:
            self.pool.copier.close()
        self.ops.close()
        self.pool_memory.close()
        self.gguf.close()


def load_model(path: Path, config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Open, check, plan, load. Raises RimuruError subclasses with one helpful line; leaves nothing open on failure."""
    started = time.monotonic()
    gguf, source = open_model(path)
    try:
        loaded = _load(gguf, source, config, progress or (lambda stage, done, total: None))
    except BaseException:
        if source is not None:
            source.close()
        gguf.close()
        raise
    if progress is not None:
        progress("kernels", 0, 1)  # the first run on a machine compiles them
    loaded.engine.warm_up()
    if progress is not None:
        progress("kernels", 1, 1)
    loaded.load_s = time.monotonic() - started
    return loaded


def _load(gguf: GgufFile, source: ExpertSource | None, config: EngineConfig, progress: Progress) -> LoadedModel:
    model = read_config(gguf, config.context)
    device, device_bytes, why_cpu = backends.choose(config.device)
    if config.device == "auto" and not can_run(model.architecture, device) and can_run(model.architecture, "cpu"):
        why_cpu = f"running on the CPU: {model.architecture} models do not run on {device} yet"
        device, device_bytes = "cpu", None
    require_runnable(model, device)
    check_formats({name: info for name, info in gguf.tensors.items() if not _is_skipped(name, model)})
    check_tensors(model, gguf)
    if model.n_mtp_blocks:
        log.info("%d multi-token-prediction block(s) in the file are left unused", model.n_mtp_blocks)
    element = kv_element(config, device)
    layout = plan_layout(model, gguf.tensors, ELEMENT_BYTES[element], bfloat=element == "bf16")
    if source is not None and source.layout != layout.expert:
        raise FileFormatError("the blob was written with another layout by another version; run `rimuru convert` again")
    dense_bytes = dense_tensor_bytes(gguf, model)
    resolved = resolve(config, model, device, device_bytes, dense_bytes)
    ops = backends.create(device, resolved.threads, config.deterministic)
    loaded = _Builder(gguf, source, config, model, layout, resolved, ops, progress, dense_bytes).build()
    if why_cpu:
        loaded.notes.append(why_cpu)
    return loaded


def _is_skipped(name: str, model: ModelConfig) -> bool:
    """Tensors of multi-token-prediction blocks, which are never loaded."""
    parts = name.split(".")
    return parts[0] == "blk" and parts[1].isdigit() and int(parts[1]) >= len(model.layers)


class _Builder:
    """The steps of wiring, in order; each leaves what the next one needs in an attribute."""

    def __init__(
        self,
        gguf: GgufFile,
        source: ExpertSource | None,
        config: EngineConfig,
        model: ModelConfig,
        layout: PoolLayout,
        resolved: Resolved,
        ops: Ops,
        progress: Progress,
        dense_bytes: int,
    ) -> None:
        self.gguf, self.source, self.config, self.model_config = gguf, source, config, model
        self.layout, self.resolved, self.ops, self.progress = layout, resolved, ops, progress
        self.expected_dense_bytes = dense_bytes
        self._done = 0
        self.store: ExpertStore | None = None

    def build(self) -> LoadedModel:
        resolved, ops = self.resolved, self.ops
        self.memory = ops.reserve_pool(0, pool_limit_bytes(resolved.memory_bytes, resolved.memory_is_given))
        try:
            return self._build_in_pool()
        except BaseException:
            if self.store is not None:
                self.store.close()
            self.memory.close()
            raise

    def _build_in_pool(self) -> LoadedModel:
        resolved, ops, layout = self.resolved, self.ops, self.layout
        self.reader = TensorReader(self.gguf, ops, self._advance)
        most_rows = ops.padded_sequences(resolved.max_sequences)
        self.workspace = Workspace(ops, max(resolved.max_step_tokens, most_rows))
        reader_stand_in = LateStore()
        context = BuildContext(
            self.model_config, self.gguf, ops, self.reader, self.workspace, layout, self.memory.base,
            reader_stand_in if layout.expert is not None else None, resolved.n_positions,
        )  # fmt: skip
        model = Model(context, most_rows)
        biases, factors = expert_biases(layout, self.reader), expert_factors(layout, self.reader)
        dense_bytes = self.reader.n_bytes
        scratch_bytes, context_length = self._share_out(dense_bytes, model.logit_bytes, most_rows)
        resolved = self.resolved
        self.snapshot_ram_bytes = snapshot_ram_bytes(self.config, resolved.device, layout)
        self.swap_ram_bytes = swap_ram_bytes(self.config, resolved.device)
        cache = SequenceCache(
            self.pool, layout, prefix_cache=self.config.prefix_cache, host_bytes=self.snapshot_ram_bytes,
            swap_bytes=self.swap_ram_bytes,
        )  # fmt: skip
        room = CompactingRoom(cache, self.pool, layout)
        if layout.expert is not None:
            elastic = ExpertRoom(cache, self.pool, layout, self.config.expert_offload_limit, self._elastic_policy())
            reader_stand_in.store = self.store = self._make_store(biases, factors, elastic)
            room = elastic if self.quotas is None else room
            room.store = elastic.store = self.store
            cache.make_pages = room.make_pages  # a fixed number of experts gives none up
        sampler = Sampler(ops, most_rows)
        waits_for_ids = isinstance(self.store, TieredExpertStore)
        runner = Runner(model, ops, sampler.ids, may_replay=not waits_for_ids)
        sizes = sorted({ops.padded_sequences(n) for n in range(1, resolved.max_sequences + 1)})
        steps = rehearsal_steps(resolved.max_step_tokens, sizes, layout, self.store)
        wait_for_kernels = ops.prepare(runner.all_rows, steps)
        self._fill_store()
        wait_for_kernels(lambda done, total: self.progress("kernels", done, total))
        reader_stand_in.cpu_experts = cpu_share(
            self.store, self.model_config, self.config, resolved.device, resolved.threads
        )
        if isinstance(self.store, DeviceExpertStore):
            runner.way_of = self.store.chooser.begin
        tokenizer = Tokenizer.from_kv(self.gguf.kv, str(self.gguf.path))
        scheduler = Scheduler(cache, room, resolved.max_step_tokens, resolved.max_sequences)
        engine = Engine(
            scheduler, cache, self.pool, layout, runner, sampler,
            context_length, self.model_config.n_vocab,
            frozenset(tokenizer.eog_ids) if tokenizer is not None else frozenset(), self.config.seed, self.store,
            call_openers(tokenizer),
        )  # fmt: skip
        engine.overlaps = engine.overlaps and not waits_for_ids
        engine.may_grow = context_length < self.model_config.context_length
        return LoadedModel(
            self.gguf, self.model_config, layout, resolved, ops, engine, self.pool, self.memory, self.store, room,
            self.source, tokenizer, None if tokenizer is None else ChatTemplate(tokenizer), dense_bytes, scratch_bytes,
            min(self._least_pool_bytes(), self.memory.mapped_bytes),
        )  # fmt: skip

    def _reserve_step(self, most_rows: int) -> int:
        """What the backend needs for the tables of the largest step; its bytes."""
        layout, n_tokens = self.layout, self.resolved.n_positions
        groups = () if layout.kv is None else layout.kv.groups
        blocks = sum(ceil_div(n_tokens, group.page_tokens) for group in groups)
        columns = sum(len(part.layers) for part in (layout.ssm, layout.conv) if part is not None)
        return self.ops.reserve(self.workspace.max_tokens, most_rows, blocks * most_rows, columns)

    def _advance(self, n_bytes: int) -> None:
        self._done += n_bytes
        self.progress("dense weights", self._done, max(self.expected_dense_bytes, self._done))

    def _share_out(self, dense_bytes: int, logit_bytes: int, most_rows: int) -> tuple[int, int]:
        """Allocate the scratch and map the pool: (bytes of scratch, context that fits). Where the budget is tight,
        prompts are run in shorter pieces (unless their length was asked for), whose scratch leaves more to the pool."""
        fixed_bytes, asked = logit_bytes + self._reserve_step(most_rows), self.config.max_step_tokens is not None
        if self.layout.expert is not None and self.resolved.device == "cuda":
            fixed_bytes += places_bytes(self.layout.expert)
        lengths = piece_lengths(self.resolved.max_step_tokens, most_rows, asked)
        for n_tokens in lengths:
            n_rows = max(n_tokens, most_rows)  # all sequences decode in one step, however short prompts' pieces are
            scratch_bytes = fixed_bytes + self.workspace.bytes_for(n_rows)
            try:
                pool_bytes, context = self._plan_pool(dense_bytes, scratch_bytes)
            except NotEnoughMemoryError:
                if n_tokens == lengths[-1]:
                    raise
                continue
            if 2 * scratch_bytes <= pool_bytes or not self.resolved.memory_is_given:
                break
        if n_tokens < self.resolved.max_step_tokens:
            log.info("prompts run in pieces of %d tokens, so that scratch leaves most of the memory", n_tokens)
            self.resolved = dataclasses.replace(self.resolved, max_step_tokens=n_tokens)
        if self.config.context is None and context < self.resolved.n_positions:
            memory = human_bytes(self.resolved.memory_bytes)
            log.info("context lowered from %d to %d tokens, to fit in %s", self.resolved.n_positions, context, memory)
        self.workspace.allocate(n_rows)
        self._map_pool(pool_bytes)
        return scratch_bytes, context

    def _plan_pool(self, dense_bytes: int, scratch_bytes: int) -> tuple[int, int]:
        """(bytes of the pool, context that fits): what dense weights and scratch leave of the budget, no more than is
        useful where the budget was not given."""
        resolved, layout = self.resolved, self.layout
        left = whole_granules(resolved.memory_bytes - dense_bytes - scratch_bytes, resolved.device)
        if left < layout.huge_bytes:
            raise NotEnoughMemoryError(
                f"dense weights ({human_bytes(dense_bytes)}) and scratch ({human_bytes(scratch_bytes)}) leave no page "
                f"of the memory budget of {human_bytes(resolved.memory_bytes)}; give more --memory"
            )
        self.n_buffers = 0
        bytes_in_ram = expert_ram_bytes(self.config, resolved.device, layout)
        self.needs_disk = self.by_waves = needs_disk(layout.expert, resolved.device, left, bytes_in_ram)
        if layout.expert is not None and (resolved.device == "cpu" or self.needs_disk):
            self.n_buffers = wave_buffers(self.model_config, layout.expert, left)
        self.quotas = self._quotas(left)
        brings = self.config.prefetch and self.config.fill_on_read
        if layout.expert is not None and resolved.device == "cuda" and brings and not self.needs_disk:
            fixed_bytes = pages_of(layout.expert, self.quotas) * layout.expert.page_bytes
            self.n_buffers = n_loading_buffers(layout.expert, left, fixed_bytes)
        if layout.expert is not None and resolved.device == "cuda" and not (self.config.in_place or self.needs_disk):
            self.by_waves = may_read_in_place(layout.expert, self.config, self.quotas, self.n_buffers, bytes_in_ram)
            if self.by_waves:
                self.n_buffers = wave_buffers(self.model_config, layout.expert, left)
                log.warning("nothing is read in place: experts come by the host, in turns, which is slow")
        if not resolved.memory_is_given:
            left = min(left, wanted_pool_bytes(layout, resolved.n_positions, resolved.max_sequences, self.n_buffers))
        longest = longest_request(layout, left, self._reserved_pages(), resolved.n_positions, resolved.max_step_tokens)
        n_staying = sum(self._staying())
        return left, check_context(self.config, longest, resolved.memory_bytes, resolved.n_positions, n_staying)

    def _map_pool(self, pool_bytes: int) -> None:
        resolved, layout = self.resolved, self.layout
        self.memory.resize(pool_bytes // layout.huge_bytes * layout.huge_bytes)
        limit = pool_limit_bytes(
            resolved.memory_bytes if resolved.memory_is_given else 4 * pool_bytes, resolved.memory_is_given
        )
        self.pool = PagePool(self.memory, layout, limit, self.ops.copier())
        self.pool.moves = MoveBudget(STEP_MOVE_BYTES[resolved.device])

    def _quotas(self, pool_bytes: int) -> list[int] | None:
        """Most residents per layer slot where their number is fixed; None where the adjuster decides. Policy `fixed`
        without a number leaves a quarter of the pool to requests."""
        layout = self.layout.expert
        if layout is None:
            return None
        if self.config.resident_experts is not None:
            return even_quotas(layout, n_resident_experts(parse_share(self.config.resident_experts), layout.n_experts))
        if self.config.policy == "fixed":
            expert_bytes = layout.n_pages * layout.page_bytes / layout.n_experts
            return even_quotas(layout, min(layout.n_experts, int(FIXED_SHARE * pool_bytes / expert_bytes)))
        return even_quotas(layout, layout.n_experts) if self.config.policy == "static" else None

    def _elastic_policy(self) -> ElasticPolicy:
        """The adjuster's policy where the number of residents is not fixed."""
        return "paper" if self.config.policy == "paper" else "cost"

    def _staying(self) -> list[int]:
        return staying_experts(self.layout.expert, self.quotas, self.config.expert_offload_limit)

    def _reserved_pages(self) -> int:
        """Expert pages that requests can never get: loading buffers, and experts that stay."""
        layout = self.layout.expert
        return 0 if layout is None else self.n_buffers * layout.max_pages + pages_of(layout, self._staying())

    def _least_pool_bytes(self) -> int:
        """A pool in which nothing but the loading buffers and one short request would still work, as much as a device
        can map."""
        layout = self.layout
        buffers = 0 if layout.expert is None else self._reserved_pages() * layout.expert.page_bytes
        short = request_bytes(layout, min(MIN_CONTEXT_TOKENS, self.resolved.n_positions))
        least_bytes = buffers + short + layout.huge_bytes * (2 if layout.ssm is not None else 1)
        return -whole_granules(-least_bytes, self.resolved.device)  # rounded up

    def _make_store(
        self, biases: list[dict[str, Array]], factors: list[dict[str, Array]], room: ExpertRoom
    ) -> ExpertStore:
        """The expert store, still empty."""
        layout = self.layout.expert
        assert layout is not None
        if self.source is None:
            self.source = GgufExpertSource(self.gguf, layout)
        parts = StoreParts(
            layout, self.pool, self.source, self.ops, self.ops.copier, biases, factors, self.quotas, room, self.config,
            min(self.resolved.threads, 8),
        )  # fmt: skip
        if self.resolved.device == "cpu":
            return parts.host(self.n_buffers)
        bytes_in_ram = expert_ram_bytes(self.config, self.resolved.device, self.layout)
        store = None if self.by_waves else parts.device(self.n_buffers, bytes_in_ram)
        if store is None and not self.by_waves:
            self.n_buffers = wave_buffers(self.model_config, layout, self.pool.total_bytes)
        return store or parts.tiered(self.n_buffers, bytes_in_ram)

    def _fill_store(self) -> None:
        """Load experts: a fixed number of residents, or as many as leave the reserve of free pages."""
        layout, store, quotas = self.layout.expert, self.store, self.quotas
        if layout is None or store is None:
            return
        total = sum(layer.n_experts * layer.useful_bytes for layer in layout.layers)
        done = 0

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            self.progress("experts", done, total)

        profile = find_profile(self.gguf.path, layout, self.model_config.architecture)
        if profile is not None:
            store.residency.load_profile(profile.probabilities())
        n_loaded = store.preload(store.residency.hottest(), advance)
        if quotas is not None and n_loaded < sum(quotas):
            raise NotEnoughMemoryError(
                f"{sum(quotas)} resident experts were asked for, but only {n_loaded} fit in "
                f"{human_bytes(self.resolved.memory_bytes)}; give more --memory or fewer experts"
            )
