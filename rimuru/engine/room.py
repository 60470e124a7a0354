"""Experts as the reserve of requests: what the scheduler asks when pages are short, and what quiet steps give back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import numpy as np

from rimuru.base.units import ceil_div, counted
from rimuru.engine.compacting_room import CompactingRoom
from rimuru.memory.adjuster import cost_expand, offload_target, paper_decision, shrink_pays
from rimuru.memory.cache import SequenceCache
from rimuru.memory.decisions import Record
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import PageKind, PoolLayout

log = logging.getLogger(__name__)

ElasticPolicy = Literal["paper", "cost"]
PROMISE_SHARE = 0.25
"""Of what running requests will likely grow by, so much is kept from new ones: others will have ended by then, and
giving way is cheap while prompts are short (tools/LOG.md)."""
REUSE_WORTH = 0.05
"""Where fewer of the requests begin with a known prefix, experts are worth more than prefixes."""
QUIET_STEPS = 8
"""After so many steps in which free pages were enough, prefixes may give way to experts."""
RECLAIM_STEPS = 4
"""How often they do: seldom and many at once, which costs less."""
TARGET_STEPS = 32
"""How often policy `cost` computes how many experts should be absent; when more come to run than there were at the
last time, after QUIET_STEPS."""
ASSUMED_SPEED = 64.0
"""Before a step was measured: how much faster a step is computed than its experts would come over the link."""
SURPRISES = (0.2, 8.0)
"""Bounds of what one measurement of `_surprise` counts as."""


class ExpertRoom(CompactingRoom):
    """Shrinks the coldest experts for a request's pages, and expands the hottest into pages that nobody wants.

    `offload_limit`: most experts that may be non-resident; None = all of them.
    """

    def __init__(
        self,
        cache: SequenceCache,
        pool: PagePool,
        layout: PoolLayout,
        offload_limit: int | None,
        policy: ElasticPolicy = "paper",
    ) -> None:
        super().__init__(cache, pool, layout)
        assert layout.expert is not None
        self.offload_limit, self.policy = offload_limit, policy
        self.n_experts = layout.expert.n_experts
        self.pages_per_expert = layout.expert.n_pages / self.n_experts
        self.expert_bytes = self.pages_per_expert * layout.expert.page_bytes
        self._is_short = False
        """In this step a request wanted more pages than were free (R_b > 0)."""
        self._last_short = -QUIET_STEPS
        self.target = 0
        """Policy `cost`: how many experts should be absent."""
        self._surprise = 1.5
        """Bytes that were read for absent experts, against those that their probabilities foretell."""
        self._n_steps = 0
        self._target_from, self._target_for = -TARGET_STEPS, 0
        """The step in which `target` was computed, and for how many requests."""
        self._reuse_rate = 1.0
        self._refused, self._waiting_pages = -1, 0.0
        """The request refused last, and what the first waiting one wants where it was refused."""
        self._pages_per_token = 0.0
        if layout.kv is not None:
            tokens_bytes = sum(layout.kv.page_bytes / group.page_tokens for group in layout.kv.groups)
            self._pages_per_token = tokens_bytes / layout.expert.page_bytes
        self._kv_per_page = 1
        if layout.kv is not None and layout.kv.parent == "expert":
            self._kv_per_page = layout.expert.page_bytes // layout.kv.page_bytes

    @property
    def n_shrunk(self) -> int:
        """Experts given up since the start."""
        return self.decisions.counts["shrink"]

    # ---- need
    def make(
        self, seq_id: int, n_tokens: int, n_running: int = 0, is_running: bool = False, again_s: float = 0.0
    ) -> bool:
        """See engine.scheduler.Room. Gives up as many experts as the policy says, or none where those that may leave
        are not enough; a state's huge page is then gathered by moving what else lies in it."""
        needed = self.pages_short(seq_id, n_tokens)
        if needed == 0:
            if self._compact(seq_id, n_tokens):
                return True
            if self.is_moving:
                self._is_short = True  # no expert takes what has been gathered
                return False
            needed = 1  # kinds of pages compete for what is free, or loading buffers stand in the way
        n_shrink, _ = paper_decision(needed, self.free_pages, self.pages_per_expert)
        most = self._most_shrinks()
        if n_shrink > most and needed <= self._pages_of(most):
            n_shrink = most
        self._is_short = True
        if n_shrink > most or n_shrink == 0:
            return self._compact(seq_id, n_tokens)
        if self.policy == "cost" and is_running and not self._keeps_running(n_shrink, n_running, again_s):
            return self._compact(seq_id, n_tokens)
        n_shrunk = self.shrink(n_shrink, f"request {seq_id} needs {counted(needed, 'page')}")
        return self._compact(seq_id, n_tokens) or n_shrunk > 0

    def _keeps_running(self, n_shrink: int, n_running: int, again_s: float) -> bool:
        """Policy `cost`: whether n experts give way before a running request does."""
        assert self.store is not None
        residency, rates = self.store.residency, self.store.rates
        if 2.0 * rates.measured_requests < n_running:  # what steps of so many take is not known yet
            return True
        more_s = self._link_seconds(residency.coldest_indices(n_shrink), n_running)
        n_back = round(self._used_pages() / n_running / self.pages_per_expert)
        back_s = self._link_seconds(residency.hottest_absent_indices(n_back), n_running)
        let_go_s = max(0.0, rates.link_s - back_s)
        if shrink_pays(n_running, rates.compute_s, rates.link_s + more_s, let_go_s, rates.exposed_share, again_s):
            rates.link_bytes += more_s * rates.link_bytes_per_s
            return True
        experts, requests = counted(n_shrink, "expert"), counted(n_running, "request")
        self._refuse(f"{experts} would cost {more_s * 1e3:.1f} ms of every step of {requests}")
        return False

    def _used_pages(self) -> float:
        """Expert pages' worth of what running requests hold."""
        assert self.layout.expert is not None
        allocator = self.pool.allocator
        used = sum(allocator.bytes_in_use(kind) for kind in ("kv", "ssm", "conv")) / self.layout.expert.page_bytes
        return max(0.0, used - self._unused_prefix_pages())

    def admits(
        self, seq_id: int, n_tokens: int, n_running: int, n_promised_tokens: int, n_waiting: int, n_start_tokens: int
    ) -> bool:
        """See engine.scheduler.Room. Policy `cost`: the request, and what the others will still take, must fit in the
        free pages and in those of the experts that should be absent. (Were more absent than should be, free pages
        are theirs first.)"""
        if self.policy == "paper" or n_running == 0:
            return True
        n_pages = self._request_pages(seq_id, n_tokens)
        wanted = n_pages + PROMISE_SHARE * n_promised_tokens * self._pages_per_token
        if wanted <= self._worth_giving():
            return True
        self._waiting_pages = n_pages
        if n_start_tokens:  # the target is of other times
            self._set_target(n_running, n_waiting, n_promised_tokens, 1.0 / n_start_tokens)
        if wanted <= (budget := self._worth_giving()):
            return True
        if self._refused != seq_id:
            self._refused = seq_id
            needs = counted(round(wanted), "page")
            self._refuse(f"request {seq_id} would need {needs}, worth giving: {max(0.0, budget):.0f}")
        return False

    def _worth_giving(self) -> float:
        """Pages that a new request may have."""
        assert self.store is not None
        n_absent = self.n_experts - self.store.residency.n_resident
        return self.free_pages + self._unused_prefix_pages() + (self.target - n_absent) * self.pages_per_expert

    def _is_target_old(self, n_running: int, n_waiting: int) -> bool:
        """Whether the target is to be computed again, now that so many requests run and wait."""
        age = self._n_steps - self._target_from
        is_urgent = n_waiting > 0 or n_running > self._target_for
        return age >= TARGET_STEPS or (is_urgent and age >= QUIET_STEPS)

    def _set_target(self, n_running: int, n_waiting: int, n_promised_tokens: int, starts_per_step: float = 0.0) -> None:
        """Policy `cost`: how many experts should be absent, from what steps cost now. (See offload_target.)"""
        assert self.store is not None and self.layout.expert is not None
        residency, rates = self.store.residency, self.store.rates
        n_absent = self.n_experts - residency.n_resident
        if n_running == 0:
            self.target = n_absent
            return
        n_measured = max(1.0, rates.measured_requests)  # when requests come, rates are of those before
        used = self._used_pages()
        without = self.free_pages + used - n_absent * self.pages_per_expert
        per_request = (used + n_promised_tokens * self._pages_per_token) / n_running
        measured_used = used * n_measured / n_running
        order = residency.coldest_first()
        expert_s = self.expert_bytes / rates.link_bytes_per_s
        absent = residency.absent_of(order)
        expected_s = float(residency.use_probability(absent, n_measured).sum()) * expert_s
        if expected_s > 0.0 and rates.n_steps and not starts_per_step:  # the coldest are never as cold as measured
            lowest, most = SURPRISES
            self._surprise += 0.25 * (min(most, max(lowest, rates.link_s / expected_s)) - self._surprise)
        uses = residency.use_probability(order, 1)
        compute_s = rates.compute_s if rates.n_steps else float(uses.sum()) * expert_s / ASSUMED_SPEED
        per_waiting = self._waiting_pages if starts_per_step else max(per_request, self._waiting_pages)
        self.target = offload_target(
            uses,
            expert_s,
            self.pages_per_expert,
            float(without),
            max(per_request, 1e-3),
            float(n_running + n_waiting),
            n_measured,
            measured_used / (measured_used + residency.n_resident * self.pages_per_expert),
            compute_s,
            rates.exposed_share,
            self._surprise,
            float(n_running),
            max(per_waiting, 1e-3),
            starts_per_step,
        )

    def _link_seconds(self, experts: np.ndarray, n_tokens: int) -> float:
        """Link time of a step that these experts (flat indices) take while they are absent."""
        assert self.store is not None
        used = float(self.store.residency.use_probability(experts, n_tokens).sum())
        return used * self._surprise * self.expert_bytes / self.store.rates.link_bytes_per_s

    def _request_pages(self, seq_id: int, n_tokens: int) -> float:
        """Expert pages' worth of all that a request of so many further tokens takes."""
        assert self.layout.expert is not None
        needs, allocator = self.cache.pages_needed(seq_id, n_tokens), self.pool.allocator
        n_bytes = sum(n * allocator.unit_bytes(kind) for kind, n in needs.items())
        return n_bytes / self.layout.expert.page_bytes

    def _refuse(self, reason: str) -> None:
        assert self.store is not None
        self.decisions.add(Record(self.store.residency.step, "refuse", reason, -1, -1, 0, 0))

    def pages_short(self, seq_id: int, n_tokens: int) -> int:
        """R_b: expert pages that the request needs beyond what is free. A state needs whole huge pages, which can be
        gathered from free expert pages that lie apart."""
        return self._short_of(self.cache.pages_needed(seq_id, n_tokens))

    def make_pages(self, needs: dict[PageKind, int], is_worth_experts: bool) -> bool:
        """See CompactingRoom.make_pages."""
        self.pool.moves.is_waiting = False
        needed = self._short_of(needs)
        for _ in range(3):  # gathering may split a further page
            if not needed and super().make_pages(needs, is_worth_experts):
                return True
            if self.is_moving:
                return False
            n_shrink, _ = paper_decision(max(needed, 1), self.free_pages, self.pages_per_expert)
            if not is_worth_experts or self._reuse_rate < REUSE_WORTH or n_shrink > self._most_shrinks():
                return False
            self._is_short = True
            self.shrink(n_shrink, f"states, and prefixes kept for reuse, need {counted(needed, 'page')}")
            needed = self._short_of(needs)
        return super().make_pages(needs, is_worth_experts)

    def _short_of(self, needs: dict[PageKind, int]) -> int:
        allocator = self.pool.allocator
        wanted = self._parents_wanted(needs)
        n_pages = wanted["expert"]
        if wanted["ssm"]:
            per_huge = allocator.per_huge("ssm")
            in_split = allocator.free_pages("ssm") - allocator.levels()["l1"]["free"] * per_huge
            n_pages += ceil_div(max(0, wanted["ssm"] - in_split), per_huge) * allocator.per_huge("expert")
        return max(0, n_pages - self.free_pages)

    @property
    def free_pages(self) -> int:
        """F_b: free expert pages."""
        return self.pool.allocator.free_pages("expert")

    def _most_shrinks(self) -> int:
        """Experts that may still be given up."""
        assert self.store is not None
        n_resident = self.store.residency.n_resident
        if self.offload_limit is None:
            return n_resident
        return min(n_resident, max(0, self.offload_limit - (self.n_experts - n_resident)))

    def _pages_of(self, n_experts: int) -> int:
        """Pages that so many experts would give up: of all that are resident exactly, of fewer about."""
        assert self.store is not None
        if n_experts == self.store.residency.n_resident:
            return self.pool.allocator.pages_in_use("expert") - self.pool.n_buffer_pages
        return int(n_experts * self.pages_per_expert)

    def shrink(self, n_experts: int, reason: str = "the pool shrinks") -> int:
        """Give up to n_experts of the coldest experts, within the limit; returns how many went."""
        assert self.store is not None
        n_experts = min(n_experts, self._most_shrinks())
        victims = self.store.shrink(n_experts) if n_experts > 0 else []
        self._record("shrink", reason, victims)
        return len(victims)

    # ---- once per step
    def adjust(self, n_running: int, n_waiting: int, promised_tokens: Callable[[], int], reuse_rate: float) -> None:
        """See engine.scheduler.Room. Nobody lacks pages: keep a small reserve, give the rest to experts."""
        super().adjust(n_running, n_waiting, promised_tokens, reuse_rate)
        assert self.store is not None
        is_short, self._is_short = self._is_short, False
        self._reuse_rate = reuse_rate
        self._waiting_pages *= n_waiting > 0
        if self.policy == "cost" and self._is_target_old(n_running, n_waiting):
            self._set_target(n_running, n_waiting, promised_tokens())
            self._target_from, self._target_for = self._n_steps, n_running + n_waiting
        self._n_steps += 1
        if is_short:
            self._last_short = self._n_steps
            return
        is_quiet = self._n_steps - self._last_short > QUIET_STEPS
        if reuse_rate < REUSE_WORTH and is_quiet and self._n_steps % RECLAIM_STEPS == 0:
            self._reclaim_prefixes()
        free, k = self.free_pages, self.pages_per_expert
        if self.policy == "paper":
            n_shrink, _ = paper_decision(0, free + self._unused_prefix_pages(), k)
            _, n_expand = paper_decision(0, free, k)
            if n_shrink and n_running:
                self.shrink(1, f"{_free_text(free)}, fewer than the reserve for the next request")
        else:  # no reserve: whoever needs pages gets them when that pays, and admission would live on a reserve
            rates = self.store.rates
            idle_s = max(0.0, rates.compute_s - rates.link_s)
            expert_s = 0.0 if self.store.expands_freely else self.expert_bytes / rates.link_bytes_per_s
            n_expand = cost_expand(free, k, idle_s, expert_s)
        if n_expand:
            self._record("expand", _free_text(free), self.store.expand(n_expand))

    def _reclaim_prefixes(self) -> None:
        """Prefixes that nobody comes back for give their pages to experts, about one expert's per step, the oldest
        first."""
        assert self.store is not None and self.layout.expert is not None
        n_pages = int(np.ceil(RECLAIM_STEPS * self.pages_per_expert))
        n_wanted = min(n_pages, 2 * n_pages - self.free_pages)
        is_absent = self.store.residency.n_resident < self.n_experts
        if is_absent and n_wanted > 0 and self._unused_prefix_pages() > 0:
            self.cache.evict_prefix(n_wanted * self._kv_per_page)

    def _unused_prefix_pages(self) -> int:
        """Expert pages that requests could have by giving up prefixes that nobody uses."""
        return self.cache.reclaimable_pages("kv") // self._kv_per_page

    def may_grow(self, n_pages: int) -> bool:
        """Whether free pages are plenty (F_b > 3 k), so that a missed expert may stay."""
        free = self.free_pages
        return not self._is_short and free > 4 * self.pages_per_expert and free >= n_pages

    def _record(self, action: str, reason: str, places: list[tuple[int, int]]) -> None:
        layout = self.layout.expert
        assert layout is not None and self.store is not None
        for slot, expert in places:
            layer = layout.layers[slot]
            n_bytes = layer.n_pages * layout.page_bytes
            self.decisions.add(
                Record(self.store.residency.step, action, reason, layer.layer, expert, layer.n_pages, n_bytes)
            )
            log.debug("%s expert %d of block %d: %s", action, expert, layer.layer, reason)


def _free_text(n_pages: int) -> str:
    return f"{counted(n_pages, 'page')} {'is' if n_pages == 1 else 'are'} free"
