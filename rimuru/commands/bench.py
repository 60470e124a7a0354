"""rimuru bench: prefill and decode rates of a model on this machine, as JSON or a table."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from rimuru.arch.registry import read_config
from rimuru.arch.spec import ModelConfig, MoeSpec
from rimuru.base.errors import BadInputError
from rimuru.base.units import ceil_div
from rimuru.commands.common import note, open_llm, print_json, seed_of
from rimuru.commands.planned import planned_model
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.replay import RoutingReplay, check_readable, load_recording, record_router
from rimuru.experts.routing import SyntheticRouter, router_for, router_name
from rimuru.llm import LLM
from rimuru.request import SamplingParams, Sequence

PROMPT_TOKENS = 64
"""Prompt of each stream in the decode measurements."""

MIN_STREAMS = 32
"""Synthetic streams are made for so many sequences at least, so that repeats do not meet the same ones."""


def bench(args: argparse.Namespace) -> int:
    """Measure and print. Prompts are random token ids; answers are sampled at temperature 1 and never end early."""
    longest = max(max(args.prefill, default=1) + 1, PROMPT_TOKENS + args.new)
    most = max(args.streams, default=1)
    tokens = PROMPT_TOKENS + args.new
    check_routing(args.model, args.routing, args.router, args.topics, tokens)

    def check(llm: LLM) -> None:
        if longest > llm.context_length:
            raise BadInputError(f"the benchmark needs a context of {longest} tokens, {llm.context_length} fit")

    with open_llm(args, check, max_sequences=most, prefix_cache=False) as llm:
        if not args.quiet:
            note("warming up (the first run on a machine compiles kernels)")
        use_routing(llm, args.routing, args.router, args.topics, most, tokens, seed_of(args))
        result = measure(llm, args.prefill, args.streams, args.new, args.repeats, seed_of(args))
    if args.json:
        print_json(result)
    else:
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            for size, rate in result[key].items():
                print(f"{key.split('_')[0]:8} {size:>6}  {rate:10.1f} tokens per second")
        print(f"hit rate {result['hit_rate']:.3f}, {result['bytes_over_link_per_token']:.0f} bytes read per token")
        print(f"routing: {result['routing']}")
    return 0


def check_routing(model: str, routing: str, router: str, n_topics: int | None, n_tokens: int) -> None:
    """Raises BadInputError for what `use_routing` would refuse, from the model's headers: before its weights are
    loaded; and for options that it would not look at."""
    if routing != "synthetic" and (router != "auto" or n_topics is not None):
        option = "--router" if router != "auto" else "--topics"
        raise BadInputError(f"{option} is of the synthetic router, which --routing {routing} does not use")
    if routing == "model":
        return
    router_name(0, router)  # a wrong name, whatever the model
    if routing != "synthetic":
        check_readable(Path(routing))
    with planned_model(model, "") as gguf:
        shape = _expert_shape(read_config(gguf), routing)
    if routing != "synthetic":
        load_recording(Path(routing), *shape, n_tokens)


def _expert_shape(config: ModelConfig, routing: str) -> tuple[int, int, int]:
    """(layers with experts, experts of each, of which a token uses so many)."""
    specs = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoeSpec)]
    shapes = {(spec.n_experts, spec.top_k) for spec in specs}
    if len(shapes) != 1:
        raise BadInputError(f"--routing {routing} needs a model whose layers of experts are alike")
    return len(specs), *shapes.pop()


def use_routing(
    llm: LLM, routing: str, router: str, n_topics: int | None, n_streams: int, n_tokens: int, seed: int
) -> None:
    """Put a synthetic (`synthetic`) or recorded (a file) routing in place of the router's choices, or none (`model`),
    from now on.

    Synthetic streams are made for n_streams at a time of n_tokens tokens each. Raises BadInputError for a model without
    experts or a recording that is not of its shape.
    """
    loaded = llm.loaded
    loaded.engine.replay = None
    if routing == "model":
        return
    n_layers, n_experts, top_k = _expert_shape(loaded.config, routing)
    if routing == "synthetic":
        name = router_name(n_experts, router)
        made = SyntheticRouter(n_layers, n_experts, top_k, router_for(n_experts, name), seed, n_topics)
        n_made = ceil_div(max(2 * n_streams, MIN_STREAMS), n_topics or 1) * (n_topics or 1)
        label = f"synthetic {name}" + (f", {n_topics} topics" if n_topics else "")
        recording = record_router(made, n_made, n_tokens, label)
    else:
        recording = load_recording(Path(routing), n_layers, n_experts, top_k, n_tokens)
    foretells = isinstance(loaded.store, DeviceExpertStore) and "ahead" in loaded.store.ways
    loaded.engine.replay = RoutingReplay(recording, foretells)


def routing_label(llm: LLM) -> str:
    """Whose routing the engine follows; for results."""
    replay = llm.loaded.engine.replay
    return "model" if replay is None else replay.recording.source


def measure(llm: LLM, prefill: list[int], streams: list[int], n_new: int, n_repeats: int, seed: int) -> dict[str, Any]:
    """Medians over n_repeats; keys as design section 7 lists them."""
    rng = np.random.default_rng(seed)
    _prefill_rate(llm, rng, max(min(prefill, default=PROMPT_TOKENS), 2))
    _decode_rate(llm, rng, 1, 4)
    before = counters(llm)
    prefill_rates = {str(n): statistics.median(_prefill_rate(llm, rng, n) for _ in range(n_repeats)) for n in prefill}
    middle = counters(llm)
    decode_rates = {
        str(n): statistics.median(_decode_rate(llm, rng, n, n_new) for _ in range(n_repeats)) for n in streams
    }
    after = counters(llm)
    n_decoded = n_repeats * sum(n * (PROMPT_TOKENS + n_new) for n in streams)
    asked = after[0] - middle[0]
    loaded = llm.loaded
    return {
        "model": str(loaded.gguf.path),
        "architecture": loaded.config.architecture,
        "device": loaded.resolved.device,
        "threads": loaded.resolved.threads,
        "memory_bytes": llm.memory()["total_bytes"],
        "routing": routing_label(llm),
        "prefill_tokens_per_second": prefill_rates,
        "decode_tokens_per_second": decode_rates,
        "hit_rate": (after[1] - middle[1]) / asked if asked else 1.0,
        "bytes_over_link_per_token": (after[2] - middle[2]) / max(n_decoded, 1),
        "bytes_read": after[2] - before[2],
        "resident_experts": sum(llm.memory()["resident_experts"]),
    }


def counters(llm: LLM) -> tuple[int, int, int]:
    """(experts asked for, found resident, bytes read) since the start."""
    store = llm.loaded.store
    if store is None:
        return 0, 0, 0
    store.catch_up()
    return store.counters.n_asked, store.counters.n_hits, store.counters.read_bytes


def _random_prompt(llm: LLM, rng: np.random.Generator, n_tokens: int) -> list[int]:
    return rng.integers(0, llm.loaded.engine.n_vocab, n_tokens).tolist()


def _prefill_rate(llm: LLM, rng: np.random.Generator, n_tokens: int) -> float:
    """Prompt tokens per second until the first token of the answer is there."""
    engine = llm.loaded.engine
    prompt = _random_prompt(llm, rng, n_tokens)
    started = time.perf_counter()
    engine.run_until([engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))])
    return n_tokens / (time.perf_counter() - started)


def _decode_rate(llm: LLM, rng: np.random.Generator, n_streams: int, n_new: int) -> float:
    """Tokens per second of all streams together, from when the last one has its first token."""
    engine = llm.loaded.engine
    params = SamplingParams(max_tokens=n_new, temperature=1.0, ignore_eos=True)
    sequences: list[Sequence] = [engine.add(_random_prompt(llm, rng, PROMPT_TOKENS), params) for _ in range(n_streams)]
    while any(s.n_output == 0 for s in sequences):
        engine.step()
    done = sum(s.n_output for s in sequences)
    started = time.perf_counter()
    engine.run_until(sequences)
    return (sum(s.n_output for s in sequences) - done) / (time.perf_counter() - started)
