"""Engine: add, abort, step. One thread owns it; others hand requests over through the inbox."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from rimuru.base import env
from rimuru.base.errors import BadInputError, ContextLengthError, NotEnoughMemoryError, RimuruError
from rimuru.base.units import counted
from rimuru.batch import Batch
from rimuru.engine.assemble import assemble
from rimuru.engine.branches import branch_points, mark_call
from rimuru.engine.flight import Flight
from rimuru.engine.rehearse import rehearsal_sequences, rehearse_decisions
from rimuru.engine.runner import Runner
from rimuru.engine.sampler import NO_TOKEN, Sampler
from rimuru.engine.scheduler import Scheduler
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.replay import RoutingReplay
from rimuru.experts.store import HostExpertStore
from rimuru.memory.cache import SequenceCache
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PoolLayout
from rimuru.plan import PlannedTokens, StepPlan
from rimuru.request import SamplingParams, Sequence, TokenConstraint

log = logging.getLogger(__name__)

NO_NUMBERS = "the model's numbers are no longer finite: its file is damaged, or its metadata is wrong; fetch it again"
WARM_UP_TOKENS = 40
"""Enough for the matrix kernels that only prompts use."""

SCORE_BYTES = 256 << 20
"""Of logits that a piece of a scored text has at most."""

AUDIT_PAUSE = 100
"""After an audit of an idle engine, the next one waits this many times as long as it took."""


@dataclass(slots=True)
class StepReport:
    """What a step did: the sequences that got a token, and those that ended (finished or failed)."""

    advanced: list[Sequence]
    ended: list[Sequence]


class Engine:
    """Steps one model. Everything it needs was wired by engine/build.py."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: SequenceCache,
        pool: PagePool,
        layout: PoolLayout,
        runner: Runner,
        sampler: Sampler,
        context_length: int,
        n_vocab: int,
        eog_ids: frozenset[int],
        seed: int,
        store: HostExpertStore | DeviceExpertStore | None = None,
        call_openers: frozenset[int] = frozenset(),
    ) -> None:
        """call_openers: tokens that open a tool call."""
        self.scheduler, self.cache, self.pool, self.layout = scheduler, cache, pool, layout
        self.runner, self.sampler = runner, sampler
        self._flight: Flight | None = None
        self._leaving: list[Sequence] = []
        """Ended, but the step in flight still runs their last token: its states are worth keeping."""
        self.overlaps: bool = sampler.ops.overlaps and not env.poison_free_pages()
        """Plan and queue a step while the one before runs; off where freed pages are written to at once."""
        self.n_vocab, self.eog_ids = n_vocab, eog_ids
        self.context_length = self.most_context = context_length
        """Of new requests now, and at the start: a pool that was made smaller holds shorter ones."""
        self.may_grow = True
        """Whether the context is less than the model's own."""
        self.store, self.call_openers = store, call_openers
        self.replay: RoutingReplay | None = None
        """A benchmark's routing in place of the model's."""
        self.n_steps = 0
        self._audit_after_s = 0.0
        self.plan: StepPlan | None = None
        """What the last step ran, or was about to run when it failed; None while it is being planned."""
        self._ids = itertools.count()
        self._seeds = np.random.default_rng(seed % (1 << 64))
        self._aborts: deque[Sequence] = deque()
        self._report = StepReport([], [])
        """What has landed since the last step returned."""
        scheduler.land = self.land

    # ---- requests
    def add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        index: int = 0,
        priority: int = 0,
        constraint: TokenConstraint | None = None,
        client: str = "",
    ) -> Sequence:
        """Queue a prompt. `index` tells apart the answers of one request with n > 1; clients share the engine fairly.

        Raises BadInputError for an empty prompt or unknown token ids, ContextLengthError where prompt + 1 exceeds
        the context.
        """
        self.check_prompt(token_ids)
        for token_id in params.logit_bias or ():
            if not 0 <= token_id < self.n_vocab:
                raise BadInputError(f"logit_bias names token {token_id}; the vocabulary has {self.n_vocab}")
        seed = int(self._seeds.integers(1 << 62)) if params.seed is None else int(params.seed)
        sequence = Sequence(
            seq_id=next(self._ids),
            tokens=list(token_ids),
            n_prompt=len(token_ids),
            params=params,
            rng=np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), index], np.uint64))),
            eog_ids=self.eog_ids,
            max_total_tokens=self.context_length,
            priority=priority,
            client=client,
            constraint=constraint,
            snapshot_at=branch_points(token_ids, self.eog_ids) if self.cache.takes_snapshots else (),
        )
        if params.max_tokens == 0:
            sequence.state, sequence.finish_reason = "finished", "length"
        else:
            self.scheduler.add(sequence)
        return sequence

    def check_prompt(self, token_ids: list[int]) -> None:
        """Raise unless the ids can be run as a prompt that gets at least one token of answer."""
        if not token_ids:
            raise BadInputError("the prompt is empty: at least one token is needed")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.n_vocab:
            wrong = low if low < 0 else high
            raise BadInputError(f"token id {wrong} is outside the vocabulary of {self.n_vocab} tokens")
        if len(token_ids) + 1 > self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens and at least one of answer is needed, but the context holds "
                f"{self.context_length}; shorten the prompt" + self._how_to_get_more()
            )

    @property
    def most_tokens(self) -> tuple[int, int]:
        """Of a request, in a pool as it was at the start; of a step."""
        return self.most_context, self.scheduler.max_step_tokens

    def _how_to_get_more(self) -> str:
        if self.context_length < self.most_context:
            return ", or resize: the pool was made smaller"
        return " or raise --ctx" if self.may_grow else ", the model takes no more"

    def limit_context(self, n_tokens: int) -> None:
        """The pool was resized: requests may have so many tokens from now on, those that are under way too. An answer
        that has as many ends, by its length; a prompt that has fails."""
        self.land()
        self.context_length = most = min(self.most_context, n_tokens)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            sequence.max_total_tokens = most
            if sequence.n_tokens < most:
                continue
            if sequence.n_output > 0:
                sequence.finish_reason = "length"
            else:
                why = f"the prompt has {sequence.n_tokens} tokens, but the pool was made smaller and holds {most}"
                sequence.error = NotEnoughMemoryError(f"{why}; resize it to more")
            self.scheduler.remove(sequence)
            self._report.ended.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Cancel a request; safe from any thread. It ends at the start of the next step."""
        self._aborts.append(sequence)

    @property
    def has_work(self) -> bool:
        is_told = not self._report.advanced and not self._report.ended
        return self.scheduler.has_work or bool(self._aborts) or self._flight is not None or not is_told

    # ---- stepping
    def step(self) -> StepReport:
        """One step: drop what was cancelled, plan and launch, then take in the tokens of the step before (where work
        is not queued: of this one)."""
        self._drop_aborted()
        self.plan = None
        if self._flight is not None and (self._leaving or self._flight.must_land):
            self.land()
        self.plan = plan = self.scheduler.schedule()
        self._report.ended += self._fail(plan)
        flight = self._launch(plan) if plan.items else None
        self.land()
        self._flight = flight
        if flight is not None and (flight.must_land or not self.overlaps or not self.scheduler.has_work):
            self.land()
        report, self._report = self._report, StepReport([], [])
        if env.audit_every_step():
            self.audit()
        elif not self.has_work:
            if self.store is not None:
                self.store.catch_up()
            self._audit_when_idle()
        return report

    def _launch(self, plan: StepPlan) -> Flight | None:
        """Queue the planned step; None where that failed."""
        self._begin()
        sampling = [item.sequence for item in plan.items if item.samples]
        try:
            logits = self.runner.run(self._batch(plan.items))
            fetch = self.sampler.start(logits, sampling)
        except Exception as broken:
            self._fail_step(plan.items, broken)
            return None
        flight = Flight.launch(plan.items, sampling, fetch)
        for item, error in self._unread(plan.items):
            self._fail_step([item], error)
        return flight

    def _batch(self, items: list[PlannedTokens], all_logits: bool = False) -> Batch:
        batch = assemble(items, self.cache, self.layout, all_logits)
        if self.replay is not None:
            batch.expert_ids = self.replay.ids_of(items)
        return batch

    def _unread(self, items: list[PlannedTokens]) -> list[tuple[PlannedTokens, BaseException]]:
        """Items of the step that was run, some of whose tokens chose an expert that could not be read. No sequence
        depends on the rows of another, so the others go on."""
        unread = [] if self.store is None else self.store.take_unread()
        failed, first = [], 0
        for item in items:
            rows = range(first, first + item.n_tokens)
            error = next((e.error for e in unread if np.isin(e.rows, rows).any()), None)
            if error is not None:
                failed.append((item, error))
            first = rows.stop
        return failed

    def land(self) -> bool:
        """Wait for the step in flight, tell the cache what was written, append the sampled tokens; the next report
        names them. False where no step runs."""
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        try:
            token_ids = flight.fetch()
        except Exception as error:
            self._let_go(was_run=False)
            self._fail_step(flight.items, error)
            return True
        self._let_go(was_run=True)
        for item in flight.still_runs():
            sequence = item.sequence
            begin = sequence.n_cached - sequence.n_in_flight
            self.cache.commit(sequence.seq_id, sequence.tokens[begin : begin + item.n_tokens])
            sequence.n_in_flight -= item.n_tokens
            if sequence.n_cached in sequence.snapshot_at:
                self.cache.snapshot(sequence.seq_id)
        for sequence, token_id in zip(flight.sampling, token_ids, strict=True):
            sequence.n_pending -= 1
            if sequence.is_finished:
                continue
            if token_id == NO_TOKEN:
                self._fail_step([item for item in flight.items if item.sequence is sequence], RimuruError(NO_NUMBERS))
                continue
            sequence.append(int(token_id))
            mark_call(sequence, int(token_id), self.call_openers)
            self._report.advanced.append(sequence)
            if sequence.finish_reason is not None:
                self.finish(sequence)
                self._report.ended.append(sequence)
        return True

    def _begin(self) -> None:
        self.n_steps += 1
        if self.store is not None:
            self.store.begin_step()

    def _drop_aborted(self) -> None:
        while self._aborts:
            sequence = self._aborts.popleft()
            if not sequence.is_finished:
                self.scheduler.remove(sequence)

    def _fail(self, plan: StepPlan) -> list[Sequence]:
        for sequence in plan.failed:
            sequence.state = "finished"
        return list(plan.failed)

    def _fail_step(self, items: list[PlannedTokens], error: BaseException) -> None:
        """A step that broke for these ends their requests, with the reason; nothing of what they wrote is reused."""
        log.error("a step failed for %d requests: %s", len(items), error, exc_info=not isinstance(error, RimuruError))
        for item in items:
            sequence = item.sequence
            if sequence.is_finished:
                continue
            if not isinstance(error, RimuruError):
                sequence.error = RimuruError(
                    f"the engine failed in this request's step: {type(error).__name__}: {error}"
                )
                sequence.error.__cause__ = error
            else:
                sequence.error = error
            self.scheduler.remove(sequence, keep_prefix=False)
            self._report.ended.append(sequence)

    def warm_up(self) -> None:
        """Run a short prompt, two tokens and one token through the model, sample in every way, decide and audit: what
        requests need is compiled before the first of them."""
        n_tokens = min(WARM_UP_TOKENS, self.context_length, self.scheduler.max_step_tokens)
        for n, chunk in ((n_tokens, n_tokens), (min(3, n_tokens), 2)):
            for rows in self.score([i % self.n_vocab for i in range(n)], chunk):
                last = rows[-1][-1:]
        for probe in rehearsal_sequences():
            self.sampler.sample(self.runner.ops.upload(last), [probe])
        if self.store is not None:
            rehearse_decisions()
        self.audit()

    def finish(self, sequence: Sequence) -> None:
        """End a sequence now: its pages go back, its full blocks stay findable. Where states are to be kept and a step
        in flight is changing them, that happens when it has landed: they then count its token, the answer's last."""
        if sequence.is_finished:
            return
        runs_last = sequence.n_in_flight == 1 and sequence.n_cached == sequence.n_tokens
        stays = self.cache.takes_snapshots and sequence.state == "running" and runs_last
        self.scheduler.remove(sequence, keep_pages=stays)
        if stays:
            self._leaving.append(sequence)
            if not self.scheduler.has_work:
                self.land()

    def _let_go(self, was_run: bool) -> None:
        """The step in flight has landed: release who ended while it ran."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if was_run:
                self.cache.commit(sequence.seq_id, sequence.tokens[-1:])
            self.cache.release(sequence.seq_id, keep_prefix=was_run)

    # ---- scoring
    def score(self, token_ids: list[int], chunk: int | None = None) -> Generator[list[np.ndarray], None, None]:
        """Logits after each of token_ids: for each piece of `chunk` tokens (None: as many as give SCORE_BYTES), float32
        [r, n_vocab] arrays in order. Nothing is reused of what was run before. The engine must be idle at the start;
        between two pieces requests may run."""
        if self.scheduler.has_work:
            raise BadInputError("logits cannot be scored while requests run")
        sequence = Sequence(
            next(self._ids), list(token_ids), len(token_ids), SamplingParams(), np.random.default_rng(0), frozenset(), 0
        )
        chunk = min(chunk or max(1, SCORE_BYTES // (4 * self.n_vocab)), self.scheduler.max_step_tokens)
        self.cache.open(sequence.seq_id, [])
        try:
            while sequence.n_uncached:
                self.land()
                n_tokens = min(chunk, sequence.n_uncached)
                self._reserve_for_score(sequence, n_tokens)
                self._begin()
                items = [PlannedTokens(sequence, n_tokens, True)]
                rows = list(self.runner.run_scored(self._batch(items, all_logits=True)))
                for _, error in self._unread(items):
                    raise error
                begin = sequence.n_cached
                self.cache.commit(sequence.seq_id, sequence.tokens[begin : begin + n_tokens])
                sequence.n_cached += n_tokens
                yield rows
        finally:
            self.cache.release(sequence.seq_id, keep_prefix=False)
            if self.store is not None:
                self.store.catch_up()

    def _reserve_for_score(self, sequence: Sequence, n_tokens: int) -> None:
        room = self.scheduler.room
        while not self.cache.extend(sequence.seq_id, n_tokens):
            if room.make(sequence.seq_id, n_tokens):
                continue
            if room.is_moving:
                room.next_step()
            else:
                n_experts = 0 if self.store is None else self.store.residency.n_resident
                beside = f" beside the {counted(n_experts, 'expert')} that stay in it" if n_experts else ""
                fewer = ", fewer --resident-experts or a higher --expert-offload-limit" if n_experts else ""
                raise ContextLengthError(
                    f"the pool cannot hold {sequence.n_cached + n_tokens} tokens{beside}; give more --memory{fewer} "
                    "or a shorter text"
                )

    def _audit_when_idle(self) -> None:
        """Audit, but let audits take no more than a hundredth of the time: that of a large pool takes as long as a
        prompt (76 ms for one of 110 GB), and the last answer waits for it."""
        started = time.monotonic()
        if started >= self._audit_after_s:
            self.audit()
            self._audit_after_s = time.monotonic() + AUDIT_PAUSE * (time.monotonic() - started)

    def audit(self) -> None:
        """Check every structure's invariants; raises AuditError with the numbers."""
        self.pool.audit()
        self.cache.audit()
        if self.store is not None:
            self.store.audit()

    def run_until(self, sequences: list[Sequence], timeout_s: float | None = None) -> None:
        """Step until all of the given sequences have ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not all(s.is_finished for s in sequences):
            self.step()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError("the sequences did not end in time")
