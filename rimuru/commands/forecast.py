"""Forecasts of speed: before loading from bytes and rates (a card's by the simulator), afterwards from timed steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rimuru.arch.common import Gguf
from rimuru.arch.registry import read_config
from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import MIB, human_bytes, plain_number
from rimuru.inspect import dense_weight_bytes
from rimuru.llm import LLM
from rimuru.memory.planner import plan_layout
from rimuru.simulate.cards import Card, as_used
from rimuru.simulate.model_cost import model_cost
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.timing import StepLoad, TimeModel, Ways
from rimuru.simulate.traces import TraceRequest

SAMPLE_BYTES = 48 * MIB
"""Read by each thread: more than caches hold."""
N_STEPS = 5
MOST_SECONDS = 2.0
STREAMS = (1, 8)
SHORT_TOKENS, ANSWER_TOKENS, PROMPT_TOKENS = 128, 65, 512
"""Of the prompts and answers whose speed is forecast, and of the prompt."""


def memory_read_rate(n_threads: int) -> float:
    """Bytes per second that n threads read from RAM together, measured now (a tenth of a second)."""
    blocks = [np.ones(SAMPLE_BYTES // 8) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as threads:
        best_s = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            list(threads.map(np.sum, blocks))
            best_s = min(best_s, time.perf_counter() - started)
    return SAMPLE_BYTES * n_threads / best_s


def before_loading(report: Mapping[str, Any], n_threads: int) -> dict[str, Any]:
    """For `rimuru inspect` on a CPU: tokens per second of one request if reading the weights from RAM were all the
    work, with every expert resident; the step's computing and experts that come from the file make it less.

    Keys: bytes_per_token, memory_bytes_per_s, tokens_per_s (None where the memory holds no page of the pool).
    """
    n_bytes = sum(report["bytes_per_token"].values())
    rate = memory_read_rate(n_threads)
    runs = n_bytes > 0 and report["fits"]["huge_pages"] != 0 and report.get("starts", True)
    return {"bytes_per_token": n_bytes, "memory_bytes_per_s": rate, "tokens_per_s": rate / n_bytes if runs else None}


def before_loading_text(forecast: Mapping[str, Any]) -> str:
    """One line of the report."""
    if forecast["tokens_per_s"] is None:
        return "  forecast    none: the model does not fit"
    return (
        f"  forecast    at most {plain_number(forecast['tokens_per_s'])} tokens per second for one request on this CPU "
        f"({human_bytes(forecast['bytes_per_token'])} per token, memory read at "
        f"{forecast['memory_bytes_per_s'] / 1e9:.1f} GB/s now), less while experts come from the file"
    )


def on_card(
    gguf: Gguf,
    card: Card,
    memory_bytes: int,
    scratch_bytes: int,
    kv_element_bytes: int,
    ram_bytes: int | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """For `rimuru inspect` on a card: what answers to STREAMS prompts at once, and one prompt of PROMPT_TOKENS, would
    take, by the control plane and the time model of `rimuru simulate` with a synthetic router.

    asked: further settings (policy, resident_experts and the like).
    Keys: card, memory_bytes_per_s, link_bytes_per_s, tokens_per_s {"1": x, "8": y} (all streams together), hit_rate of
    one stream, prefill_tokens_per_s {"512": z}; the last three are empty or None where the model does not fit.
    """
    found: dict[str, Any] = {
        "card": card.name, "memory_bytes_per_s": card.memory_bytes_per_s, "link_bytes_per_s": card.pcie_gbps * 1e9,
        "tokens_per_s": {}, "hit_rate": None, "prefill_tokens_per_s": {},
    }  # fmt: skip
    settings = Settings(
        memory_bytes, as_used(card), scratch_bytes=scratch_bytes, kv_element_bytes=kv_element_bytes,
        ram_bytes=ram_bytes, **asked,
    )  # fmt: skip
    is_moe = bool(read_config(gguf).moe_layers)
    try:
        for n in STREAMS:
            rate, hit_rate = _with_experts(gguf, settings, n) if is_moe else _without_experts(gguf, settings, n, 1)
            found["tokens_per_s"][str(n)] = rate
            if found["hit_rate"] is None:
                found["hit_rate"] = hit_rate
        if is_moe:
            prompt = Simulation(gguf, settings).run([TraceRequest(0.0, PROMPT_TOKENS, 1)]).values
            rate = PROMPT_TOKENS / prompt["ttft_s"]["p50"]
        else:
            rate, _ = _without_experts(gguf, settings, 1, PROMPT_TOKENS)
        found["prefill_tokens_per_s"][str(PROMPT_TOKENS)] = rate
    except NotEnoughMemoryError:
        pass  # the report says so
    return found


def _with_experts(gguf: Gguf, settings: Settings, n_streams: int) -> tuple[float, float]:
    """(tokens per second of answers, hit rate). Prompts count where some answers wait for others to end."""
    trace = [TraceRequest(0.0, SHORT_TOKENS, ANSWER_TOKENS) for _ in range(n_streams)]
    values = Simulation(gguf, settings).run(trace).values
    first_s = values["ttft_s"]["p50"] if values["peak_concurrency"] == n_streams else 0.0
    return n_streams * (ANSWER_TOKENS - 1) / (values["makespan_s"] - first_s), float(values["hit_rate"])


def _without_experts(gguf: Gguf, settings: Settings, n_streams: int, n_tokens: int) -> tuple[float, None]:
    """(tokens per second of steps with n_tokens of each stream, None). Everything is resident, or nothing runs."""
    config = read_config(gguf)
    layout = plan_layout(config, gguf, settings.kv_element_bytes)
    left = settings.memory_bytes - dense_weight_bytes(config, gguf.tensors) - settings.scratch_bytes
    if left < layout.huge_bytes:
        raise NotEnoughMemoryError("the weights do not fit")
    none, n = np.zeros(len(config.layers)), n_streams * n_tokens
    load = StepLoad(n, n_streams, n_streams * max(SHORT_TOKENS, n_tokens // 2), n_streams, none, none, none, 0.0)
    step_s = TimeModel(model_cost(config, gguf.tensors, layout), settings.card, Ways()).step(load).step_s
    return n / step_s, None


def on_card_text(forecast: Mapping[str, Any]) -> str:
    """Two lines of the report."""
    how = "measured now" if forecast["is_measured"] else "not measured"
    lines = [
        f"  card        {forecast['card']}, {how}: memory {forecast['memory_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"link {forecast['link_bytes_per_s'] / 1e9:.0f} GB/s"
    ]
    if not forecast["prefill_tokens_per_s"]:
        return "\n".join([*lines, "  forecast    none: the model does not fit"])
    streams = ", ".join(f"{rate:,.0f} for {n} at once" for n, rate in forecast["tokens_per_s"].items())
    prompts = ", ".join(f"{rate:,.0f} of a prompt of {n}" for n, rate in forecast["prefill_tokens_per_s"].items())
    hits = "" if forecast["hit_rate"] is None else f"; {forecast['hit_rate']:.0%} of one answer's experts are resident"
    return "\n".join([*lines, f"  forecast    tokens per second: {streams}; {prompts}{hits}"])


def after_loading(llm: LLM) -> str:
    """One line: what single steps take now, each with another token, so that experts are brought as they will be."""
    engine = llm.loaded.engine
    n_steps = min(N_STEPS, engine.context_length)
    ids = [(7919 * (i + 1)) % engine.n_vocab for i in range(n_steps)]
    times, started = [], time.perf_counter()
    before = started
    for _ in llm.score(ids, chunk=1):
        now = time.perf_counter()
        times.append(now - before)
        before = now
        if now - started > MOST_SECONDS:
            break
    step_s = statistics.median(times)
    return (
        f"forecast: about {plain_number(1 / step_s)} tokens per second for one short request "
        f"({len(times)} single steps took {plain_number(step_s * 1e3)} ms each in the middle)"
    )
