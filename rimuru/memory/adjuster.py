"""How many experts to shrink or expand, once per step, and why: policies `paper` and `cost` (design sections 3 and 4).

`paper` is Algorithm 1. `cost` asks what a shrink costs: an expert that is not resident is read again in every step that
uses it. As long as these reads hide behind the step's compute they are free; beyond that each one makes the step
longer for everybody. It shrinks for a request only while that raises the tokens per second of all requests together.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numba

N_EXPAND_PER_STEP = 5
KEEP_SHARE = 0.8
"""A running request that gives way is run again later: what the others gain by it is worth so much."""
_SMOOTHING = 0.2
_RECORDS = 512


@numba.njit(cache=True, nogil=True, fastmath=False)
def paper_decision(need_pages: int, free_pages: int, pages_per_expert: float) -> tuple[int, int]:
    """(experts to shrink, experts to expand) for R_b = need_pages and F_b = free_pages in expert pages.

    With k = pages_per_expert:  R_b > 0: shrink ceil((R_b + 1) / k);  F_b < 2/3 k: shrink one;
    F_b > 3 k: expand min(5, floor((F_b - 3 k) / k)). k = 3 gives the paper's thresholds 2 and 9.
    """
    k = pages_per_expert
    if need_pages > 0:
        return math.ceil((need_pages + 1) / k), 0
    if free_pages < 2.0 / 3.0 * k:
        return 1, 0
    if free_pages > 3.0 * k:
        return 0, min(N_EXPAND_PER_STEP, math.floor((free_pages - 3.0 * k) / k))
    return 0, 0


@numba.njit(cache=True, nogil=True, fastmath=False)
def step_seconds(compute_s: float, link_s: float, hidden_share: float) -> float:
    """Forecast of a step: transfers of link_s seconds hide behind hidden_share of the compute, the rest adds up."""
    return compute_s + max(0.0, link_s - hidden_share * compute_s)


@numba.njit(cache=True, nogil=True, fastmath=False)
def shrink_pays(
    n_running: int, is_running: bool, compute_s: float, link_s: float, more_link_s: float, hidden_share: float
) -> bool:
    """Whether giving up experts whose reads take more_link_s seconds of every step raises the rate of all requests.

    For a new request: (n + 1) / T(more) > n / T(now). For the next pages of one that is_running, the other choice is
    to let one go: n / T(more) > KEEP_SHARE * (n - 1) / T(now).
    """
    now_s = step_seconds(compute_s, link_s, hidden_share)
    more_s = step_seconds(compute_s, link_s + more_link_s, hidden_share)
    if is_running:
        return n_running * now_s > KEEP_SHARE * (n_running - 1) * more_s
    return (n_running + 1) * now_s > n_running * more_s


@numba.njit(cache=True, nogil=True, fastmath=False)
def cost_expand(free_pages: int, pages_per_expert: float, idle_link_s: float, expert_link_s: float) -> int:
    """Experts to expand into pages that nobody wants: as `paper`, but no more at a time than the link carries beside
    the step (one at least, because an expert that is absent is read again and again)."""
    k = pages_per_expert
    n = math.floor((free_pages - 3.0 * k) / k)
    if n <= 0:
        return 0
    n_idle = int(idle_link_s / expert_link_s) if expert_link_s > 0.0 else n
    return min(n, max(1, n_idle))


@dataclass(slots=True)
class StepRates:
    """What steps cost, smoothed over the last ones. Seconds and bytes per step."""

    compute_s: float = 0.0
    """Of a step whose experts are all resident."""
    link_bytes: float = 0.0
    """Expert bytes brought because a step used them."""
    link_bytes_per_s: float = 20e9
    hidden_share: float = 0.9
    """Share of the compute behind which transfers hide."""
    n_steps: int = 0

    @property
    def link_s(self) -> float:
        return self.link_bytes / self.link_bytes_per_s

    def observe(self, step_s: float, waited_s: float, link_bytes: int, link_busy_s: float) -> None:
        """A step took step_s, of which it waited_s for transfers; they kept the link busy for link_busy_s."""
        a = _SMOOTHING if self.n_steps else 1.0
        self.n_steps += 1
        self.compute_s += a * (max(step_s - waited_s, 0.0) - self.compute_s)
        self.link_bytes += a * (link_bytes - self.link_bytes)
        if link_busy_s > 0.0 and link_bytes:
            self.link_bytes_per_s += a * (link_bytes / link_busy_s - self.link_bytes_per_s)
        if link_busy_s > 0.0 and waited_s > 0.05 * step_s and step_s > waited_s:  # how much hides shows under load only
            hidden = min(1.0, max(0.0, link_busy_s - waited_s) / (step_s - waited_s))
            self.hidden_share += a * (hidden - self.hidden_share)


@dataclass(frozen=True, slots=True)
class Record:
    """One decision. Pages and bytes are those of the experts concerned; layer and expert are -1 where none moved."""

    step: int
    action: str
    """"shrink", "expand", or "refuse": a request was not worth the experts it would have cost."""
    reason: str
    layer: int
    expert: int
    pages: int
    bytes: int


class DecisionLog:
    """The last decisions, oldest first, and counts of all of them."""

    def __init__(self, n_records: int = _RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=n_records)
        self.counts: dict[str, int] = {"shrink": 0, "expand": 0, "refuse": 0}

    def add(self, record: Record) -> None:
        self._records.append(record)
        self.counts[record.action] += 1

    def __len__(self) -> int:
        return len(self._records)

    def records(self, n: int | None = None) -> list[Record]:
        """The last n records (all that are kept where n is None)."""
        records = list(self._records)
        return records if n is None else records[len(records) - min(n, len(records)) :]

    def snapshot(self, n: int = 20) -> dict[str, Any]:
        """For the dashboard: counts since the start and the last n decisions as dicts."""
        return {"counts": dict(self.counts), "last": [asdict(record) for record in self.records(n)]}
