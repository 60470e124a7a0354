"""Which sequences run in the next step, and how many of their tokens.

Continuous batching under a token budget: running sequences first in arrival order (decoding ones are one token each,
so they never starve behind a prompt), then waiting ones are admitted while budget, places and pages last. A sequence
that cannot get its pages makes the youngest one give way (preemption by recompute); the oldest always advances.

Admission is optimistic: what is known of a request must fit. With `reserve` its longest possible answer must fit too
and gets its pages at once, so that nobody ever gives way.

Knows memory only through SequenceCache and `Room`; runs without weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.memory.specs import PageKind
from rimuru.plan import PlannedTokens, StepPlan
from rimuru.request import Sequence

Admission = Literal["optimistic", "reserve"]


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


class Room(Protocol):
    """Makes pages free by giving up something cheaper than a running request: experts."""

    def make(self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False) -> bool:
        """Free what `extend(seq_id, n_tokens)` needs; False if nothing can, or should, be given up.

        n_running: requests that a longer step would slow down; is_running: this one is among them, else it is new.
        """

    def admits(self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int) -> bool:
        """Whether a waiting request of n_tokens (its likely answer included) should start beside n_running others,
        which will likely grow by n_promised_tokens together. It may be refused only while others run."""

    def make_pages(self, needs: dict[PageKind, int]) -> bool:
        """Free so many ids of each kind for something that is worth experts, between steps; may move pages."""

    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        """Everything that this step needs has been asked for: use what is left. Once per step.

        promised_tokens(): as in `admits`; reuse_rate: share of the requests lately that began with a known prefix.
        """


class NoRoom:
    """For engines whose pool holds nothing that could be given up."""

    def make(self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False) -> bool:
        return False

    def admits(self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int) -> bool:
        return True

    def make_pages(self, needs: dict[PageKind, int]) -> bool:
        return False

    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        return None


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
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.n_preemptions = 0
        self.mean_output_tokens = 256.0
        """Of answers so far, smoothed: what is expected of those to come."""
        self.reuse_rate = 1.0
        """Share of the requests lately that began with a known prefix."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority and above."""
        position = len(self.waiting)
        while position and self.waiting[position - 1].priority < sequence.priority:
            position -= 1
        self.waiting.insert(position, sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """The next step. Pages for every planned token are reserved when this returns."""
        plan = StepPlan()
        budget = self._continue_running(plan)
        if not plan.preempted:
            self._admit(plan, budget)
        self.room.adjust(len(self.running), len(self.waiting), self._promised_tokens, self.reuse_rate)
        return plan

    def _continue_running(self, plan: StepPlan) -> int:
        """Plan the running sequences in order of admission; returns the budget that is left.

        A place in the budget is kept for every decoding sequence before prompts get the rest. Going in order means
        that whoever has to give way has not been planned yet.
        """
        decoding = sum(1 for s in self.running if s.n_uncached == 1 and not s.will_end)
        prompt_budget = max(0, self.max_step_tokens - decoding)
        used = 0
        for sequence in list(self.running):
            if sequence.state != "running" or sequence.will_end:  # gave way to an older one, or has its last token
                continue
            n_tokens = 1 if sequence.n_uncached == 1 else min(sequence.n_runnable, prompt_budget)
            if n_tokens and self._reserve(sequence, n_tokens, plan):
                plan.items.append(PlannedTokens(sequence, n_tokens, n_tokens == sequence.n_uncached))
                used += n_tokens
                prompt_budget -= n_tokens if sequence.n_uncached > 1 else 0
        return self.max_step_tokens - used

    def _reserve(self, sequence: Sequence, n_tokens: int, plan: StepPlan) -> bool:
        """Pages for n_tokens more tokens, taken from experts or from the youngest running sequence if need be."""
        n_tokens += sequence.n_in_flight  # the cache counts from what it was told of
        while not self.cache.extend(sequence.seq_id, n_tokens):
            if self.room.make(sequence.seq_id, n_tokens, len(self.running), True):
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def preempt_youngest(self) -> bool:
        """Between steps: the youngest running sequence gives its pages back; False where none runs."""
        if self.running:
            self._preempt(self.running[-1], StepPlan(), keep_prefix=False)
            return True
        return False

    def _preempt(self, sequence: Sequence, plan: StepPlan, keep_prefix: bool = True) -> None:
        """Back to the head of the queue; its full blocks stay findable until their pages are wanted."""
        self.cache.release(sequence.seq_id, keep_prefix)
        self.running.remove(sequence)
        sequence.n_cached = sequence.n_in_flight = 0
        sequence.state = "waiting"
        sequence.n_preemptions += 1
        self.n_preemptions += 1
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order; the first one that does not fit waits, and so do those behind it."""
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            sequence = self.waiting[0]
            n_reused = self.cache.open(sequence.seq_id, sequence.tokens).n_cached_tokens
            sequence.n_cached = n_reused
            n_tokens = min(sequence.n_runnable, budget)
            if not self._fits(sequence, n_reused) or not self.cache.extend(sequence.seq_id, n_tokens):
                self.cache.release(sequence.seq_id)
                sequence.n_cached = 0
                if self.running:
                    return
                self._fail(sequence, plan)  # it had the pool for itself
                continue
            self.waiting.popleft()
            if sequence.n_preemptions == 0:
                sequence.n_reused = n_reused
                self.reuse_rate += 0.1 * ((n_reused > 0) - self.reuse_rate)
            sequence.state = "running"
            self.running.append(sequence)
            plan.items.append(PlannedTokens(sequence, n_tokens, n_tokens == sequence.n_uncached))
            budget -= n_tokens

    def _fail(self, sequence: Sequence, plan: StepPlan) -> None:
        """End a waiting sequence that no amount of waiting can help."""
        self.waiting.popleft()
        sequence.error = NotEnoughMemoryError(
            f"a request of {sequence.n_tokens} tokens needs more pages than the pool has; "
            "give more --memory or shorten it"
        )
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
        if self.running and not self.room.admits(seq_id, n_likely, len(self.running), self._promised_tokens()):
            return False
        if not self.cache.can_extend(seq_id, wanted) and not (
            self.room.make(seq_id, wanted, len(self.running)) and self.cache.can_extend(seq_id, wanted)
        ):
            return False
        if self.admission == "reserve":
            self.cache.extend(seq_id, wanted)
            self.cache.retract(seq_id)  # the pages stay with it; nothing has been written yet
        return True

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
        elif sequence.state == "waiting" and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.state = "finished"
