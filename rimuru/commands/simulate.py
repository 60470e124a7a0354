"""rimuru simulate: what a machine would do with a trace, computed with the real control plane and a time model."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from collections import Counter
from pathlib import Path

from rimuru.arch.common import Gguf
from rimuru.arch.registry import read_config
from rimuru.arch.shapes import ShapeGguf
from rimuru.base.errors import BadInputError
from rimuru.base.units import human_bytes, parse_bytes
from rimuru.commands.common import checked_config, print_json, seed_of, warn_of_fixed, warn_of_idle
from rimuru.commands.planned import planned_model
from rimuru.config import parse_share
from rimuru.engine.build import ELEMENT_BYTES
from rimuru.engine.resolve import n_resident_experts
from rimuru.simulate.cards import RATES, Card, card_named
from rimuru.simulate.report import Result, write_plot
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from rimuru.simulate.traces import cut_to_context, read_trace

log = logging.getLogger(__name__)


def simulate(args: argparse.Namespace) -> int:
    """Run the trace, print the report, write the plot."""
    check_options(args)
    settings = settings_of(args)
    with planned_model(args.model, args.quant) as gguf:  # first: a wrong name is named first
        trace = read_trace(args.trace, args.requests, args.stretch, args.rate, seed_of(args))
        context_tokens = context_of(gguf, args.ctx)
        trace, n_cut = cut_to_context(trace, context_tokens)
        if n_cut:
            what = f"{n_cut:,} of {len(trace):,} requests were longer than the context"
            log.warning("%s of %d tokens and are cut to it", what, context_tokens)
        quant = quant_of(gguf, args.quant)
        simulation = Simulation(gguf, settings)
        experts = simulation.layout.expert
        if settings.resident_experts is not None and experts is not None:
            n_resident_experts(settings.resident_experts, experts.n_experts)  # refuses more than there are
        result = simulation.run(trace)
    layout = simulation.layout
    if args.plot:
        kinds = ("expert", "kv", "ssm", "conv")
        write_plot({args.policy: result}, {kind: layout.page_bytes(kind) for kind in kinds}, args.plot)  # type: ignore[arg-type]
    if args.json:
        print_json(describe(args, settings, quant) | result.as_dict(timeline=not args.no_timeline))
    else:
        print(f"{settings.card.name}, {human_bytes(settings.memory_bytes)}: " + format_result(result))
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Raises BadInputError for numbers out of their ranges, and for what cannot be simulated."""
    for name, least in (
        ("requests", 1), ("max_step_tokens", 1), ("max_sequences", 1), ("topics", 1), ("buffer_experts", 0)
    ):  # fmt: skip
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise BadInputError(f"--{name.replace('_', '-')} must be at least {least}")
    for name in ("stretch", "rate"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            raise BadInputError(f"--{name.replace('_', '-')} must be more than 0, and finite")
    if args.device == "cpu":
        raise BadInputError("simulate knows the rates of cards (--card), not of CPUs; leave out --device")
    config = checked_config(args)  # refuses as `run` does
    warn_of_fixed(config)
    given = {
        "--swap": config.swap is not None,
        "--threads": config.threads is not None,
        "--deterministic": config.deterministic,
        "--cpu-experts": config.cpu_experts,
    }
    warn_of_idle(given, "in a simulation")


def context_of(gguf: Gguf, asked_tokens: int | None) -> int:
    """Tokens that a request may have: as many as the model's context has, or --ctx, which may be less."""
    longest = read_config(gguf).context_length
    if asked_tokens is not None and asked_tokens > longest:
        raise BadInputError(f"--ctx {asked_tokens} is more than the model's context of {longest} tokens")
    return asked_tokens or longest


def quant_of(gguf: Gguf, shape_quant: str) -> str:
    """What a shape was given, or the formats that have a hundredth or more of a file's bytes, the most first."""
    if isinstance(gguf, ShapeGguf):
        return shape_quant
    n_bytes: Counter[str] = Counter()
    for info in gguf.tensors.values():
        n_bytes[info.format.name] += info.n_bytes
    return "/".join(name for name, n in n_bytes.most_common() if 100 * n >= sum(n_bytes.values()))


def settings_of(args: argparse.Namespace) -> Settings:
    """Settings of the command line."""
    card = card_named(args.card, {name: getattr(args, name) for name in RATES})
    if args.memory is None:
        raise BadInputError("give the memory of the simulated device with --memory, e.g. 24GiB")
    return Settings(
        memory_bytes=parse_bytes(args.memory),
        card=card,
        policy="cost" if args.policy == "auto" else args.policy,
        residency=args.residency,
        resident_experts=None if args.resident_experts is None else parse_share(args.resident_experts),
        expert_offload_limit=args.expert_offload_limit,
        admission=args.admission,
        max_step_tokens=args.max_step_tokens,
        max_sequences=args.max_sequences,
        buffer_experts=args.buffer_experts,
        scratch_bytes=parse_bytes(args.scratch),
        ram_bytes=None if args.ram is None else parse_bytes(args.ram),
        kv_element_bytes=ELEMENT_BYTES["f16" if args.kv_type == "auto" else args.kv_type],
        fill_on_read=args.fill_on_read,
        ways=Ways(args.in_place, args.prefetch, bool(args.prediction)),
        router=args.router,
        n_topics=args.topics,
        seed=seed_of(args),
        audit=args.audit,
    )


def describe(args: argparse.Namespace, settings: Settings, quant: str) -> dict[str, object]:
    """What was simulated, for the report."""
    card: Card = settings.card
    return {
        "model": args.model,
        "quant": quant,
        "trace": Path(args.trace).name,
        "routing": f"synthetic ({settings.router})",
        "policy": settings.policy,
        "residency": settings.residency,
        "admission": settings.admission,
        "memory_bytes": settings.memory_bytes,
        "card": dataclasses.asdict(card),
        "seed": args.seed or 0,
    }


def format_result(result: Result) -> str:
    """The report for people."""
    v = result.values
    lines = [
        f"{v['requests']} requests in {v['steps']} steps, {v['makespan_s']:.2f} s "
        f"({v['output_tokens_per_second']:.0f} tokens of answers per second)",
        f"concurrency: peak {v['peak_concurrency']}, mean {v['mean_concurrency']:.1f}; preemptions {v['preemptions']}",
    ]
    for key, what, factor, unit in (
        ("ttft_s", "time to first token", 1.0, "s"),
        ("tpot_s", "time per token", 1e3, "ms"),
        ("latency_s", "time to last token", 1.0, "s"),
    ):
        mean, p50, p95 = (v[key][name] * factor for name in ("mean", "p50", "p95"))
        lines.append(f"{what}: mean {mean:.2f} {unit}, median {p50:.2f}, 95th percentile {p95:.2f}")
    lines.append(
        f"experts: hit rate {v['hit_rate']:.3f}, {human_bytes(v['bytes_moved'])} over the link, "
        f"{v['resident_experts_at_end']} resident at the end"
    )
    return "\n".join(lines)
