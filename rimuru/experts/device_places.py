"""The host's side of places: page sets of a layer that the device hands out among the layer's experts (ops/places.py).

The host adds places, takes them away and moves them: commands in the order of the stream, so that nobody waits. Who
holds a place, what was chosen and what was hit is heard a few steps late, by a copy beside the steps (`hear`), or
exactly by waiting (`hear_now`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from rimuru.experts.host_arena import BLOCK_BYTES
from rimuru.experts.places_jit import take_fills
from rimuru.experts.residency import DECAY_TOKENS, Residency
from rimuru.memory.decisions import FillLog
from rimuru.memory.page_pool import PagePool
from rimuru.memory.specs import ExpertLayout
from rimuru.memory.views import ExpertView, moved_entries
from rimuru.ops.base import Copier, Ops
from rimuru.ops.places import (
    ALL_COME,
    BY_RECENCY,
    COMMAND_FIELDS,
    DECAY,
    LOG_ENTRIES,
    MAX_COMERS,
    MAX_COMMANDS,
    MOST_BUFFERED,
    MOST_FILLS,
    N_CONTROLS,
    N_TOTALS,
    ExpertPlaces,
    LayerPlaces,
    n_copy_entries,
)

log = logging.getLogger(__name__)

BUFFER_SHARE = 32
"""Loading buffers take this part of the pool at most: they serve layers in which more is missed than finds a place."""
LEAST_BUFFER_SHARE = 256
"""They take at least this part of a pool that could hold all experts."""
SCORE_TOKENS = 20.0
"""`auto`: a choice falls to 1/e in the score in so many tokens, times the root of the tokens that run together."""

ALL_COME_TOKENS = 6.0
"""`auto`: up to so many tokens in a step, everybody who is missed comes; beyond, only who is warmer than who leaves."""
PLACE_BYTES = 8 + 6 * 4
"""Device bytes of an expert's state, besides its table entries."""


def places_bytes(layout: ExpertLayout) -> int:
    """Device bytes of the arrays of DevicePlaces and of the table, with the most buffers; for the ledger."""
    commands = MAX_COMMANDS * (COMMAND_FIELDS + layout.max_pages) * 8
    shared = 4 * (N_TOTALS * len(layout.layers) + N_CONTROLS) + 8 * MAX_COMERS * layout.max_pages
    aside = 8 * n_copy_entries(layout.max_pages) + 2 * widest_layer(layout)
    log_bytes = 8 * (1 + LOG_ENTRIES)
    return 16 * layout.n_pages + PLACE_BYTES * layout.n_experts + shared + commands + aside + log_bytes


def home_bytes(layout: ExpertLayout) -> int:
    """Host memory that takes a copy of every expert."""
    needed_bytes = layout.n_pages * layout.page_bytes
    return needed_bytes + needed_bytes // 64 + BLOCK_BYTES


def widest_layer(layout: ExpertLayout) -> int:
    """Experts of the layer that has the most."""
    return max(layer.n_experts for layer in layout.layers)


