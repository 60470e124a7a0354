"""/metrics: the counters of the loop, the pool and the store for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from rimuru.server.loop import EngineLoop

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The server's own registry: several servers of one process do not meet."""

    def __init__(self, loop: EngineLoop) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "rimuru_time_to_first_token_seconds", "Request to first token", buckets=_SECONDS, registry=self.registry
        )
        self.request = Histogram(
            "rimuru_request_seconds", "Request to end of answer", buckets=_SECONDS, registry=self.registry
        )
        self._engine = _EngineCollector(loop)
        self.registry.register(self._engine)

    def text(self, report: dict[str, Any]) -> bytes:
        """The exposition text, with a memory report that was just made in the engine's thread."""
        self._engine.report = report
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.report: dict[str, Any] | None = None

    def describe(self) -> Iterator[Metric]:
        yield from ()

    def collect(self) -> Iterator[Metric]:
        loop, counters = self.loop, self.loop.counters
        scheduler = loop.engine.scheduler
        yield GaugeMetricFamily("rimuru_requests_running", "Answers being computed", len(scheduler.running))
        yield GaugeMetricFamily("rimuru_requests_waiting", "Answers waiting for their turn", len(scheduler.waiting))
        yield GaugeMetricFamily("rimuru_tokens_per_second", "Output tokens, last seconds", loop.tokens_per_second())
        outcomes = CounterMetricFamily("rimuru_requests", "Requests by how they ended", labels=["outcome"])
        for outcome in ("done", "failed", "cancelled", "refused"):
            outcomes.add_metric([outcome], getattr(counters, f"n_jobs_{outcome}"))
        yield outcomes
        for name, text, value in (
            ("rimuru_prompt_tokens", "Prompt tokens, once for each answer", counters.n_prompt_tokens),
            ("rimuru_cached_prompt_tokens", "Of them found in the prefix cache", counters.n_cached_tokens),
            ("rimuru_output_tokens", "Tokens generated", counters.n_output_tokens),
            ("rimuru_engine_steps", "Steps of the engine", counters.n_steps),
            ("rimuru_engine_failed_steps", "Steps that raised", counters.n_failed_steps),
            ("rimuru_engine_step_seconds", "Time spent in steps", counters.step_s),
            ("rimuru_preemptions", "Answers that gave way to older ones", scheduler.n_preemptions),
        ):
            yield CounterMetricFamily(name, text, value)
        if self.report is not None:
            yield from _memory_metrics(self.report)


def _memory_metrics(report: dict[str, Any]) -> Iterator[Metric]:
    pages = GaugeMetricFamily("rimuru_pool_pages", "Pages in use, by view", labels=["view"])
    used = GaugeMetricFamily("rimuru_pool_bytes", "Bytes in use, by view", labels=["view"])
    for name, view in report["views"].items():
        pages.add_metric([name], view["pages"])
        used.add_metric([name], view["bytes"])
    yield pages
    yield used
    held = sum(request["pages"] for request in report["requests"])
    yield GaugeMetricFamily("rimuru_request_pages", "Pages that open requests hold", held)
    yield GaugeMetricFamily("rimuru_cached_pages", "KV pages that only wait for reuse", report["cached_pages"])
    yield GaugeMetricFamily("rimuru_pool_free_bytes", "Bytes of the pool that nobody uses", report["free_bytes"])
    yield GaugeMetricFamily("rimuru_memory_bytes", "Everything on the device", report["total_bytes"])
    yield GaugeMetricFamily("rimuru_resident_experts", "Experts in the pool", sum(report["resident_experts"]))
    swap = report["swap"]
    yield GaugeMetricFamily(
        "rimuru_swapped_requests", "Answers that wait with their pages in host memory", swap["sequences"]
    )
    yield GaugeMetricFamily("rimuru_swap_bytes", "Host memory that these pages take", swap["used_bytes"])
    yield CounterMetricFamily("rimuru_swap_moved_bytes", "Bytes moved out and back", swap["moved_bytes"])
    if "decisions" in report:
        decisions = CounterMetricFamily(
            "rimuru_adjuster_decisions",
            "Experts given up, brought in (fill: by steps), or kept from a request; moves of pages",
            labels=["action"],
        )
        for action, n in report["decisions"]["counts"].items():
            decisions.add_metric([action], n)
        yield decisions
        n_lost = report["decisions"]["fills"]["unrecorded"]
        yield CounterMetricFamily("rimuru_unrecorded_fills", "Experts that steps brought in, without a record", n_lost)
    if "hit_rate" in report:
        yield GaugeMetricFamily("rimuru_expert_hit_rate", "Share of experts found resident", report["hit_rate"])
        yield CounterMetricFamily("rimuru_expert_read_bytes", "Bytes of experts brought in", report["read_bytes"])
        yield from _forecast_metrics(report["forecasts"]["by_way"])


def _forecast_metrics(by_way: dict[str, dict[str, float]]) -> Iterator[Metric]:
    """Of steps that were foretold, by how their missed experts came."""
    texts = {
        "steps": ("rimuru_forecasts", "Steps, or means of some, that were foretold"),
        "expected_s": ("rimuru_forecast_expected_seconds", "What they were expected to take"),
        "took_s": ("rimuru_forecast_took_seconds", "What they took"),
    }
    for key, (name, text) in texts.items():
        metric = CounterMetricFamily(name, text, labels=["way"])
        for way, means in by_way.items():
            metric.add_metric([way], means["steps"] * (1.0 if key == "steps" else means[key]))
        yield metric
