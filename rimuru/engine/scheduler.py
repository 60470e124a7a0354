"""Which sequences run in the next step, and how many of their tokens.

Continuous batching under a token budget: running sequences first in the order of their admission, higher priorities
before lower ones (decoding ones are one token each, so they never starve behind a prompt), then waiting ones are
admitted, fairly between clients (engine/queue.py), while budget, places and pages last. A sequence that cannot get its
pages makes the last one of that order give way; the first always advances. What who gives way has written moves to
host memory where bringing it back is cheaper than running it again.

Admission is optimistic: what is known of a request must fit. With `reserve` its longest possible answer must fit too
and gets its pages at once, so that nobody ever gives way.

Knows memory only through SequenceCache and `Room`; runs without weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, Protocol

from rimuru.base.errors import LostPagesError, NotEnoughMemoryError
from rimuru.engine.prefill_rate import PrefillRate
from rimuru.engine.queue import WaitingQueue
from rimuru.plan import PlannedTokens, StepPlan
from rimuru.request import Sequence

log = logging.getLogger(__name__)

Admission = Literal["optimistic", "reserve"]
HOLD_S = 1.0
"""Where a request would make all together slower, the first waiting one is held back no longer than this for each that
runs, while none of them ends; then it starts all the same, if it gets pages. With few long answers running, whoever
comes is soon let in; with many, some end before."""

START_TOKENS = 8
"""Requests whose prompts take several steps begin together as long as none has more of its answer."""
MOST_VAIN_TRIES = 3
"""So many steps, one after the other, may fail to start a request that has the pool for itself and fits into it."""


class Hit(Protocol):
    @property
    def n_cached_tokens(self) -> int: ...


class SequencePages(Protocol):
    """What the scheduler asks of memory/cache.py."""

    def open(self, seq_id: int, token_ids: list[int]) -> Hit: ...
    def can_extend(self, seq_id: int, n_tokens: int) -> bool: ...
    def extend(self, seq_id: int, n_tokens: int) -> bool: ...
    def retract(self, seq_id: int) -> None: ...
    def release(self, seq_id: int, keep_prefix: bool = True) -> None: ...
    def fits_alone(self, n_tokens: int, n_step_tokens: int) -> bool: ...
    def evict_prefix(self, n_pages: int) -> int: ...
    def swap_seconds(self, seq_id: int) -> float: ...
    def n_lost_tokens(self, seq_id: int) -> int: ...
    def swap_out(self, seq_id: int) -> bool: ...
    def forget(self, seq_id: int) -> None: ...


class Room(Protocol):
    """Makes pages free by giving up something cheaper than a running request: experts."""

    @property
    def is_moving(self) -> bool:
        """The last `make` failed only because this step has moved as many pages as it may: ask again in the next."""

    def next_step(self) -> None:
        """What is asked for from now on belongs to the next step."""

    def make(
        self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False, again_s: float = 0.0
    ) -> bool:
        """Free what `extend(seq_id, n_tokens)` needs; False if nothing can, or should, be given up.

        n_running: requests that a longer step would slow down; is_running: this one is among them, else it is new;
        again_s: what running the last one again adds to the others' steps, for each step that it would miss.
        """

    def admits(
        self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int, n_waiting: int, n_start_tokens: int
    ) -> bool:
        """Whether a waiting request of n_tokens (its likely answer included) should start beside n_running others,
        which will likely grow by n_promised_tokens together. It may be refused only while others run, and waits no
        longer than HOLD_S for it once it is the first.

        n_waiting: requests that wait, this one among them, as far as there are places; n_start_tokens: its likely
        answer, where all that run begin together, else 0."""

    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        """Everything that this step needs has been asked for: use what is left. Once per step.

        promised_tokens(): as in `admits`; reuse_rate: share of the requests lately that began with a known prefix.
        """


class NoRoom:
    """For engines whose pool holds nothing that could be given up."""

    is_moving = False

    def next_step(self) -> None:
        return None

    def make(
        self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False, again_s: float = 0.0
    ) -> bool:
        return False

    def admits(
        self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int, n_waiting: int, n_start_tokens: int
    ) -> bool:
        return True

    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        return None


class _LandedError(Exception):
    """A step has landed while the next one was planned: what was planned is out of date."""


class Scheduler:
    """Holds the waiting and the running sequences. `schedule` plans a step; `finish` takes a sequence out."""

    def __init__(
        self,
        cache: SequencePages,
        room: Room,
        max_step_tokens: int,
        max_sequences: int,
        admission: Admission = "optimistic",
    ) -> None:
        self.cache, self.room, self.admission = cache, room, admission
        self.max_step_tokens, self.max_sequences = max_step_tokens, max_sequences
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """Higher priorities first, then in order of admission."""
        self.n_preemptions = 0
        self.prefill = PrefillRate(lambda: self.clock())
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds since some moment; a simulation has another time."""
        self._is_start = False
        """All that run began in this step, or in the last few, whose budget their prompts used up."""
        self._is_stalled = False
        """A running one waits for pages that are being moved together, and nobody new takes them from it."""
        self._n_vain = 0
        """Tries in a row to start the only request, in vain."""
        self._held_since: float | None = None
        """Since when nobody was admitted, because the room would have the first waiting one wait."""
        self.land: Callable[[], bool] = lambda: False
        """Takes in the tokens of the step that runs; False where none does."""
        self.mean_output_tokens = 256.0
        """Of answers so far, smoothed: what is expected of those to come."""
        self.reuse_rate = 1.0
        """Share of the requests lately that began with a known prefix."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority and above, fairly between clients."""
        self.waiting.add(sequence, sequence.n_tokens + min(sequence.params.max_tokens, self.mean_output_tokens))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """The next step. Pages for every planned token are reserved when this returns."""
        self.prefill.end(is_busy=bool(self.running))
        plan = StepPlan()
        try:
            budget = self._continue_running(plan)
        except _LandedError:
            plan = StepPlan()
            budget = self._continue_running(plan)
        if not plan.preempted and not self._is_stalled:
            self._use_up(plan, self._admit(plan, budget))
        self.room.adjust(len(self.running), self._n_startable, self._promised_tokens, self.reuse_rate)
        self.room.next_step()
        self.prefill.begin(plan)
        return plan

    @property
    def _n_startable(self) -> int:
        """Requests that wait, as far as there are places."""
        return min(len(self.waiting), self.max_sequences - len(self.running))

    def _continue_running(self, plan: StepPlan) -> int:
        """Plan the running sequences in order of admission; returns the budget that is left.

        A place in the budget is kept for every decoding sequence before prompts get the rest, of which clients get
        equal shares. Going in order means that whoever has to give way has not been planned yet.
        """
        running = [(s, s.n_uncached) for s in self.running if not s.will_end]  # who ends has its last token
        prompts = [s for s, n_uncached in running if n_uncached > 1]
        prompt_budget = max(0, self.max_step_tokens - (len(running) - len(prompts)))
        shares = self._prompt_shares(prompt_budget, prompts)
        used = 0
        self._is_stalled = False
        for sequence, n_uncached in running:
            if sequence.state != "running":  # gave way to an older one
                continue
            is_prompt, client = n_uncached > 1, sequence.client
            n_tokens = min(sequence.n_runnable, prompt_budget, shares[client]) if is_prompt else 1
            if n_tokens and self._reserve(sequence, n_tokens, plan):
                plan.items.append(PlannedTokens(sequence, n_tokens, n_tokens == n_uncached))
                used += n_tokens
                if is_prompt:
                    prompt_budget -= n_tokens
                    shares[client] -= n_tokens
        return self.max_step_tokens - used

    def _prompt_shares(self, prompt_budget: int, prompts: list[Sequence]) -> dict[str, int]:
        """By client with a prompt to run, or the next one to be admitted: tokens of the step's budget."""
        clients = {s.client for s in prompts}
        if self.waiting and len(self.running) < self.max_sequences:
            clients.add(self.waiting[0].client)
        return dict.fromkeys(clients, -(-prompt_budget // max(1, len(clients))))

    def _use_up(self, plan: StepPlan, budget: int) -> None:
        """Shares that nobody took go to the prompts that are planned, as far as there are pages."""
        for i, item in enumerate(plan.items):
            if item.samples:  # all of it runs already
                continue
            sequence = item.sequence
            n_tokens = min(sequence.n_runnable, item.n_tokens + budget)
            if n_tokens > item.n_tokens and self.cache.extend(sequence.seq_id, n_tokens + sequence.n_in_flight):
                plan.items[i] = PlannedTokens(sequence, n_tokens, n_tokens == sequence.n_uncached)
                budget -= n_tokens - item.n_tokens

    def _reserve(self, sequence: Sequence, n_tokens: int, plan: StepPlan) -> bool:
        """Pages for n_tokens more tokens, taken from experts or from the last running sequence if need be.

        Raises _LandedError where somebody must give way and a step was running: its tokens have been taken in.
        """
        n_tokens += sequence.n_in_flight  # the cache counts from what it was told of
        while not self.cache.extend(sequence.seq_id, n_tokens):
            if self.room.make(sequence.seq_id, n_tokens, len(self.running), True, self._again_seconds()):
                continue
            if self.room.is_moving:  # its pages come within a step or two: nobody gives way
                self._is_stalled = True
                return False
            if self.land():
                raise _LandedError
            if len(self.running) == 1 and self._forget_prefixes(sequence):
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def preempt_youngest(self) -> bool:
        """Between steps: the last running sequence gives its pages back; False where none runs."""
        if self.land() and not self.running:
            return True
        if self.running:
            self._preempt(self.running[-1], StepPlan(), keep_prefix=False)
            return True
        return False

    def _preempt(self, sequence: Sequence, plan: StepPlan, keep_prefix: bool = True) -> None:
        """Back to its place in the queue. What it has written goes to host memory where that pays; else its full
        blocks stay findable until their pages are wanted."""
        moved = False
        if sequence.n_in_flight == 0:
            self.cache.retract(sequence.seq_id)  # it may have been planned, but nothing runs
            moved = self._swap_pays(sequence) and self.cache.swap_out(sequence.seq_id)
        if not moved:
            self.cache.release(sequence.seq_id, keep_prefix)
        self.running.remove(sequence)
        sequence.n_cached = sequence.n_in_flight = 0
        sequence.state = "waiting"
        sequence.n_preemptions += 1
        self.n_preemptions += 1
        self.waiting.put_back(sequence)
        plan.preempted.append(sequence)

    def _swap_pays(self, sequence: Sequence) -> bool:
        """Whether moving what a sequence has written out and back takes less time than running it again."""
        rate = self.prefill.tokens_per_s
        if rate <= 0.0:
            return False
        return self.cache.swap_seconds(sequence.seq_id) < self.cache.n_lost_tokens(sequence.seq_id) / rate

    def _again_seconds(self) -> float:
        """What the last one, running again or being brought back, would add to the others' steps, for each of its
        tokens that are still to come."""
        last = self.running[-1]
        lost_s = self.prefill.added_seconds(self.cache.n_lost_tokens(last.seq_id), self.max_step_tokens)
        again_s = min(self.cache.swap_seconds(last.seq_id), lost_s)
        return again_s / max(1, self._likely_growth(last))

    def _admit(self, plan: StepPlan, budget: int) -> int:
        """Start waiting sequences in order; the first one that does not fit waits, and so do those behind it. Returns
        the budget that is left."""
        self._is_start = not self.running or (self._is_start and all(s.n_output <= START_TOKENS for s in self.running))
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            n_reused = self.cache.open(sequence.seq_id, sequence.tokens).n_cached_tokens
            sequence.n_cached = n_reused
            n_tokens = min(sequence.n_runnable, budget)
            try:
                starts = self._fits(sequence, n_reused) and self.cache.extend(sequence.seq_id, n_tokens)
            except LostPagesError as error:
                log.warning("request %d: %s", sequence.seq_id, error)
                self.cache.release(sequence.seq_id, keep_prefix=False)
                self.cache.forget(sequence.seq_id)
                sequence.n_cached = 0
                continue
            if not starts:
                self.cache.release(sequence.seq_id)
                sequence.n_cached = 0
                if self.running:
                    self._is_start = False
                    return budget
                if self.room.is_moving:
                    return budget
                if self._forget_prefixes(sequence):
                    continue
                if self._may_start_later(sequence):
                    return budget
                self._fail(sequence, plan)  # it had the pool for itself
                continue
            self.waiting.pop()
            self._held_since, self._n_vain = None, 0
            if sequence.n_preemptions == 0:
                sequence.n_reused = n_reused
                self.reuse_rate += 0.1 * ((n_reused > 0) - self.reuse_rate)
            sequence.state = "running"
            self._enter(sequence)
            plan.items.append(PlannedTokens(sequence, n_tokens, n_tokens == sequence.n_uncached))
            budget -= n_tokens
        self._is_start = self._is_start and bool(self.waiting) and budget <= 0
        return budget

    def _forget_prefixes(self, sequence: Sequence) -> bool:
        """For who has the pool for itself and still lacks pages: prefixes that nobody uses and experts may both have
        to go, and neither went for it because it alone was not enough. False where no prefix is left, or in vain."""
        n_tokens = sequence.n_tokens + 1
        return self.cache.fits_alone(n_tokens, self.max_step_tokens) and self.cache.evict_prefix(n_tokens) > 0

    def _may_start_later(self, sequence: Sequence) -> bool:
        """Whether pages that the only request did not get are to be had after all, as when a copy failed that was to
        gather them."""
        self._n_vain += 1
        if self._n_vain <= MOST_VAIN_TRIES and self.cache.fits_alone(sequence.n_tokens + 1, self.max_step_tokens):
            return True
        self._n_vain = 0
        return False

    def _enter(self, sequence: Sequence) -> None:
        position = len(self.running)
        while position and self.running[position - 1].priority < sequence.priority:
            position -= 1
        self.running.insert(position, sequence)

    def _fail(self, sequence: Sequence, plan: StepPlan) -> None:
        """End a waiting sequence that no amount of waiting can help; by its length if it has written something."""
        self._end(self.waiting.pop())
        why = f"a request of {sequence.n_tokens} tokens needs more pages than the pool has"
        if sequence.n_output > 0:
            log.warning("request %d ends: %s", sequence.seq_id, why)
            sequence.finish_reason = "length"
        else:
            sequence.error = NotEnoughMemoryError(f"{why}; resize the pool, give more --memory or shorten it")
        plan.failed.append(sequence)

    def _fits(self, sequence: Sequence, n_reused: int) -> bool:
        """Whether pages for all known tokens and the next can be had now, so that a prompt is not begun in vain.
        With `reserve`: for the longest answer, and they are taken."""
        n_final = sequence.n_tokens + 1
        if self.admission == "reserve":
            n_final = min(sequence.n_prompt + sequence.params.max_tokens, sequence.max_total_tokens)
        wanted, seq_id = max(n_final, sequence.n_tokens) - n_reused, sequence.seq_id
        n_likely = wanted
        if self.admission == "optimistic":
            n_likely += self._likely_growth(sequence)
        if self.running and not self._admits(sequence, n_likely):
            return False
        while not self.cache.can_extend(seq_id, wanted):
            if not self.room.make(seq_id, wanted, len(self.running)):
                return False
        if self.admission == "reserve":
            self.cache.extend(seq_id, wanted)
            self.cache.retract(seq_id)  # the pages stay with it; nothing has been written yet
        return True

    def _admits(self, sequence: Sequence, n_tokens: int) -> bool:
        """Whether the room lets a request start beside those that run, or has held it back for long enough."""
        n_running, promised = len(self.running), self._promised_tokens()
        n_start = max(1, self._likely_growth(sequence)) if self._is_start else 0
        if self.room.admits(sequence.seq_id, n_tokens, n_running, promised, self._n_startable, n_start):
            return True
        now = self.clock()
        if self._held_since is None:
            self._held_since = now
        return now - self._held_since >= HOLD_S * len(self.running)

    def _likely_growth(self, sequence: Sequence) -> int:
        """Tokens that a sequence will likely get yet."""
        most = min(sequence.n_prompt + sequence.params.max_tokens, sequence.max_total_tokens) - sequence.n_tokens
        mean = self.mean_output_tokens
        return max(0, min(most, int(max(mean - sequence.n_output, mean / 4))))

    def _promised_tokens(self) -> int:
        """Tokens that the running sequences will likely need pages for."""
        if self.admission == "reserve":
            return 0
        return sum(self._likely_growth(sequence) for sequence in self.running)

    def remove(self, sequence: Sequence, keep_prefix: bool = True, keep_pages: bool = False) -> None:
        """Take a finished, failed or cancelled sequence out, wherever it is; its pages go back exactly once
        (keep_pages: by the caller, later)."""
        if sequence.state == "running":
            if sequence.finish_reason is not None:
                self.mean_output_tokens += 0.1 * (sequence.n_output - self.mean_output_tokens)
            self.running.remove(sequence)
            if not keep_pages:
                self.cache.release(sequence.seq_id, keep_prefix)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
        sequence.state = "finished"
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """It will not run again."""
        self.cache.forget(sequence.seq_id)
        has_run = sequence.n_preemptions > 0 or sequence.n_cached > 0 or sequence.n_output > 0
        self.waiting.settle(sequence, sequence.n_tokens if has_run else 0)
