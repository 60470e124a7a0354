"""A request on its way through the engine's thread: its job, its events, the box where they wait for its handler."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rimuru.engine.output import TextOutput
from rimuru.request import Piece, SamplingParams, Sequence, TokenConstraint


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More of one answer of a job; piece.finish_reason tells the last."""

    index: int
    piece: Piece
    n_prompt_tokens: int
    n_cached_tokens: int


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job is over, with all its answers."""

    error: Exception


Event = AnswerPiece | JobFailed


class Mailbox:
    """Events on their way from the engine's thread to one handler. Made and read in the handler's event loop."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event; only from the event loop's own thread."""
        self._events.append(event)
        self._arrived.set()

    async def take(self, timeout_s: float | None = None) -> list[Event]:
        """All events that have come, at least one; none where none came in time.

        The time-out is a wake-up, not a cancelled task: a cancellation that meets an event must never get lost.
        """
        if not self._events:
            self._arrived.clear()
            alarm = None if timeout_s is None else self.event_loop.call_later(timeout_s, self._arrived.set)
            try:
                await self._arrived.wait()
            finally:
                if alarm is not None:
                    alarm.cancel()
        events = list(self._events)
        self._events.clear()
        return events


@dataclass(eq=False)
class Job:
    """One request: its prompts, n answers to each. Answer number = prompt number * n + index."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    mailbox: Mailbox
    priority: int = 0
    client: str = ""
    timeout_s: float | None = None
    make_constraint: Callable[[], TokenConstraint] | None = None
    started: float = field(default_factory=time.monotonic)
    # Of the engine's thread from here on.
    answers: list[Answer] = field(default_factory=list)
    is_over: bool = False

    @property
    def has_begun(self) -> bool:
        """True once any of its answers runs, or has run."""
        return any(a.sequence.state != "waiting" or a.sequence.n_preemptions for a in self.answers)

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(eq=False, slots=True)
class Answer:
    """One answer of a job in the engine."""

    job: Job
    index: int
    output: TextOutput

    @property
    def sequence(self) -> Sequence:
        return self.output.sequence


@dataclass(slots=True)
class LoopCounters:
    """Since the start; read by other threads, which may see a value that is one step old."""

    n_jobs: int = 0
    n_jobs_done: int = 0
    n_jobs_failed: int = 0
    n_jobs_cancelled: int = 0
    n_jobs_refused: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_output_tokens: int = 0
    n_steps: int = 0
    n_failed_steps: int = 0
    step_s: float = 0.0

    def line(self) -> str:
        """What was served, and how fast while there was work."""
        rate = self.n_output_tokens / self.step_s if self.step_s else 0.0
        return (
            f"served {self.n_jobs_done} requests ({self.n_jobs_failed} failed, {self.n_jobs_cancelled} cancelled, "
            f"{self.n_jobs_refused} refused): {self.n_prompt_tokens} prompt tokens, {self.n_cached_tokens} of them "
            f"found again, {self.n_output_tokens} tokens of answers, {rate:.1f} per second of work"
        )