def n_loading_buffers(layout: ExpertLayout, pool_bytes: int, fixed_bytes: int) -> int:
    """Experts that loading buffers hold: those of a layer, within a small share of the pool. fixed_bytes: of residents
    whose number is fixed, 0 where it is not; buffers take a part of what these leave, and there are none where all
    experts stay resident.

    A pool that could hold all experts, but need not, gives buffers part of what it has beyond, and never less than
    LEAST_BUFFER_SHARE: whoever is out while requests fill the pool would be read in place, by kernels that get a
    fraction of the link's rate where many tokens share an expert."""
    experts_bytes = layout.n_pages * layout.page_bytes
    if fixed_bytes >= experts_bytes:
        return 0
    affordable_bytes = min(pool_bytes // BUFFER_SHARE, (pool_bytes - fixed_bytes) // 4)
    if not fixed_bytes and pool_bytes >= experts_bytes:
        most_bytes = max((pool_bytes - experts_bytes) // 4, pool_bytes // LEAST_BUFFER_SHARE)
        affordable_bytes = min(affordable_bytes, most_bytes)
    affordable = affordable_bytes // (layout.max_pages * layout.page_bytes)
    return max(0, min(affordable, MAX_COMERS, widest_layer(layout)))


def rule_of(residency: Residency) -> tuple[bool, bool, float]:
    """By recency, all come, decay in tokens (ops/places.py). `auto`: a score that forgets the sooner, the fewer tokens
    run together, is as good as recency where a stream stays with its experts, and as a hot set where some are always
    likelier."""
    policy, n_tokens = residency.policy, residency.n_together
    if policy == "recency":
        return True, True, DECAY_TOKENS
    if policy == "hotset":
        return False, False, DECAY_TOKENS
    decay_tokens = min(DECAY_TOKENS, SCORE_TOKENS * 2.0 ** (round(math.log2(max(1.0, n_tokens))) / 2.0))
    return False, n_tokens <= ALL_COME_TOKENS, decay_tokens


@dataclass(slots=True)
class Heard:
    """What the device reported. R = experts over all layers, L = layers."""

    holders: np.ndarray  # int32 [R]; row of a layer's first expert + place -> expert of the layer, -1 = nobody
    new_counts: np.ndarray  # uint32 [R], assignments since the last report
    new_totals: np.ndarray  # uint32 [L, N_TOTALS], since the last report
    is_known: np.ndarray
    """bool [R]: False where a place came or went since; its holder is of another time."""


class DevicePlaces:
    """Places of all layers of one model. A place is a number below the layer's number of experts."""

    def __init__(
        self,
        layout: ExpertLayout,
        view: ExpertView,
        pool: PagePool,
        ops: Ops,
        copier: Copier,
        buffers: np.ndarray,
        fills: FillLog,
    ) -> None:
        """buffers: pool page ids int32 [n_buffers, most pages of an expert] of the loading buffers. fills: learns from
        reports who came."""
        self.layout, self.view, self.pool, self.ops, self.copier = layout, view, pool, ops, copier
        self.fills, self.last_step = fills, 0
        """last_step: the engine's last step that counts on the device, among those that were queued."""
        n_experts, n_entries, n_layers = layout.n_experts, layout.n_pages, len(layout.layers)
        self.page_ids = np.full(n_entries, -1, np.int32)
        """Pool pages of the places; a place's entries lie like those of the expert of its number."""
        parts = np.cumsum([n_experts, n_experts, N_TOTALS * n_layers, 2 * (1 + LOG_ENTRIES)])
        self._heard_array = ops.empty((int(parts[-1]),), np.int32)
        self._heard_address = ops.address(self._heard_array)
        self.arrays = ExpertPlaces(
            page_bytes=layout.page_bytes,
            addresses=ops.empty((n_entries,), np.int64),
            homes=ops.empty((n_experts,), np.int64),
            pages=ops.empty((n_entries,), np.int64),
            holders=self._heard_array[: parts[0]],
            place_of=ops.empty((n_experts,), np.int32),
            last_used=ops.empty((n_experts,), np.int32),
            scores=ops.empty((n_experts,), np.float32),
            counts=self._heard_array[parts[0] : parts[1]],
            totals=self._heard_array[parts[1] : parts[2]],
            buffered=ops.empty((n_experts,), np.int32),
            control=ops.empty((N_CONTROLS,), np.int32),
            buffers=ops.empty((max(1, len(buffers)), layout.max_pages), np.int64),
            copies=ops.empty((n_copy_entries(layout.max_pages),), np.int64),
            now=ops.empty((widest_layer(layout),), np.bool_),
            later=ops.empty((widest_layer(layout),), np.bool_),
            log=self._heard_array[parts[2] :].view(np.int64),  # an even number of entries lies before it
        )
        self.n_buffers = len(buffers)
        if self.n_buffers:
            ops.assign(self.arrays.buffers, pool.addresses("expert", buffers))
        self.layers = [self._layer(slot) for slot in range(n_layers)]
        self._command_fields = COMMAND_FIELDS + layout.max_pages
        self._commands = ops.empty((MAX_COMMANDS, self._command_fields), np.int64)
        self._queued: list[np.ndarray] = []
        self._rule: tuple[bool, bool, float, bool, bool] | None = None
        self._control = np.zeros(N_CONTROLS, np.int32)
        self._control[DECAY] = np.float32(1.0).view(np.int32)
        self._mailbox = copier.alloc_host(4 * int(parts[-1])).view(np.int32)
        self._last = np.zeros(int(parts[2]), np.int32)
        self._log = self._mailbox[parts[2] :].view(np.int64)
        self._n_taken = 0
        """Fills of the log that are known by now, or lost."""
        self._marker: object = None
        self._is_asked = False
        self._asked_at = self._epoch = self._asked_step = 0
        self._changed_at = np.zeros(n_experts, np.int64)
        self.start(np.zeros(n_experts, np.int64), np.zeros(n_experts, np.float32))

    def _layer(self, slot: int) -> LayerPlaces:
        a, layer, view = self.arrays, self.layout.layers[slot], self.view
        rows = slice(int(view.rows_before[slot]), int(view.rows_before[slot + 1]))
        entries = slice(int(view.entries_before[slot]), int(view.entries_before[slot + 1]))
        shape = (layer.n_experts, layer.n_pages)
        return LayerPlaces(
            layer, self.layout.page_bytes, a.addresses[entries].reshape(shape), a.homes[rows],
            a.pages[entries].reshape(shape), a.holders[rows], a.place_of[rows], a.last_used[rows], a.scores[rows],
            a.counts[rows], a.buffered[rows], a.totals[slot * N_TOTALS : (slot + 1) * N_TOTALS], a.control, a.buffers,
            a.copies, a.now[: layer.n_experts], a.later[: layer.n_experts], a.log, slot,
        )  # fmt: skip

    # ---- the beginning
    def start(self, homes: np.ndarray, scores: np.ndarray) -> None:
        """Residents, as the view has them, hold places of their own number; others are read at their homes int64 [R].
        The view's table says where each expert is read from. scores float32 [R]."""
        rows = self.view.page_ids.copy()
        self.page_ids[:] = rows
        self._homes = homes
        ops, a = self.ops, self.arrays
        ops.assign(a.addresses, self.view.table.values)
        ops.assign(a.homes, homes)
        ops.assign(a.pages, self.pool.addresses("expert", rows))
        ops.assign(a.place_of, self.holders_at_start())
        ops.assign(a.last_used, np.zeros(len(homes), np.int32))
        ops.assign(a.buffered, np.zeros(len(homes), np.int32))
        ops.assign(a.scores, scores.astype(np.float32))
        self._last[:] = 0
        self._last[: len(homes)] = self.holders_at_start()
        ops.assign(self._heard_array, np.concatenate([self._last, np.zeros(2 * (1 + LOG_ENTRIES), np.int32)]))
        self._n_taken = 0
        ops.assign(a.control, self._control)

    def holders_at_start(self) -> np.ndarray:
        """int32 [R], as in Heard, before any step."""
        return np.where(self._first_ids() >= 0, self._numbers(), -1).astype(np.int32)

    def _numbers(self) -> np.ndarray:
        """Number within its layer of each of the R experts, int32."""
        return np.concatenate([np.arange(layer.n_experts, dtype=np.int32) for layer in self.layout.layers])

    def _first_ids(self) -> np.ndarray:
        """First pool page of each of the R places, -1 = no such place."""
        parts = [
            self.page_ids[layer_entries].reshape(layer.n_experts, layer.n_pages)[:, 0]
            for layer, layer_entries in zip(self.layout.layers, self._entry_spans(), strict=True)
        ]
        return np.concatenate(parts)

    def _entry_spans(self) -> list[slice]:
        edges = self.view.entries_before
        return [slice(int(edges[slot]), int(edges[slot + 1])) for slot in range(len(self.layout.layers))]

    def homes(self, slot: int) -> np.ndarray:
        """Where a layer's experts lie in host memory, int64 [n_experts]."""
        return self._homes[int(self.view.rows_before[slot]) : int(self.view.rows_before[slot + 1])]

    def layer_pages(self, slot: int) -> np.ndarray:
        """Pool page ids int32 [n_experts, n_pages] of a layer's places, -1 = no such place: a window."""
        layer = self.layout.layers[slot]
        first = int(self.view.entries_before[slot])
        return self.page_ids[first : first + layer.n_experts * layer.n_pages].reshape(layer.n_experts, layer.n_pages)

    # ---- commands
    def add(self, slot: int, pages: np.ndarray) -> int:
        """One more place, still empty; its number. A layer has at most as many as experts."""
        ids = self.layer_pages(slot)
        place = int(np.flatnonzero(ids[:, 0] < 0)[0])
        ids[place] = pages
        self._command(slot, place, self.pool.addresses("expert", pages))
        return place

    def remove(self, slot: int, place: int) -> np.ndarray:
        """Take a place away; its pages, which may be given to others once `send` has been called."""
        ids = self.layer_pages(slot)
        pages = ids[place].copy()
        ids[place] = -1
        self._command(slot, place, np.zeros(len(pages), np.int64))
        return pages

    def flip(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Pages whose bytes have been copied: places at a source lie at its target now."""
        entries, ids = moved_entries(self.page_ids, sources, targets)
        self.page_ids[entries] = ids
        for slot, span in enumerate(self._entry_spans()):
            inside = entries[(entries >= span.start) & (entries < span.stop)] - span.start
            for place in np.unique(inside // self.layout.layers[slot].n_pages):
                addresses = self.pool.addresses("expert", self.layer_pages(slot)[place])
                self._command(slot, int(place), addresses)
        self.send()

    def _command(self, slot: int, place: int, addresses: np.ndarray) -> None:
        row = np.zeros(self._command_fields, np.int64)
        n_pages = self.layout.layers[slot].n_pages
        row[:COMMAND_FIELDS] = self.view.rows_before[slot], self.view.entries_before[slot], n_pages, place
        row[COMMAND_FIELDS : COMMAND_FIELDS + n_pages] = addresses
        self._queued.append(row)
        self._epoch += 1
        self._changed_at[int(self.view.rows_before[slot]) + place] = self._epoch

    def send(self) -> None:
        """Queue the commands behind the steps so far."""
        for start in range(0, len(self._queued), MAX_COMMANDS):
            rows = self._queued[start : start + MAX_COMMANDS]
            block = np.zeros((MAX_COMMANDS, self._command_fields), np.int64)
            block[: len(rows)] = rows
            self.ops.assign(self._commands, block)
            self.ops.set_places(self._commands, len(rows), self.arrays)
        self._queued.clear()

    def set_control(self, by_recency: bool, all_come: bool, decay_tokens: float, fills: bool, buffers: bool) -> None:
        """See ops/places.py; and whether missed experts are brought into places, those left over into buffers."""
        rule = by_recency, all_come, decay_tokens, fills, buffers
        if rule == self._rule:
            return
        wanted = np.zeros(N_CONTROLS, np.int32)
        wanted[BY_RECENCY], wanted[ALL_COME] = by_recency, all_come
        wanted[DECAY] = np.float32(decay_tokens).view(np.int32)
        if fills:
            wanted[MOST_FILLS], wanted[MOST_BUFFERED] = MAX_COMERS, self.n_buffers if buffers else 0
        self.ops.assign(self.arrays.control, wanted)
        self._control, self._rule = wanted, rule

    def table(self) -> np.ndarray:
        """The device's table int64 [N]; experts in loading buffers are named at home, where their next turn begins."""
        table = self.ops.download(self.arrays.addresses).copy()
        buffered = self.ops.download(self.arrays.buffered) != 0
        for slot, layer in enumerate(self.layout.layers):
            first, span = int(self.view.rows_before[slot]), self._entry_spans()[slot]
            rows = table[span].reshape(layer.n_experts, layer.n_pages)
            there = np.flatnonzero(buffered[first : first + layer.n_experts])
            rows[there] = self._homes[first + there, None] + np.arange(layer.n_pages) * self.layout.page_bytes
        return table

    def set_residents(self, table: np.ndarray, resident: np.ndarray) -> None:
        """Where the host decides by itself: the table int64 [N], and who is resident bool [R]."""
        self.ops.assign(self.arrays.addresses, table)
        self.ops.assign(self.arrays.place_of, np.where(resident, 0, -1).astype(np.int32))

    # ---- reports
    def ask(self) -> bool:
        """Queue the copy of a report behind the steps so far, unless one is under way: then, or where that fails,
        False, and the next report tells as much."""
        try:
            return self._ask()
        except Exception as error:
            log.warning("a report of what steps chose was not sent: %s", error)
            return False

    def _ask(self) -> bool:
        if self._is_asked:
            return False
        self.copier.copy_out(self._mailbox, self._heard_address)
        self._marker, self._is_asked = self.copier.record(), True
        self._asked_at, self._asked_step = self._epoch, self.last_step
        return True

    def hear(self) -> Heard | None:
        """The report that was asked for, if it is there."""
        if not self._is_asked or not self.copier.done(self._marker):
            return None
        self.copier.wait(self._marker)  # lets go of what it keeps for copies under way
        return self._take()

    def hear_now(self) -> Heard:
        """Everything up to now; waits for the steps so far."""
        self.send()
        if self._is_asked:  # its buffer is in use: let it come, and count it together with the next
            self.copier.wait(self._marker)
            self._is_asked = False
        self._ask()
        self.copier.wait(self._marker)
        return self._take()

    def _take(self) -> Heard:
        self._is_asked = False
        n, now = len(self._changed_at), self._mailbox[: len(self._last)].copy()
        new = now[n:].view(np.uint32) - self._last[n:].view(np.uint32)  # modulo 2^32, as they are counted
        self._last = now
        self._take_fills(now[2 * n :].reshape(-1, N_TOTALS))
        return Heard(now[:n], new[:n], new[n:].reshape(-1, N_TOTALS), self._changed_at <= self._asked_at)

    def _take_fills(self, totals: np.ndarray) -> None:
        """Note who came since the last report; totals int32 [L, N_TOTALS] of this one."""
        fills = self.fills
        self._n_taken, n_known, n_foretold, n_lost = take_fills(
            self._log, self._n_taken, totals, self._asked_step, fills.rows, fills.n_known, fills.per_layer
        )
        fills.n_known += n_known
        fills.n_foretold += n_foretold
        fills.n_lost += n_lost

    def update_view(self, holders: np.ndarray) -> None:
        """Make view and owner tags say who holds which pages, from an exact report. Empty places belong to nobody."""
        view, allocator = self.view, self.pool.allocator
        for slot, layer in enumerate(self.layout.layers):
            first = int(view.rows_before[slot])
            ids, held = self.layer_pages(slot), holders[first : first + layer.n_experts]
            places = np.flatnonzero((ids[:, 0] >= 0) & (held >= 0))
            home = self._homes[first : first + layer.n_experts]
            table, page_ids = view.layer(slot), view.layer_pages(slot)
            table[:] = home[:, None] + np.arange(layer.n_pages, dtype=np.int64) * self.layout.page_bytes
            page_ids[:] = -1
            page_ids[held[places]] = ids[places]
            table[held[places]] = self.pool.addresses("expert", ids[places])
            if places.size:
                allocator.set_owners("expert", ids[places].reshape(-1), np.repeat(first + held[places], layer.n_pages))
