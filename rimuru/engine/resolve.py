"""User intent + model + machine -> numbers. Every "auto" is decided here, once, with a reason that can be printed."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import psutil

from rimuru.arch.spec import ModelConfig
from rimuru.arch.tensors import expert_tensors
from rimuru.base.errors import BadInputError, NotEnoughMemoryError
from rimuru.base.units import MIB, ceil_div, human_bytes
from rimuru.config import EngineConfig
from rimuru.formats.gguf import GgufFile
from rimuru.memory.specs import ExpertLayout, PoolLayout

log = logging.getLogger(__name__)

CPU_STEP_TOKENS = 512
CUDA_STEP_TOKENS = 2048
LEAST_STEP_TOKENS = 32
MAX_SEQUENCES = 64
GRANULE_BYTES = 2 * MIB
MIN_CONTEXT_TOKENS = 128
"""A pool that cannot hold a request of this many tokens is refused."""
AUTO_RAM_SHARE = 0.8
"""Of the memory that is free at start, where --memory is not given."""
SWAP_RAM_SHARE = 1 / 32
MAX_SWAP_BYTES = 4 << 30
"""Of --ram, and at most: for requests that give way to others."""
SNAPSHOT_RAM_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Resolved:
    """What was decided before anything is loaded. Bytes are of device memory (CPU: RAM)."""

    device: str
    kv_element: str
    memory_bytes: int
    memory_is_given: bool
    threads: int
    max_step_tokens: int
    max_sequences: int
    n_positions: int
    """Positions that rotation tables cover: no context can become longer."""


def kv_element(config: EngineConfig, device: str) -> str:
    """Stored type of keys and values: f32 on the CPU and f16 on CUDA unless asked otherwise."""
    return ("f16" if device == "cuda" else "f32") if config.kv_type == "auto" else config.kv_type


def available_threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve(
    config: EngineConfig, model: ModelConfig, device: str, device_bytes: int | None, dense_bytes: int
) -> Resolved:
    """Decide everything that does not need the weights. `device_bytes`: free memory of a GPU, None for the CPU.

    Raises BadInputError for a context beyond the file's, NotEnoughMemoryError where the dense weights alone do not fit.
    """
    free_bytes = psutil.virtual_memory().available if device_bytes is None else device_bytes
    memory_bytes = int(free_bytes * AUTO_RAM_SHARE) if config.memory is None else int(config.memory)
    if device_bytes is None and memory_bytes > (total_bytes := psutil.virtual_memory().total):
        log.warning("--memory is lowered to the %s that this machine has", human_bytes(total_bytes))
        memory_bytes = total_bytes
    if dense_bytes > memory_bytes:
        raise NotEnoughMemoryError(
            f"the weights outside the experts take {human_bytes(dense_bytes)}, more than the memory budget of "
            f"{human_bytes(memory_bytes)}; give more --memory or choose a smaller model"
        )
    check_file_context(config, model)
    n_positions = config.context or _positions_within(model, memory_bytes - dense_bytes)
    step_tokens = config.max_step_tokens or (CUDA_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS)
    return Resolved(
        device=device,
        kv_element=kv_element(config, device),
        memory_bytes=memory_bytes,
        memory_is_given=config.memory is not None,
        threads=min(config.threads or available_threads(), available_threads()),
        max_step_tokens=min(step_tokens, max(n_positions, 1)),
        max_sequences=config.max_sequences or MAX_SEQUENCES,
        n_positions=n_positions,
    )


def check_file_context(config: EngineConfig, model: ModelConfig) -> None:
    """Raises BadInputError where a longer context is asked for than the file's."""
    if config.context is not None and config.context > model.context_length:
        raise BadInputError(f"--ctx {config.context} is more than the model's context of {model.context_length} tokens")


def _positions_within(model: ModelConfig, free_bytes: int) -> int:
    """The file's context, lowered so that rotation tables take at most a sixteenth of the free memory."""
    ropes = (getattr(layer.mixer, "rope", None) for layer in model.layers)
    widest = max((rope.n_rot for rope in ropes if rope is not None), default=0)
    if not widest:
        return model.context_length
    affordable = free_bytes // 16 // (4 * widest)
    return max(min(model.context_length, affordable), min(model.context_length, MIN_CONTEXT_TOKENS))


