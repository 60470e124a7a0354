"""rimuru inspect: what a model is, what fits on a CPU or a card, and how fast it will be, from its headers alone."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import psutil

import rimuru.ops as backends
from rimuru.arch.common import Gguf
from rimuru.arch.registry import read_config
from rimuru.arch.spec import ModelConfig
from rimuru.base.errors import BadInputError
from rimuru.base.units import GIB, human_bytes, parse_bytes
from rimuru.commands.common import checked_config, print_json, warn_of_fixed
from rimuru.commands.forecast import before_loading, before_loading_text, on_card, on_card_text
from rimuru.commands.planned import planned_model
from rimuru.config import EngineConfig, parse_share
from rimuru.engine.build import ELEMENT_BYTES, FIXED_SHARE
from rimuru.engine.resolve import (
    AUTO_RAM_SHARE,
    CPU_STEP_TOKENS,
    CUDA_STEP_TOKENS,
    MAX_SEQUENCES,
    MIN_CONTEXT_TOKENS,
    available_threads,
    beside_staying,
    check_file_context,
    longest_request,
    n_resident_experts,
    piece_lengths,
    staying_experts,
)
from rimuru.engine.stores import wave_buffers
from rimuru.experts.store import even_quotas, pages_of
from rimuru.inspect import dense_weight_bytes, estimate_scratch_bytes, format_report, inspect_model
from rimuru.memory.planner import plan_layout
from rimuru.memory.specs import ExpertLayout, PoolLayout
from rimuru.simulate.cards import CARDS, RATES, Card, card_named

DEFAULT_CARD = "rtx5090"


def inspect(args: argparse.Namespace) -> int:
    """Print the plan for a model file or a published model, also for one that cannot run yet, or for a card that is not
    here."""
    config = checked_config(args)
    warn_of_fixed(config)
    rates = {name: getattr(args, name) for name in RATES}
    is_asked = args.card is not None or any(rate is not None for rate in rates.values())
    device, free_bytes = planned_device(args.device, is_asked)
    if args.card is not None and device == "cuda":  # planned for as a whole, also where another card is here
        free_bytes = int(card_named(args.card, rates).memory_gib * GIB)
    if args.memory is None and free_bytes is None:
        raise BadInputError(
            "there is no card here to ask: name one, e.g. --card rtx4090, or say how much memory it has, e.g. "
            "--memory 24GiB"
        )
    memory = parse_bytes(args.memory) if args.memory else int((free_bytes or 0) * AUTO_RAM_SHARE)
    element = ("f16" if device == "cuda" else "f32") if args.kv_type == "auto" else args.kv_type
    with planned_model(args.model, args.quant) as gguf:
        report = planned_report(gguf, config, device, ELEMENT_BYTES[element], memory)
        if device == "cuda":
            card, is_measured = planned_card(args.card, rates, is_here=args.card is None and _card_is_here())
            ram = None if args.ram is None else parse_bytes(args.ram)
            asked = {
                "policy": "cost" if config.policy == "auto" else config.policy, "residency": config.residency,
                "resident_experts": config.resident_experts, "expert_offload_limit": config.expert_offload_limit,
            }  # fmt: skip
            forecast = on_card(gguf, card, memory, report["bytes"]["scratch"], ELEMENT_BYTES[element], ram, **asked)
            forecast["is_measured"] = is_measured
            text = on_card_text(forecast)
        else:
            forecast = before_loading(report, args.threads or available_threads())
            text = before_loading_text(forecast)
    if args.json:
        print_json({**report, "forecast": forecast})
    else:
        print(format_report(report) + "\n" + text)
    return 0


def planned_report(
    gguf: Gguf, config: EngineConfig, device: str, element_bytes: int, memory_bytes: int
) -> dict[str, Any]:
    """The report of inspect_model for what is asked for, with `starts`: whether the engine would, and a note where not.
    As the engine does, it runs prompts in shorter pieces where their scratch would leave too little to the pool.

    Raises BadInputError for more experts than the model has, or a longer context."""
    model = read_config(gguf)
    check_file_context(config, model)
    layout = plan_layout(model, gguf, element_bytes)
    left_bytes = memory_bytes - dense_weight_bytes(model, gguf.tensors)
    needed = config.context or min(MIN_CONTEXT_TOKENS, model.context_length)

    def starts(scratch_bytes: int, n_tokens: int) -> bool:
        pool_bytes = max(0, left_bytes - scratch_bytes)
        reserved = reserved_pages(model, layout, config, device, pool_bytes)
        return longest_request(layout, pool_bytes, reserved, needed, n_tokens) >= needed

    step_tokens = min(CUDA_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS, model.context_length)
    for n_tokens in piece_lengths(step_tokens, MAX_SEQUENCES, False):
        scratch = estimate_scratch_bytes(model, max(n_tokens, MAX_SEQUENCES))
        if (does_start := starts(scratch, n_tokens)) and 3 * scratch <= left_bytes:
            break
    kept = kept_experts(config, layout.expert, max(0, left_bytes - scratch))
    report = inspect_model(gguf, element_bytes, memory_bytes, scratch, kept, config.context)
    report["starts"] = does_start
    if not does_start:
        beside, wishes = beside_staying(config, sum(staying(config, layout.expert, max(0, left_bytes - scratch))))
        wishes += ["a smaller --ctx"] * (config.context is not None)
        report["notes"].append(
            f"it would not start: {human_bytes(memory_bytes)} hold no request of {needed} tokens{beside}; give "
            + " or ".join(["more --memory", *wishes])
        )
    return report


def reserved_pages(model: ModelConfig, layout: PoolLayout, config: EngineConfig, device: str, pool_bytes: int) -> int:
    """Expert pages that requests never get: of experts that stay, and on a CPU loading buffers."""
    experts = layout.expert
    if experts is None:
        return 0
    buffers = wave_buffers(model, experts, pool_bytes) if device == "cpu" else 0
    return buffers * experts.max_pages + pages_of(experts, staying(config, experts, pool_bytes))


def staying(config: EngineConfig, experts: ExpertLayout | None, pool_bytes: int) -> list[int]:
    """See staying_experts."""
    kept = kept_experts(config, experts, pool_bytes)
    quotas = None if experts is None or kept is None else even_quotas(experts, kept)
    return staying_experts(experts, quotas, config.expert_offload_limit)


def kept_experts(config: EngineConfig, experts: ExpertLayout | None, pool_bytes: int) -> int | None:
    """How many experts stay where their number is fixed, as the engine counts them; None where it decides."""
    if experts is None:
        return None
    if config.resident_experts is not None:
        return n_resident_experts(parse_share(config.resident_experts), experts.n_experts)
    if config.policy == "fixed":
        expert_bytes = experts.n_pages * experts.page_bytes / experts.n_experts
        return min(experts.n_experts, int(FIXED_SHARE * pool_bytes / expert_bytes))
    return experts.n_experts if config.policy == "static" else None


def planned_device(asked: str, names_card: bool) -> tuple[str, int | None]:
    """("cuda" or "cpu", its free bytes; None where no card is here). A card that is named, or whose rates are given, is
    planned for wherever this runs."""
    if asked != "cpu":
        device, free_bytes, _ = backends.choose("auto")
        if device == "cuda" or asked == "cuda" or names_card:
            return "cuda", free_bytes
    return "cpu", psutil.virtual_memory().available


def _card_is_here() -> bool:
    return backends.choose("auto")[0] == "cuda"


def planned_card(name: str | None, rates: dict[str, float | None], is_here: bool) -> tuple[Card, bool]:
    """(the card to plan for, whether its memory and link were measured now): given rates go before measured ones."""
    if not is_here:
        return card_named(name or DEFAULT_CARD, rates), False
    full_name, memory, link = backends.measured_rates()
    known = full_name.lower().replace(" ", "")
    base = next((key for key in CARDS if key.removeprefix("rtx") in known), DEFAULT_CARD)
    found: dict[str, float | None] = {"memory_gbps": memory / 1e9, "pcie_gbps": link / 1e9}
    found.update({key: rate for key, rate in rates.items() if rate is not None})
    return replace(card_named(base, found), name=full_name), True
