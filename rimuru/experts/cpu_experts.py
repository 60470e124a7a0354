"""Missed experts that the CPU computes, from where they lie in host memory, while the link brings the others.

    device   router -> ids, weights, inputs -> | ids and weights without the CPU's -> experts -> sum -> + the CPU's
    host                            copies     | chooses; computes the CPU's experts, sums them by token ----^

In place of an expert that the CPU takes, a token names another of its experts once more, with weight 0: kernels, and
what fetches missed experts, know nothing of all this. Layers wait for the router's ids, so such a step is not replayed
as a graph; whether that pays is found out by timing steps (experts/cpu_share.py). The CPU's kernels round differently
than a device's, which is why nothing is shared where results must not depend on placement.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from rimuru.arch.spec import MoeSpec
from rimuru.experts.cpu_share import ShareTuner
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.memory.adjuster import MOST_DECODE_TOKENS
from rimuru.ops.base import Act, Array, ExpertTable, MoeScratch, Ops


def choose_pairs(ids: np.ndarray, is_missed: np.ndarray, share: float) -> np.ndarray:
    """Which (token, slot) pairs the CPU computes, bool as ids [T, k]: of the missed experts (bool [n_experts]) the
    given share, those that the fewest tokens chose, but never all that a token chose."""
    valid = ids >= 0
    counts = np.bincount(ids[valid], minlength=len(is_missed))
    missed = np.flatnonzero(is_missed & (counts > 0))
    taken = np.zeros(len(is_missed), np.bool_)
    taken[missed[np.argsort(counts[missed], kind="stable")[: int(share * len(missed))]]] = True
    for row in ids:
        if (row >= 0).all() and taken[row].all():
            taken[row[0]] = False
    return valid & taken[ids]


def without_pairs(ids: np.ndarray, weights: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights [T, k] in which these pairs name another expert of their token, with weight 0."""
    first_kept = ids[np.arange(len(ids)), (~pairs).argmax(axis=1)]
    return np.where(pairs, first_kept[:, None], ids), np.where(pairs, np.float32(0.0), weights)


@dataclass(slots=True)
class Lent:
    """What the CPU computes of a layer."""

    ops: Ops
    target: Array
    """float32 [T, width], for the result."""
    ones: Array
    """float32 [T, 1]"""
    result: Future[np.ndarray]

    def add_to(self, out: Array, scale: float) -> None:
        """out[t] += scale * the CPU's part of the sum over experts."""
        self.ops.assign(self.target, self.result.result())
        summand = MoeScratch(self.target, SimpleNamespace(left=None))
        self.ops.moe_combine(summand, self.ones, out, True, scale)


class CpuExperts:
    """Shares steps of a DeviceExpertStore that decides on its residents by itself. cpu: the CPU's verbs.

    widths: input and output width of each layer slot's experts.
    """

    def __init__(self, store: DeviceExpertStore, cpu: Ops, specs: list[MoeSpec], widths: list[int]) -> None:
        self.store, self.ops, self.cpu = store, store.ops, cpu
        self.tuner = ShareTuner(store.rates.forecasts)
        self.share = 0.0
        """Of the running step (ways.StepWays)."""
        self.n_computed = 0
        """Experts that the CPU computed, once for each step and layer that used them."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rimuru-cpu-experts")
        self._tables = [self._table(slot) for slot in range(len(specs))]
        n_tokens = MOST_DECODE_TOKENS
        self._target = self.ops.empty((n_tokens, max(widths)), np.float32)
        self._ones = self.ops.upload(np.ones((n_tokens, 1), np.float32))
        self._acts = {width: cpu.act(n_tokens, width) for width in set(widths)}
        self._scratch = {
            (spec.width, width): cpu.moe_scratch(n_tokens, spec, width)
            for spec, width in zip(specs, widths, strict=True)
        }
        self._rehearse(specs, widths)

    def _table(self, slot: int) -> ExpertTable:
        """Where the CPU reads a layer's experts: at home."""
        table = self.store.tables[slot]
        homes = self.store.places.homes(slot)
        pages = np.arange(table.layout.n_pages, dtype=np.int64) * table.page_bytes
        down = self.ops.download
        biases = {name: down(array) for name, array in table.biases.items()}
        factors = {name: down(array) for name, array in table.factors.items()}
        return ExpertTable(table.layout, table.page_bytes, homes[:, None] + pages, biases, factors)

    def _rehearse(self, specs: list[MoeSpec], widths: list[int]) -> None:
        """Compile what the CPU uses, before the first request."""
        for slot, (spec, width) in enumerate(zip(specs, widths, strict=True)):
            for n_tokens in (1, 3):
                ids = np.tile(np.arange(spec.top_k, dtype=np.int32), (n_tokens, 1))
                x, weights = np.zeros((n_tokens, width), np.float32), np.ones(ids.shape, np.float32)
                self._compute(slot, spec, x.copy, ids, weights, ids >= 0)

    # ---- steps
    def lend(self, slot: int, x: Act, ids: Array, weights: Array, spec: MoeSpec) -> Lent | None:
        """Take the CPU's experts out of ids int32 and weights [T, k] of a layer; None where there are none. x: the
        experts' input, whose values must be there."""
        n_tokens, width = x.f32.shape
        if not self.share > 0.0 or not 1 < n_tokens <= MOST_DECODE_TOKENS:
            return None
        places = self.store.places.layers[slot]
        fetches = [self.ops.fetch(array) for array in (ids, places.place_of, weights, x.f32)]
        chosen, place_of, given = (values() for values in fetches[:3])
        pairs = choose_pairs(chosen, place_of < 0, self.share)
        if not pairs.any():
            return None
        kept_ids, kept_weights = without_pairs(chosen, given, pairs)
        self.ops.assign(ids, kept_ids)
        self.ops.assign(weights, kept_weights)
        self.n_computed += len(np.unique(chosen[pairs]))
        result = self._executor.submit(self._compute, slot, spec, fetches[3], chosen, given, pairs)
        return Lent(self.ops, self._rows(n_tokens, width), self._ones[:n_tokens], result)

    def _rows(self, n_tokens: int, width: int) -> Array:
        return self._target.reshape(-1)[: n_tokens * width].reshape(n_tokens, width)

    def _compute(
        self,
        slot: int,
        spec: MoeSpec,
        fetch_x: Callable[[], np.ndarray],
        ids: np.ndarray,
        weights: np.ndarray,
        pairs: np.ndarray,
    ) -> np.ndarray:
        """float32 [T, width]: of each token the weighted sum of these pairs' experts."""
        x = fetch_x()
        width, rows = x.shape[1], np.flatnonzero(pairs.any(axis=1))
        act, scratch = self._acts[width].head(len(rows)), self._scratch[spec.width, width]
        self.cpu.glu(None, np.ascontiguousarray(x[rows]), "identity", act)
        wanted = np.where(pairs[rows], ids[rows], -1).astype(np.int32)
        self.cpu.moe_experts(act, wanted, self._tables[slot], None, spec, scratch)
        found = scratch.out[: wanted.size].reshape(*wanted.shape, width)
        total = np.zeros_like(x)
        for k in range(wanted.shape[1]):
            used = np.flatnonzero(wanted[:, k] >= 0)
            total[rows[used]] += weights[rows[used], k, None] * found[used, k]
        return total

    def close(self) -> None:
        """Nothing is computed any more."""
        self._executor.shutdown(wait=True)