def l2_pages_for_tokens(layout: PoolLayout, n_tokens: int, n_step_tokens: int | None = None) -> int:
    """L2 pages (expert pages where the model has experts) that the KV pages of one sequence take; with n_step_tokens
    (the most that a step writes): at a time, where windows give pages back."""
    if layout.kv is None:
        return 0
    kv = layout.kv
    n_pages = kv.pages_for(n_tokens) if n_step_tokens is None else kv.peak_pages(n_tokens, n_step_tokens)
    return ceil_div(n_pages, kv_pages_per_l2(layout))


def kv_pages_per_l2(layout: PoolLayout) -> int:
    """KV pages that an L2 page of their parent kind is carved into."""
    assert layout.kv is not None
    return l2_bytes(layout) // layout.kv.page_bytes


def l2_bytes(layout: PoolLayout) -> int:
    """Size of the L2 page that KV pages are carved from."""
    if layout.kv is None or layout.kv.parent == "expert":
        return layout.expert.page_bytes if layout.expert is not None else layout.slab_bytes or layout.huge_bytes
    return layout.ssm.page_bytes if layout.ssm is not None else layout.slab_bytes or layout.huge_bytes


def state_bytes(layout: PoolLayout) -> int:
    """Pool bytes of one sequence's recurrent and convolution states."""
    ssm = 0 if layout.ssm is None else len(layout.ssm.layers) * layout.ssm.page_bytes
    conv = 0 if layout.conv is None else len(layout.conv.layers) * layout.conv.n_rows * layout.conv.page_bytes
    return ssm + conv


def request_bytes(layout: PoolLayout, n_tokens: int, n_step_tokens: int | None = None) -> int:
    """Pool bytes that one request of n_tokens takes, rounded up to whole L2 pages; n_step_tokens as above."""
    return l2_pages_for_tokens(layout, n_tokens, n_step_tokens) * l2_bytes(layout) + state_bytes(layout)


