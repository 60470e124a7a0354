"""A synthetic router that routes like trained models do: for simulations, cache policies and benchmarks.

Per layer and expert: score = fixed bias N(0, sb) + slow AR(1) "topic" (standard deviation su, time constant tu tokens)
+ fast AR(1) (sv, tv) + unit noise; the top k are used. The parameters reproduce published hit rates of recently-used
caches and published repeats. Streams on one topic share the slow term. Everything is determined by the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.experts.routing_jit import advance, route_stream

N_NORMALS = 1 << 17
MAX_SAMPLED_TOKENS = 48
"""Of a longer prompt piece so many tokens are routed, spread evenly: by then nearly all that it uses has been seen."""


@dataclass(frozen=True, slots=True)
class RouterParams:
    """Standard deviations and time constants (tokens) of the terms of a score."""

    sb: float
    su: float
    tu: float
    sv: float
    tv: float


ROUTERS = {
    "qwen3-30b": RouterParams(0.24, 2.4, 66.0, 1.85, 2.0),
    "qwen3-235b": RouterParams(0.80, 1.9, 204.0, 1.70, 2.2),
    "flash-next": RouterParams(0.32, 2.9, 262.0, 2.7, 1.9),
    "qwen3.5-397b": RouterParams(0.39, 2.9, 190.0, 3.4, 1.5),
    "glm-5.2": RouterParams(0.64, 1.3, 420.0, 1.7, 2.0),
}


def router_for(n_experts: int, name: str = "auto") -> RouterParams:
    """Parameters by name; `auto`: those of the published model with as many experts. Raises BadInputError."""
    return ROUTERS[router_name(n_experts, name)]


def router_name(n_experts: int, name: str = "auto") -> str:
    """The name that `router_for` goes by. Raises BadInputError."""
    if name == "auto":
        return "qwen3-30b" if n_experts <= 128 else "flash-next"
    if name not in ROUTERS:
        raise BadInputError(f"unknown router {name!r}; known: auto, {', '.join(ROUTERS)}")
    return name


class SyntheticRouter:
    """Streams of routing decisions for n_layers layers of n_experts experts each.

    n_topics: streams are dealt out to so many topics and share their slow term; None = each stream has its own topic.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        params: RouterParams,
        seed: int = 0,
        n_topics: int | None = None,
    ) -> None:
        self.n_layers, self.n_experts, self.top_k, self.params = n_layers, n_experts, top_k, params
        self.n_topics = n_topics
        rng = np.random.default_rng(seed)
        self._normals = rng.standard_normal(N_NORMALS, np.float32)
        self._rng = rng
        shape = (n_layers, n_experts)
        self.bias = (params.sb * rng.standard_normal(shape)).astype(np.float32)
        self._topics = [self._draw(params.su) for _ in range(n_topics or 0)]
        self._streams: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._state = int(rng.integers(1 << 62))
        self._n_opened = 0
        self._no_record = np.empty((0, 0, 0), np.int16)

    def _draw(self, deviation: float) -> np.ndarray:
        values = self._rng.standard_normal((self.n_layers, self.n_experts), np.float32)
        return values * np.float32(deviation)

    def open(self, stream: int) -> None:
        """Start a stream in the stationary distribution."""
        slow = self._topics[self._n_opened % self.n_topics] if self.n_topics else self._draw(self.params.su)
        self._streams[stream] = slow, self._draw(self.params.sv)
        self._n_opened += 1

    def close(self, stream: int) -> None:
        """Forget a stream."""
        del self._streams[stream]

    def begin_step(self, n_tokens: int = 1) -> None:
        """Shared topics move on by n_tokens tokens."""
        if self._topics:
            rho, step = _ar1(self.params.su, self.params.tu, n_tokens)
            for topic in self._topics:
                advance(topic, self._normals, int(self._rng.integers(N_NORMALS)), rho, step)

    def route(self, stream: int, n_tokens: int, counts: np.ndarray) -> None:
        """Add the choices of the stream's next n_tokens tokens to counts, int32 [L, E]. Of a long piece some tokens
        stand for all; the counts are those of the tokens that were routed."""
        n_routed = min(n_tokens, MAX_SAMPLED_TOKENS)
        self._run(stream, n_routed, n_tokens / n_routed, counts, self._no_record)

    def choices(self, stream: int, n_tokens: int) -> np.ndarray:
        """The choices of the stream's next n_tokens tokens, int16 [n_tokens, L, top_k], best first."""
        chosen = np.empty((n_tokens, self.n_layers, self.top_k), np.int16)
        self._run(stream, n_tokens, 1.0, np.zeros((self.n_layers, self.n_experts), np.int32), chosen)
        return chosen

    def _run(self, stream: int, n_tokens: int, stride: float, counts: np.ndarray, chosen: np.ndarray) -> None:
        slow, fast = self._streams[stream]
        rho_slow, step_slow = _ar1(self.params.su, self.params.tu, stride)
        rho_fast, step_fast = _ar1(self.params.sv, self.params.tv, stride)
        self._state = route_stream(
            self.bias, slow, fast, self._normals, self._state, n_tokens, rho_slow, rho_fast, step_slow, step_fast,
            self.n_topics is not None, self.top_k, counts, chosen,
        )  # fmt: skip


def _ar1(deviation: float, time_constant_tokens: float, n_tokens: float) -> tuple[float, float]:
    """(rho, innovation) of an AR(1) process over n_tokens tokens."""
    rho = math.exp(-n_tokens / time_constant_tokens)
    return rho, deviation * math.sqrt(1.0 - rho * rho)
