"""Which experts are resident, how warm each one is, and who leaves or enters next.

Two orders of warmth, both kept up to date all the time, so that changing between them costs nothing:

    hotset    measured routing probability: tokens that chose the expert, older ones counting less and less. An offline
              profile is where it starts. Residents are a prefix of this order: nobody enters who is colder than the
              one who would have to leave.
    recency   the step of the last use; among equals the measured probability. Whoever was just read enters.

`auto` takes recency while few tokens run together and the hot set beyond that (figures in tools/LOG.md).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from rimuru.base.errors import AuditError
from rimuru.experts.residency_jit import chosen_by, extremes, in_order, note_cells, note_choices, note_counts, warmth
from rimuru.memory.specs import ExpertLayout

ResidencyPolicy = Literal["auto", "hotset", "recency"]
NEVER = -1
DECAY_TOKENS = 2000.0
"""A choice counts 1/e after so many tokens."""
PROFILE_TOKENS = 500.0
"""What an offline profile weighs against tokens that were seen while serving."""
AUTO_RECENCY_TOKENS = 64.0
"""Mean tokens in a step up to which `auto` goes by recency."""
_SMOOTHING = 0.05
_RESCALE_AT = 1e100


class Residency:
    """State of every (layer slot, expert) as arrays [n_slots, max experts].

    Stamps are step numbers, not times: within a step all layers look equally recent. Plain recency over layers would
    throw out exactly the layers that come next, because they were used the longest ago.
    """

    def __init__(self, layout: ExpertLayout, policy: ResidencyPolicy = "auto") -> None:
        self.layout, self.policy = layout, policy
        n_slots = len(layout.layers)
        width = max(layer.n_experts for layer in layout.layers)
        self._n_experts = np.array([layer.n_experts for layer in layout.layers], np.int64)
        self.exists = np.arange(width)[None, :] < self._n_experts[:, None]
        self.resident = np.zeros((n_slots, width), np.bool_)
        self.last_used = np.full((n_slots, width), NEVER, np.int64)
        self.scores = np.zeros((n_slots, width), np.float64)
        """Decayed counts of tokens (`weights`), times `_weight`."""
        self.n_chosen = np.zeros((n_slots, width), np.int64)
        """Tokens that chose each expert since the start, all counting alike."""
        self.n_pages = np.array([layer.n_pages for layer in layout.layers], np.int64)
        self.step = 0
        self.step_tokens = 1.0
        """Smoothed number of tokens in a step."""
        self.n_requests = 0
        """That run now, prompts among them; 0 where nobody says it."""
        self._weight = 1.0
        self._seen_tokens = 0.0

    # ---- what was used
    def begin_step(self, n_tokens: int = 1, n_noted: int | None = None) -> None:
        """A step of n_tokens tokens starts: older choices count less. n_noted: tokens whose choices were noted since
        the last call, where a prompt's count for fewer in n_tokens; None = as many."""
        self.step += 1
        self.step_tokens += _SMOOTHING * (n_tokens - self.step_tokens)
        growth = math.exp(n_tokens / DECAY_TOKENS)
        self._weight *= growth
        self._seen_tokens = self._seen_tokens / growth + (n_tokens if n_noted is None else n_noted)
        if self._weight > _RESCALE_AT:
            self.scores /= self._weight
            self._weight = 1.0

    def note(self, slot: int, ids: np.ndarray) -> np.ndarray:
        """Note what the running step's tokens choose in a layer, int32 of any shape; the experts int64 [n], ascending,
        each once."""
        flat = ids.reshape(-1)
        return note_choices(self.last_used, self.scores, self.n_chosen, slot, flat, self.step, self._weight)

    def note_all(self, counts: np.ndarray) -> None:
        """Note what steps up to now have used: tokens that chose each expert, int [n_slots, width]."""
        note_counts(self.last_used, self.scores, self.n_chosen, counts, self.step, self._weight)

    def note_cells(self, cells: np.ndarray, counts: np.ndarray) -> None:
        """The same for the experts of these flat indices int64 [n] only; counts unsigned [n]."""
        note_cells(self.last_used, self.scores, self.n_chosen, cells, counts, self.step, self._weight)

    def weights(self) -> np.ndarray:
        """Decayed counts of tokens, float64 [n_slots, width]."""
        return self.scores / self._weight

    def load_profile(self, probabilities: np.ndarray) -> None:
        """Start from measured probabilities, float [n_slots, width]: how likely a token chooses each expert."""
        self.scores += probabilities * PROFILE_TOKENS * self._weight
        self._seen_tokens += PROFILE_TOKENS

    def probabilities(self) -> np.ndarray:
        """Measured probability that a token chooses each expert, float64 [n_slots, width]."""
        return self.scores / self._scored_tokens

    @property
    def _scored_tokens(self) -> float:
        """Of all tokens that scores are of, as they count in them."""
        return self._weight * max(self._seen_tokens, 1.0)

    def use_probability(self, indices: np.ndarray, n_tokens: float) -> np.ndarray:
        """Probability that a step of n_tokens unrelated tokens uses each of these experts (flat indices)."""
        chosen = self.scores.reshape(-1)[indices] / self._scored_tokens
        # 1 - (1 - p) ** n, in half the time of a power
        return -np.expm1(n_tokens * np.log1p(-np.minimum(chosen, 1.0 - 1e-12)))

    # ---- who is warm
    @property
    def n_together(self) -> float:
        """Tokens of a step of answers: known at once where requests are counted. Tokens of steps, pieces of prompts
        among them, take a hundred steps to say so."""
        return float(self.n_requests) or self.step_tokens

    @property
    def by_recency(self) -> bool:
        """The order that holds now."""
        return self.policy == "recency" or (self.policy == "auto" and self.step_tokens <= AUTO_RECENCY_TOKENS)

    def keys(self, slot: int | None = None) -> np.ndarray:
        """Warmth of a layer's experts, float64 [width], or of all, [n_slots, width]: more is warmer."""
        rows = slice(None) if slot is None else slice(slot, slot + 1)
        out = np.empty_like(self.scores[rows])
        warmth(self.last_used[rows], self.scores[rows], 1.0 / self._scored_tokens, self.by_recency, out)
        return out if slot is None else out[0]

    def exchanges(self, slot: int, in_use: np.ndarray, newcomers: np.ndarray) -> list[tuple[int, int]]:
        """(newcomer, victim) for those of the newcomers, the hottest first, to whom a colder resident of the layer may
        give way; nobody who is in_use (bool [width]) leaves."""
        keys = self.keys(slot)
        leaving = np.flatnonzero(self.resident[slot] & ~in_use)
        leaving = leaving[np.argsort(keys[leaving], kind="stable")]
        entering = newcomers[np.argsort(-keys[newcomers], kind="stable")]
        n = min(len(leaving), len(entering))
        if not self.by_recency:
            n = int(np.count_nonzero(keys[leaving[:n]] < keys[entering[:n]]))
        return list(zip(entering[:n].tolist(), leaving[:n].tolist(), strict=True))

    def coldest(self, n_experts: int) -> list[tuple[int, int]]:
        """(slot, expert) of the n coldest residents over all layers, the coldest first."""
        return [self.place_of(index) for index in self.coldest_indices(n_experts)]

    def coldest_indices(self, n_experts: int) -> np.ndarray:
        """The same as flat indices slot * width + expert, int64."""
        return self._extremes(True, n_experts)

    def hottest_absent(self, n_experts: int) -> list[tuple[int, int]]:
        """(slot, expert) of the n hottest non-residents, the hottest first; never used ones last, low ids first."""
        return [self.place_of(index) for index in self.hottest_absent_indices(n_experts)]

    def hottest_absent_indices(self, n_experts: int) -> np.ndarray:
        """The same as flat indices, int64."""
        return self._extremes(False, n_experts)

    def _extremes(self, of_residents: bool, n_experts: int) -> np.ndarray:
        return extremes(
            self.last_used, self.scores, self.resident, self._n_experts, 1.0 / self._scored_tokens, self.by_recency,
            of_residents, n_experts,
        )  # fmt: skip

    def coldest_first(self) -> np.ndarray:
        """Flat indices int64 of all experts, resident or not, the coldest first."""
        return in_order(self.keys().reshape(-1), self.exists.reshape(-1))

    def absent_of(self, indices: np.ndarray) -> np.ndarray:
        """Those of the experts (flat indices int64) who are not resident, in their order."""
        return chosen_by(indices, self.resident.reshape(-1), False)

    def hottest(self) -> list[tuple[int, int]]:
        """(slot, expert) of all experts, the hottest first: the order in which to fill an empty pool."""
        keys = np.where(self.exists, self.keys(), -np.inf).reshape(-1)
        return [self.place_of(index) for index in np.argsort(-keys, kind="stable")[: int(self.exists.sum())]]

    def place_of(self, index: int) -> tuple[int, int]:
        """(slot, expert) of a flat index."""
        slot, expert = divmod(int(index), self.resident.shape[1])
        return slot, expert

    # ---- reports
    @property
    def n_resident(self) -> int:
        return int(np.count_nonzero(self.resident))

    def resident_per_layer(self) -> list[int]:
        return [int(n) for n in self.resident.sum(axis=1)]

    def audit(self) -> None:
        """Raise unless every flag belongs to an expert that exists."""
        wrong = self.resident & ~self.exists
        if wrong.any():
            slot = int(np.flatnonzero(wrong.any(axis=1))[0])
            raise AuditError(f"layer slot {slot} has residents beyond its {self.layout.layers[slot].n_experts} experts")