def buffer_experts(layout: ExpertLayout, top_k: int, pool_bytes: int) -> int:
    """Experts that the loading buffers hold: two halves of a token's experts each, within an eighth of the pool."""
    affordable = pool_bytes // 8 // (layout.max_pages * layout.page_bytes)
    return 2 * max(1, min(top_k, affordable // 2))


def wanted_pool_bytes(layout: PoolLayout, context: int, max_sequences: int, n_buffers: int) -> int:
    """A pool that leaves nothing to wish for: all experts, and several requests of full length."""
    experts = 0
    if layout.expert is not None:
        experts = (layout.expert.n_pages + n_buffers * layout.expert.max_pages) * layout.expert.page_bytes
    requests = min(max_sequences, 8) * request_bytes(layout, min(context, 8192)) + request_bytes(layout, context)
    return experts + requests + 2 * layout.huge_bytes


def longest_request(
    layout: PoolLayout,
    pool_bytes: int,
    reserved_expert_pages: int,
    limit_tokens: int,
    n_step_tokens: int | None = None,
) -> int:
    """Most tokens that one request can have when it has the pool for itself but for reserved_expert_pages (loading
    buffers, experts that may not leave), up to limit_tokens; n_step_tokens: the most that a step writes, where layers
    with a window may give pages back meanwhile."""
    reserved = 0 if layout.expert is None else reserved_expert_pages * layout.expert.page_bytes
    usable = (
        pool_bytes // layout.huge_bytes * layout.huge_bytes - reserved - layout.huge_bytes * (layout.ssm is not None)
    )
    low, high = 0, limit_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if request_bytes(layout, middle, n_step_tokens) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def piece_lengths(longest: int, most_sequences: int, is_given: bool) -> list[int]:
    """Tokens of a step to try, the most first, until weights, scratch and pool fit in the budget together: halves, down
    to what all sequences need for one token each. Only `longest` where the user gave it."""
    lengths = [longest]
    while not is_given and lengths[-1] // 2 >= max(LEAST_STEP_TOKENS, most_sequences):
        lengths.append(lengths[-1] // 2)
    return lengths


def n_resident_experts(asked: int | float, n_experts: int) -> int:
    """A number of experts from a number or a share. Raises BadInputError where the model has fewer."""
    if isinstance(asked, float):
        return round(asked * n_experts)
    if asked > n_experts:
        raise BadInputError(f"{asked} resident experts were asked for, the model has {n_experts}")
    return asked


def staying_experts(layout: ExpertLayout | None, quotas: list[int] | None, offload_limit: int | None) -> list[int]:
    """Experts by layer slot that never leave the pool for a request: a fixed number, or those beyond the most that may
    be absent, counted where they are largest."""
    if layout is None:
        return []
    if quotas is not None:
        return quotas
    n_left = 0 if offload_limit is None else max(0, layout.n_experts - offload_limit)
    staying = [0] * len(layout.layers)
    for slot in sorted(range(len(staying)), key=lambda slot: -layout.layers[slot].n_pages):
        staying[slot] = min(n_left, layout.layers[slot].n_experts)
        n_left -= staying[slot]
    return staying


def check_context(config: EngineConfig, longest: int, memory_bytes: int, file_context: int, n_staying: int = 0) -> int:
    """The context to serve; n_staying experts leave no room for it. Raises NotEnoughMemoryError where what was asked
    for, or any useful one, does not fit."""
    asked = config.context
    needed = asked if asked is not None else min(MIN_CONTEXT_TOKENS, file_context)
    if longest < needed:
        beside, wishes = beside_staying(config, n_staying)
        wishes += ["a smaller --ctx"] * (asked is not None)
        raise NotEnoughMemoryError(
            f"with {human_bytes(memory_bytes)} of memory the pool holds requests of at most {longest} tokens{beside}, "
            f"{needed} are wanted; give more --memory" + "".join(f" or {wish}" for wish in wishes)
        )
    return asked if asked is not None else longest


def beside_staying(config: EngineConfig, n_staying: int) -> tuple[str, list[str]]:
    """(what else the pool holds, what to do about it), where experts stay that a request would need the pages of."""
    if not n_staying:
        return "", []
    if config.resident_experts is not None or config.policy == "fixed":
        return f" beside the {n_staying} experts that stay", ["fewer --resident-experts"]
    if config.policy == "static":
        return f" beside the {n_staying} experts that stay with --policy static", ["another --policy"]
    limit = f"--expert-offload-limit {config.expert_offload_limit}"
    return f" beside the {n_staying} experts that may not leave ({limit})", ["a higher --expert-offload-limit"]


def ram_bytes(config: EngineConfig) -> int:
    """Host memory that experts outside the device may take: --ram, or most of what is free."""
    return int(psutil.virtual_memory().available * AUTO_RAM_SHARE) if config.ram is None else int(config.ram)


def snapshot_ram_bytes(config: EngineConfig, device: str, layout: PoolLayout) -> int:
    """Of `ram_bytes`: what states kept for reuse may take when they leave the pool. On the CPU the pool is RAM."""
    has_states = layout.ssm is not None or layout.conv is not None
    return int(ram_bytes(config) * SNAPSHOT_RAM_SHARE) if device != "cpu" and has_states and config.prefix_cache else 0


def swap_ram_bytes(config: EngineConfig, device: str) -> int:
    """Of `ram_bytes`: what requests that gave way may take. On the CPU none unless given: the pool is RAM itself."""
    if config.swap is not None:
        return int(config.swap)
    return 0 if device == "cpu" else min(MAX_SWAP_BYTES, int(ram_bytes(config) * SWAP_RAM_SHARE))


def whole_granules(n_bytes: int, device: str) -> int:
    """What of n_bytes a device can map: memory comes in granules, and a last one in part would exceed the budget."""
    return n_bytes - n_bytes % GRANULE_BYTES if device == "cuda" else n_bytes


def pool_limit_bytes(memory_bytes: int, memory_is_given: bool) -> int:
    """What the pool may grow to by resizing: twice a budget that was given, within what the machine has."""
    limit = 2 * memory_bytes if memory_is_given else memory_bytes
    return max(min(limit, psutil.virtual_memory().total), MIB)


def dense_tensor_bytes(gguf: GgufFile, config: ModelConfig) -> int:
    """Bytes of the tensors that stay resident: all of the trunk's but the experts'."""
    experts = {projection.tensor for layer in expert_tensors(config).values() for projection in layer}
    trunk = {layer.index for layer in config.layers}

    def is_trunk(name: str) -> bool:
        parts = name.split(".")
        return parts[0] != "blk" or int(parts[1]) in trunk

    return sum(info.n_bytes for name, info in gguf.tensors.items() if name not in experts and is_trunk(name))
