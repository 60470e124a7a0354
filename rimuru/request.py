"""Requests and what they become: SamplingParams, Sequence, and the answers handed back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rimuru.base.errors import BadInputError, RimuruError

FinishReason = Literal["stop", "length"]
State = Literal["waiting", "running", "finished"]
MAX_NUMBER = 1e6
"""Temperatures and penalties up to here: beyond it they only bring float32 to its ends."""
MAX_COUNT = 2**31 - 1
"""Counts up to here: more tokens, candidates or alternatives exist nowhere, and kernels count in int32."""
MAX_ANSWERS = 128
"""Of one request."""
_MAX_BIAS = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Filters apply in the order: logit bias, repetition penalty, frequency and presence
    penalties, top_k, top_p, min_p, temperature (llama.cpp's order: the candidate set does not depend on temperature).

    temperature 0 takes the best token (lowest id on ties). top_k 0, top_p 1 and min_p 0 are off. The repetition
    penalty counts prompt and output tokens once each, frequency and presence penalties output tokens only.
    `logprobs` = how many alternatives to report with each token (0 with `want_logprobs` reports the token alone);
    they are log-softmax values of the model's own logits, before any filter. `n` is at most MAX_ANSWERS.
    """

    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Seq[str] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int = 0
    n: int = 1
    want_logprobs: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 0), ("top_k", 0), ("logprobs", 0), ("n", 1)):
            value = getattr(self, name)
            _require_int(name, value, least)
            object.__setattr__(self, name, min(int(value), MAX_COUNT))
        if self.n > MAX_ANSWERS:
            raise BadInputError(f"n must be at most {MAX_ANSWERS}, got {shown(self.n)}")
        _require_range("temperature", self.temperature, 0.0, MAX_NUMBER)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 1 / MAX_NUMBER, MAX_NUMBER)
        _require_range("presence_penalty", self.presence_penalty, -MAX_NUMBER, MAX_NUMBER)
        _require_range("frequency_penalty", self.frequency_penalty, -MAX_NUMBER, MAX_NUMBER)
        stops = (self.stop,) if not isinstance(self.stop, (list, tuple)) else tuple(self.stop)
        if not all(isinstance(s, str) for s in stops):
            raise BadInputError("stop must be a string or a list of strings")
        object.__setattr__(self, "stop", tuple(s for s in stops if s))
        if self.seed is not None and not isinstance(self.seed, (int, np.integer)):
            raise BadInputError(f"seed must be a whole number, got {shown(self.seed)}")
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise BadInputError(f"logit_bias maps token ids to numbers; got {shown(self.logit_bias)}")
        bias = {} if self.logit_bias is None else dict(self.logit_bias)
        for token_id, value in bias.items():
            number = _as_float(value)
            if not isinstance(token_id, (int, np.integer)) or math.isnan(number):
                raise BadInputError(f"logit_bias maps token ids to numbers; got {shown(token_id)}: {shown(value)}")
            # what float32 cannot hold forbids a token, or forces it, as infinity does
            bias[token_id] = math.copysign(math.inf, number) if abs(number) > _MAX_BIAS else number
        object.__setattr__(self, "logit_bias", bias)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def shown(value: object) -> str:
    """A value for a message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no number of more than a few thousand digits
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


def _as_float(value: object) -> float:
    """A number of any type as float, beyond its range infinite; NaN for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _require_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise BadInputError(f"{name} must be a whole number of at least {low}, got {shown(value)}")


def _require_range(name: str, value: object, low: float, high: float) -> None:
    number = _as_float(value)
    if not math.isfinite(number):
        raise BadInputError(f"{name} must be a finite number, got {shown(value)}")
    if not low <= number <= high:
        raise BadInputError(f"{name} must be at least {low:g} and at most {high:g}, got {shown(value)}")


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of a chosen token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Completion:
    """A finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None = None
    alternatives: list[Completion] = field(default_factory=list)
    """The further answers when SamplingParams.n > 1."""


@dataclass(slots=True)
class Piece:
    """A part of a streamed answer. finish_reason is None until the last piece."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None


class TokenConstraint(Protocol):
    """Restricts one answer to a language (a JSON schema, a tool call). Only the engine's thread calls it; it must not
    raise, because it runs inside a step that other answers share."""

    @property
    def error(self) -> Exception | None:
        """Why the answer can no longer be held to the language, and is to fail; None while it can."""

    def allowed(self) -> np.ndarray | None:
        """bool [n_vocab]: which tokens may come next; None where every token may."""

    def advance(self, token_id: int) -> None:
        """Take in the token that was chosen."""


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Its length has three marks: 0 <= n_cached <= n_tokens, n_prompt <= n_tokens.

    tokens:  [ prompt ............. | output ...... ]
    cached:  [ in the pages ......... ] uncached: what the next steps must run
    """

    seq_id: int
    tokens: list[int]
    n_prompt: int
    params: SamplingParams
    rng: np.random.Generator
    eog_ids: frozenset[int]
    max_total_tokens: int
    """Prompt and output together end here at the latest (context length)."""
    priority: int = 0
    client: str = ""
    """Whose it is: clients share the engine fairly."""
    snapshot_at: tuple[int, ...] = ()
    """Token counts, ascending, at which recurrent states are saved for reuse: a piece of the prompt ends there."""
    state: State = "waiting"
    n_cached: int = 0
    n_in_flight: int = 0
    """Of n_cached: tokens in steps that run now; the cache has not been told of them."""
    n_pending: int = 0
    """Sampled tokens that only the device knows yet; they follow `tokens`."""
    pending_row: int = 0
    """Row of the newest pending token among the last step's sampled ids."""
    n_reused: int = 0
    """Prompt tokens that a prefix hit made unnecessary to run (the first admission counts)."""
    n_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: RimuruError | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """Token id -> how often it stands in the output; prompt ids count 0. Kept only where penalties need it."""
    constraint: TokenConstraint | None = None

    def __post_init__(self) -> None:
        if self.params.has_penalties:
            self.seen = dict.fromkeys(self.tokens, 0)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_uncached(self) -> int:
        return len(self.tokens) + self.n_pending - self.n_cached

    @property
    def will_end(self) -> bool:
        """True where the pending tokens reach the length limit: no further step is needed."""
        n_known = len(self.tokens) + self.n_pending
        return n_known - self.n_prompt >= self.params.max_tokens or n_known >= self.max_total_tokens > 0

    @property
    def needs_host(self) -> bool:
        """True where choosing the next token needs the last one's id on the host."""
        params = self.params
        return params.has_penalties or params.want_logprobs or params.logprobs > 0 or self.constraint is not None

    @property
    def n_runnable(self) -> int:
        """Uncached tokens up to the next place where states are to be saved."""
        for count in self.snapshot_at:
            if count > self.n_cached:
                return min(count - self.n_cached, self.n_uncached)
        return self.n_uncached

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def is_finished(self) -> bool:
        return self.state == "finished"

    def append(self, token_id: int) -> None:
        """Add a sampled token and settle whether the answer ends with it."""
        self.tokens.append(token_id)
        if self.params.has_penalties:
            self.seen[token_id] = self.seen.get(token_id, 0) + 1
        if self.constraint is not None:
            self.constraint.advance(token_id)
        if token_id in self.eog_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif self.n_output >= self.params.max_tokens or self.n_tokens >= self.max_total_tokens:
            self.finish_reason = "length"
