"""The engine's thread: the only one that touches the engine. Everybody else talks to it through queues.

    handler -- submit/cancel/call --> inbox --> [ engine: take in, expire, step ] -- events --> Mailbox --> handler

Nothing is locked: a handler that dies at any point leaves nothing behind but a job, which its `cancel` ends before the
next step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from rimuru.base.errors import ContextLengthError, QueueFullError, RimuruError
from rimuru.engine.build import LoadedModel
from rimuru.engine.output import TextOutput
from rimuru.request import Sequence
from rimuru.server.errors import QueueTimeoutError, RequestTimeoutError, ShuttingDownError, StepFailedError
from rimuru.server.jobs import Answer, AnswerPiece, Event, Job, JobFailed, LoopCounters, Mailbox

log = logging.getLogger(__name__)

Result = TypeVar("Result")
RATE_WINDOW_S = 5.0


class EngineLoop:
    """Runs the engine of a loaded model in a thread of its own until `stop`."""

    def __init__(self, loaded: LoadedModel, max_waiting: int = 512, queue_timeout_s: float | None = None) -> None:
        """max_waiting: answers that may wait for their turn before requests are refused with QueueFullError;
        queue_timeout_s: how long they may, before they fail with QueueTimeoutError."""
        self.loaded, self.engine = loaded, loaded.engine
        self.max_waiting, self.queue_timeout_s = max_waiting, queue_timeout_s
        self.counters = LoopCounters()
        self.is_draining = False
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, Answer] = {}
        self._jobs: set[Job] = set()
        self._outbox: list[tuple[Mailbox, Event]] = []
        self._rates: deque[tuple[float, int]] = deque()
        self._thread = threading.Thread(target=self._run, name="rimuru-engine", daemon=True)
        self._pieces: deque[tuple[Iterator[None], Future[None]]] = deque()
        """Work that is done a piece between two steps, one after the other."""
        self.after_step: Callable[[], None] = lambda: None
        self._stopping = False
        self._failures = itertools.count(1)

    # ---- from any thread
    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand a job over. All that happens to it, refusal too, comes as events to its mailbox."""
        self._inbox.put(lambda: self._begin(job))

    def cancel(self, job: Job) -> None:
        """End a job before the next step, wherever it is. No event follows; an ended job is no error."""
        self._inbox.put(lambda: self._cancel(job))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps, in the engine's thread."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def call_in_pieces(self, pieces: Iterator[None]) -> Future[None]:
        """Run an iterator to its end in the engine's thread, as far as its next item between two steps."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a caller who goes does not leave it half done
        self._inbox.put(lambda: self._pieces.append((pieces, future)))
        return future

    def note_failure(self) -> None:
        """Count a request that failed before it became a job."""
        self._inbox.put(self._count_failure)

    def _count_failure(self) -> None:
        self.counters.n_jobs_failed += 1

    def drain(self) -> None:
        """Refuse new jobs from now on; those that have begun go on."""
        self.is_draining = True

    def fail_all(self) -> None:
        """End all jobs with ShuttingDownError; the thread goes on."""
        self.is_draining = True
        self._inbox.put(self._fail_jobs)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End all jobs and the thread. Jobs that are still there fail with ShuttingDownError."""
        self.is_draining = True
        self._inbox.put(self._shut_down)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def n_jobs(self) -> int:
        return len(self._jobs)

    def tokens_per_second(self) -> float:
        """Output tokens of all answers in the last seconds."""
        now = time.monotonic()
        recent = [n for at, n in list(self._rates) if now - at <= RATE_WINDOW_S]
        return sum(recent) / RATE_WINDOW_S

    # ---- the engine's thread
    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # a fault here must not end the thread that everybody waits for
                log.exception("the engine thread met an unexpected error and goes on")
                time.sleep(0.01)

    def _turn(self) -> None:
        """Take in, expire, step, deliver: once."""
        self._take_in()
        if not self._stopping:
            self._expire()
            self._go_on()
            if self.engine.has_work:
                self._step()
            self._deliver()

    def _take_in(self) -> None:
        """Carry out what has come in; without work, wait for it."""
        try:
            command = self._inbox.get(block=not self.engine.has_work and not self._pieces)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._deliver()

    def _go_on(self) -> None:
        """One piece of what was begun first."""
        if not self._pieces:
            return
        pieces, future = self._pieces[0]
        try:
            if next(pieces, True) is None:
                return
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)
        self._pieces.popleft()

    def _step(self) -> None:
        started, n_steps = time.monotonic(), self.engine.n_steps
        try:
            report = self.engine.step()
        except Exception as error:
            self._step_failed(error)
            return
        for sequence in report.advanced:
            self._advance(sequence)
        for sequence in report.ended:
            answer = self._answers.get(sequence.seq_id)
            if answer is None:  # its last token has ended it
                continue
            if sequence.error is not None:
                self._fail(answer.job, self._told(sequence.error))
            else:  # by its length, without a token more: the pool has become too small for it
                self._advance(sequence)
        now = time.monotonic()
        self.counters.n_steps += 1
        self.counters.step_s += now - started
        self._note_rate(now, len(report.advanced))
        self.after_step()
        if self.engine.n_steps == n_steps and not report.ended and self.engine.has_work:
            time.sleep(0.002)  # nothing could run: do not spin

    def _note_rate(self, now: float, n_tokens: int) -> None:
        self.counters.n_output_tokens += n_tokens
        self._rates.append((now, n_tokens))
        while self._rates and now - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()

    def _advance(self, sequence: Sequence) -> None:
        """The text of a sequence's new tokens, on its way to the client."""
        answer = self._answers.get(sequence.seq_id)
        if answer is None:
            return
        if sequence.constraint is not None and sequence.constraint.error is not None:
            self._fail(answer.job, self._told(sequence.constraint.error))
            return
        try:
            if answer.output.advance():
                self.engine.finish(sequence)
        except Exception as error:
            log.exception("the text of a token could not be made")
            self._fail(answer.job, self._told(error))
            return
        self._post_piece(answer)

    def _post_piece(self, answer: Answer) -> None:
        piece, sequence = answer.output.take_piece(), answer.sequence
        if piece is not None:
            self._post(answer.job, AnswerPiece(answer.index, piece, sequence.n_prompt, sequence.n_reused))
        if sequence.is_finished:
            self._answers.pop(sequence.seq_id, None)
            self.counters.n_cached_tokens += sequence.n_reused
            job = answer.job
            if all(other.sequence.is_finished for other in job.answers):
                self._end(job)
                self.counters.n_jobs_done += 1

    # ---- jobs
    def _begin(self, job: Job) -> None:
        try:
            self._check_room(job)
            for prompt in job.prompts:
                self._check_fits(prompt)
            for number, prompt in enumerate(job.prompts):
                for index in range(job.params.n):
                    self._add_answer(job, number * job.params.n + index, prompt, index)
        except Exception as error:
            self.counters.n_jobs_refused += 1
            self._drop(job)
            self._post(job, JobFailed(self._told(error)))
            return
        self._jobs.add(job)
        self.counters.n_jobs += 1
        self.counters.n_prompt_tokens += sum(map(len, job.prompts)) * job.params.n  # per answer, as those found again
        for answer in list(job.answers):
            if answer.sequence.is_finished:  # no token was asked for
                self._post_piece(answer)

    def _check_room(self, job: Job) -> None:
        if job.is_over:  # the client left before its turn came
            raise ShuttingDownError("the request was cancelled")
        if self.is_draining:
            raise ShuttingDownError("the server is shutting down; try again later")
        scheduler = self.engine.scheduler
        n_waiting, n_free = len(scheduler.waiting), scheduler.max_sequences - len(scheduler.running)
        if not self.max_waiting:  # none may wait: what is in line now must find a place in the next step
            if self.engine.has_work and n_waiting + job.n_answers > n_free:
                raise QueueFullError("all places are taken, and no answer may wait for one; try again later")
        elif n_waiting and n_waiting + job.n_answers > self.max_waiting and not self._has_share_left(job):
            are = "answer is" if n_waiting == 1 else "answers are"
            raise QueueFullError(f"{n_waiting} {are} waiting already; try again later")

    def _has_share_left(self, job: Job) -> bool:
        """A full queue still takes in clients that have less in it than an equal share, up to twice its length: one
        client's flood is no reason to refuse another."""
        waiting = self.engine.scheduler.waiting
        n_of_client = waiting.n_waiting_of(job.client) + job.n_answers
        share = self.max_waiting // waiting.n_clients_with(job.client)
        return n_of_client <= share and len(waiting) + job.n_answers <= 2 * self.max_waiting

    def _check_fits(self, prompt: list[int]) -> None:
        """Refuse before any page is taken what could never run."""
        self.engine.check_prompt(prompt)
        if not self.engine.cache.fits_alone(len(prompt) + 1, self.engine.scheduler.max_step_tokens):
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, more than the memory pool can hold; shorten it or resize "
                "the pool"
            )

    def _add_answer(self, job: Job, number: int, prompt: list[int], index: int) -> None:
        constraint = None if job.make_constraint is None else job.make_constraint()
        sequence = self.engine.add(prompt, job.params, index, job.priority, constraint, job.client)
        answer = Answer(job, number, TextOutput(sequence, self.loaded.tokenizer))
        job.answers.append(answer)
        self._answers[sequence.seq_id] = answer

    def _cancel(self, job: Job) -> None:
        if not job.is_over and job in self._jobs:
            self.counters.n_jobs_cancelled += 1
        self._drop(job)

    def _fail(self, job: Job, error: Exception) -> None:
        if not job.is_over:
            self.counters.n_jobs_failed += 1
            self._drop(job)
            self._post(job, JobFailed(error))

    def _drop(self, job: Job) -> None:
        """Take all that is left of a job out of the engine; every page goes back once."""
        for answer in job.answers:
            self._answers.pop(answer.sequence.seq_id, None)
            if not answer.sequence.is_finished:
                self._finish(answer.sequence)
        self._end(job)

    def _end(self, job: Job) -> None:
        job.is_over = True
        self._jobs.discard(job)

    def _finish(self, sequence: Sequence) -> None:
        """engine.finish that takes the sequence out even if giving its pages back fails."""
        try:
            self.engine.finish(sequence)
        except Exception:
            log.exception("the pages of sequence %d could not be given back", sequence.seq_id)
            scheduler = self.engine.scheduler
            scheduler.running = [s for s in scheduler.running if s is not sequence]
            scheduler.waiting.remove(sequence)
            sequence.state = "finished"

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [j for j in self._jobs if j.timeout_s is not None and now - j.started > j.timeout_s]:
            self._fail(job, RequestTimeoutError(f"the request did not end within {job.timeout_s:g} seconds"))
        limit_s = self.queue_timeout_s
        if limit_s is not None:
            for job in [j for j in self._jobs if now - j.started > limit_s and not j.has_begun]:
                self._fail(job, QueueTimeoutError(f"the request waited {limit_s:g} seconds for its turn; try later"))

    def _step_failed(self, error: Exception) -> None:
        """Fail the jobs of a step that raised: those it ran; while planning, those that run, else the next in line."""
        number = next(self._failures)
        log.error("step failed (%d since the start)", number, exc_info=error)
        self.counters.n_failed_steps += 1
        scheduler, plan = self.engine.scheduler, self.engine.plan
        if plan is not None and plan.items:
            hit = [item.sequence for item in plan.items]
        else:
            hit = list(scheduler.running) or list(scheduler.waiting)[:1]
        wrapped = self._told(error)
        for sequence in hit:
            answer = self._answers.get(sequence.seq_id)
            if answer is not None:
                self._fail(answer.job, wrapped)
            elif not sequence.is_finished:
                self._finish(sequence)

    @staticmethod
    def _told(error: Exception) -> RimuruError:
        """What a client is told of an error: ours as they are, of others only where it happened and that it is over."""
        if isinstance(error, RimuruError) and type(error) is not RimuruError:
            return error
        return StepFailedError(
            "the engine failed while it worked on this request; other requests are not affected, and the server's log "
            "has the details"
        )

    def _fail_jobs(self) -> None:
        for job in list(self._jobs):
            self._fail(job, ShuttingDownError("the server is shutting down"))

    def _shut_down(self) -> None:
        self._fail_jobs()
        while self._pieces:
            self._pieces.popleft()[1].set_exception(ShuttingDownError("the server is shutting down"))
        self._stopping = True
        self._deliver()

    # ---- events
    def _post(self, job: Job, event: Event) -> None:
        self._outbox.append((job.mailbox, event))

    def _deliver(self) -> None:
        """Everything posted since the last call, with one wake-up per event loop."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        loops = {mailbox.event_loop for mailbox, _ in outbox}
        for event_loop in loops:
            batch = [(mailbox, event) for mailbox, event in outbox if mailbox.event_loop is event_loop]
            try:
                event_loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # that loop has ended; nobody waits for these
                log.debug("events for a closed event loop were dropped")


def _put_all(batch: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in batch:
        mailbox.put(event)


async def call_engine(loop: EngineLoop, function: Callable[[], Any]) -> Any:
    """EngineLoop.call, awaited. Raises ShuttingDownError where the thread has ended."""
    if not loop.is_alive:
        raise ShuttingDownError("the server is shutting down")
    return await asyncio.wrap_future(loop.call(function))


async def call_engine_in_pieces(loop: EngineLoop, pieces: Iterator[None]) -> None:
    """EngineLoop.call_in_pieces, awaited. Raises as call_engine."""
    if not loop.is_alive:
        raise ShuttingDownError("the server is shutting down")
    await asyncio.wrap_future(loop.call_in_pieces(pieces))
