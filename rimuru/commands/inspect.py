"""rimuru inspect: what a model is, what fits on a CPU or a card, and how fast it will be, from its headers alone."""

from __future__ import annotations

import argparse
from dataclasses import replace

import psutil

import rimuru.ops as backends
from rimuru.arch.common import Gguf
from rimuru.arch.registry import read_config
from rimuru.base.errors import BadInputError
from rimuru.base.units import GIB, parse_bytes
from rimuru.commands.common import print_json
from rimuru.commands.forecast import before_loading, before_loading_text, on_card, on_card_text
from rimuru.commands.planned import planned_model
from rimuru.engine.build import ELEMENT_BYTES
from rimuru.engine.resolve import (
    AUTO_RAM_SHARE,
    CPU_STEP_TOKENS,
    CUDA_STEP_TOKENS,
    MAX_SEQUENCES,
    available_threads,
    piece_lengths,
)
from rimuru.inspect import dense_weight_bytes, estimate_scratch_bytes, format_report, inspect_model
from rimuru.simulate.cards import CARDS, RATES, Card, card_named

DEFAULT_CARD = "rtx5090"


def inspect(args: argparse.Namespace) -> int:
    """Print the plan for a model file or a published model, also for one that cannot run yet, or for a card that is not
    here."""
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
        scratch = planned_scratch_bytes(gguf, memory, CUDA_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS)
        if device == "cuda":
            report = inspect_model(gguf, ELEMENT_BYTES[element], memory, scratch)
            card, is_measured = planned_card(args.card, rates, is_here=args.card is None and _card_is_here())
            ram = None if args.ram is None else parse_bytes(args.ram)
            forecast = on_card(gguf, card, memory, scratch, ELEMENT_BYTES[element], ram) | {"is_measured": is_measured}
            text = on_card_text(forecast)
        else:
            report = inspect_model(gguf, ELEMENT_BYTES[element], memory, scratch)
            forecast = before_loading(report, args.threads or available_threads())
            text = before_loading_text(forecast)
    if args.json:
        print_json({**report, "forecast": forecast})
    else:
        print(format_report(report) + "\n" + text)
    return 0


def planned_scratch_bytes(gguf: Gguf, memory_bytes: int, step_tokens: int) -> int:
    """What the engine will take: prompts in shorter pieces where scratch would leave less than twice itself to the
    pool."""
    config = read_config(gguf)
    left_bytes = memory_bytes - dense_weight_bytes(config, gguf.tensors)
    lengths = piece_lengths(min(step_tokens, config.context_length), MAX_SEQUENCES, False)
    sizes = [estimate_scratch_bytes(config, max(n_tokens, MAX_SEQUENCES)) for n_tokens in lengths]
    return next((n_bytes for n_bytes in sizes if 3 * n_bytes <= left_bytes), sizes[-1])


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
