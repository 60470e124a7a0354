"""How much may be moved within the pool in one step: the steps of requests wait for it."""

from __future__ import annotations

from rimuru.base.units import KIB, MIB

STEP_MOVE_BYTES = {"cuda": 256 * MIB, "cpu": 64 * MIB}
"""By device. A card of 1 TB/s copies so much in 0.5 ms, and queueing its 600 pages of 432 KiB takes another 3 to 6,
about a step; RAM at 10 GB/s needs 13 ms. Most requests need less: the states of one take four huge pages of
18 MiB (Qwen3.5-35B)."""
LEAST_COPY_BYTES = 256 * KIB
"""A copy counts as at least so much: queueing it takes as long (some 5 us), however small the page."""


def copy_cost(n_bytes: int) -> int:
    """What a copy of so many bytes counts as."""
    return max(n_bytes, LEAST_COPY_BYTES)


class MoveBudget:
    """What is left of a step's moves. The first place that a step empties, a huge page at most, is never refused."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.spent_bytes = most_bytes, 0
        self.n_steps = 0
        self.is_waiting = False
        """Pages that somebody asked for were not all formed, because this step has moved enough: ask again in the
        next one, and let nobody give way for them meanwhile."""

    @property
    def left_bytes(self) -> int:
        """What further copies of this step may count as."""
        return max(0, self.most_bytes - self.spent_bytes)

    def spend(self, cost_bytes: int) -> None:
        """Moves of this cost were made."""
        self.spent_bytes += cost_bytes

    def next_step(self) -> None:
        """All is planned that one step needs: what moves from now on is the next one's."""
        self.spent_bytes = 0
        self.is_waiting = False
        self.n_steps += 1
