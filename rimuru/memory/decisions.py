"""What moved in the pool, and why: records of decisions, and of the experts that steps brought in (fills).

A device decides thousands of fills a second, which the host hears of in reports. They stay numbers in an array, apart
from the decisions, and become records when somebody asks for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rimuru.memory.specs import ExpertLayout

_RECORDS = 512
_FILLS = 2048
N_FILL_FIELDS = 6
STEP, SLOT, EXPERT, VICTIM, PLACE, IS_FORETOLD = range(N_FILL_FIELDS)
"""Fields of FillLog.rows; VICTIM is -1 where nobody had to leave, PLACE where the host decides, which knows none."""


@dataclass(frozen=True, slots=True)
class Record:
    """One decision. Pages and bytes are those of the experts concerned; layer and expert are -1 where none moved."""

    step: int
    """The engine's. Fills that a device decides come with the number of steps in which it brought in experts: of these,
    the last one before the report was asked for is known, and earlier ones are counted back from it. So a fill before
    a step that failed, or in which every expert was resident, can be told too late by as many steps as that were,
    within the steps of one report."""
    action: str
    """"shrink", "expand"; "refuse": a request was not worth the experts it would have cost; "move": pages went to
    other places in the pool, so that larger ones became free; "fill": a step read the expert into the pool because
    its tokens chose it, or were foretold to."""
    reason: str
    layer: int
    expert: int
    pages: int
    bytes: int


class FillLog:
    """Experts that came into the pool by fills: the last ones, oldest first, and counts of all of them."""

    def __init__(self, layout: ExpertLayout | None = None, n_kept: int = _FILLS) -> None:
        layers = () if layout is None else layout.layers
        self._layers = layers
        page_bytes = 0 if layout is None else layout.page_bytes
        self.expert_bytes = np.array([layer.n_pages * page_bytes for layer in layers], np.int64)
        """Of an expert of each layer, in whole pages."""
        self.rows = np.zeros((n_kept, N_FILL_FIELDS), np.int64)
        """Fill number n of those that are known lies at n % n_kept."""
        self.per_layer = np.zeros(len(layers), np.int64)
        """Known fills of each layer."""
        self.n_known = 0
        self.n_foretold = 0
        """Of the known ones."""
        self.n_lost = 0
        """Of which nothing is known but that they happened: more than the device's log holds, between two reports."""

    @property
    def n(self) -> int:
        return self.n_known + self.n_lost

    def layer_number(self, slot: int) -> int:
        return self._layers[slot].layer

    def add(self, step: int, slot: int, expert: int, victim: int = -1) -> None:
        """One that the host decided: an expert was missed. victim: who had to leave for it, -1 = nobody."""
        self.rows[self.n_known % len(self.rows)] = step, slot, expert, victim, -1, 0
        self.per_layer[slot] += 1
        self.n_known += 1

    def records(self, n: int) -> list[Record]:
        """The last n of those that are kept."""
        first = max(0, self.n_known - min(n, len(self.rows)))
        return [self._record(*self.rows[number % len(self.rows)].tolist()) for number in range(first, self.n_known)]

    def _record(self, step: int, slot: int, expert: int, victim: int, place: int, is_foretold: int) -> Record:
        layer, n_bytes = self._layers[slot], int(self.expert_bytes[slot])
        where = "into an empty place" if victim < 0 else f"in place of expert {victim}"
        reason = f"{'foretold' if is_foretold else 'missed'}, {where}"
        return Record(step, "fill", reason, layer.layer, expert, layer.n_pages, n_bytes)


class DecisionLog:
    """The last decisions, oldest first, and counts of all of them; fills are apart, so that they crowd nothing out."""

    def __init__(self, n_records: int = _RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=n_records)
        self._counts: dict[str, int] = {"shrink": 0, "expand": 0, "refuse": 0, "move": 0}
        self.fills = FillLog()
        """The store's."""

    def add(self, record: Record) -> None:
        self._records.append(record)
        self._counts[record.action] += 1

    def __len__(self) -> int:
        return len(self._records)

    @property
    def n(self) -> int:
        """Decisions since the start, fills not among them."""
        return sum(self._counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """Of every action since the start."""
        return {**self._counts, "fill": self.fills.n}

    def records(self, n: int | None = None) -> list[Record]:
        """The last n decisions (all that are kept where n is None), fills not among them."""
        records = list(self._records)
        return records if n is None else records[len(records) - min(n, len(records)) :]

    def snapshot(self, n: int = 20) -> dict[str, Any]:
        """For the dashboard: counts since the start, the last n decisions and the last n fills as dicts."""
        fills = self.fills
        return {
            "counts": self.counts,
            "last": [asdict(record) for record in self.records(n)],
            "fills": {
                "last": [asdict(record) for record in fills.records(n)],
                "foretold": fills.n_foretold,
                "unrecorded": fills.n_lost,
            },
        }
