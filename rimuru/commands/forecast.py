"""Forecasts of speed: before loading from bytes and a measured memory rate, afterwards from a few timed steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rimuru.base.units import MIB, human_bytes
from rimuru.llm import LLM

SAMPLE_BYTES = 48 * MIB
"""Read by each thread: more than caches hold."""
N_STEPS = 5
MOST_SECONDS = 2.0


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

    Keys: bytes_per_token, memory_bytes_per_s, tokens_per_s.
    """
    n_bytes = sum(report["bytes_per_token"].values())
    rate = memory_read_rate(n_threads)
    return {"bytes_per_token": n_bytes, "memory_bytes_per_s": rate, "tokens_per_s": rate / n_bytes if n_bytes else None}


def before_loading_text(forecast: Mapping[str, Any]) -> str:
    """One line of the report."""
    return (
        f"  forecast    at most {forecast['tokens_per_s']:.3g} tokens per second for one request on this CPU "
        f"({human_bytes(forecast['bytes_per_token'])} per token, memory read at "
        f"{forecast['memory_bytes_per_s'] / 1e9:.1f} GB/s now), less while experts come from the file"
    )


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
        f"forecast: about {1 / step_s:.3g} tokens per second for one short request "
        f"({len(times)} single steps took {step_s * 1e3:.3g} ms each in the middle)"
    )
