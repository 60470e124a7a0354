"""rimuru simulate: what a machine would do with a trace, computed with the real control plane and a time model."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rimuru.base.errors import BadInputError
from rimuru.base.units import human_bytes, parse_bytes
from rimuru.commands.common import print_json, seed_of
from rimuru.commands.planned import planned_model
from rimuru.config import parse_share
from rimuru.engine.build import ELEMENT_BYTES
from rimuru.simulate.cards import RATES, Card, card_named
from rimuru.simulate.report import Result, write_plot
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import Ways
from rimuru.simulate.traces import read_trace


def simulate(args: argparse.Namespace) -> int:
    """Run the trace, print the report, write the plot."""
    for name in ("requests", "max_step_tokens", "max_sequences", "topics"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadInputError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("stretch", "rate"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise BadInputError(f"--{name.replace('_', '-')} must be more than 0")
    settings = settings_of(args)
    with planned_model(args.model, args.quant) as gguf:  # first: a wrong name is named first
        trace = read_trace(args.trace, args.requests, args.stretch, args.rate, seed_of(args))
        simulation = Simulation(gguf, settings)
        result = simulation.run(trace)
    layout = simulation.layout
    if args.plot:
        kinds = ("expert", "kv", "ssm", "conv")
        write_plot({args.policy: result}, {kind: layout.page_bytes(kind) for kind in kinds}, args.plot)  # type: ignore[arg-type]
    if args.json:
        print_json(describe(args, settings) | result.as_dict(timeline=not args.no_timeline))
    else:
        print(format_result(result))
    return 0


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


def describe(args: argparse.Namespace, settings: Settings) -> dict[str, object]:
    """What was simulated, for the report."""
    card: Card = settings.card
    return {
        "model": args.model,
        "quant": args.quant,
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
