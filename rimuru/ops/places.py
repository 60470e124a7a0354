"""Places and loading buffers: page sets that a device hands out among experts by itself (cuda_src/moe/residency.cu).

    host   decides how many places a layer has, and which pages they are
    device decides who holds them: after each router, missed experts are brought into places, and those that find none
           into loading buffers for the layer's turn

All arrays are the backend's, at fixed addresses. Experts of all layers are numbered through (ExpertView.row); table
entries follow each other as in ExpertView.
"""

from __future__ import annotations

from dataclasses import dataclass

from rimuru.memory.specs import ExpertLayerLayout
from rimuru.ops.base import Array

N_TOTALS = 8
STEPS, TOKENS, ASKED, HITS, FILLS, BUFFERED, FORETOLD = range(7)
"""Fields of `totals`, since the start, modulo 2^32: calls, tokens, distinct experts asked for in each call, those of
them that were in a place, that were brought into one, and into a buffer; experts brought into places by forecasts."""
N_CONTROLS = 5
BY_RECENCY, ALL_COME, MOST_FILLS, MOST_BUFFERED, DECAY = range(N_CONTROLS)
"""Fields of `control`: whether the longest unused leaves first (else the lowest score); whether everybody who is missed
comes (else, where the lowest score leaves, those with a higher one); most experts that a layer brings into places and
into buffers in a step; in how many tokens a choice falls to 1/e in scores (a float32 by its bits)."""
MAX_COMERS = 256
"""Experts that a layer brings in at once at most."""
MAX_COMMANDS = 64
"""Commands of one `set_places`."""
COMMAND_FIELDS = 4
"""Of a command, before its page addresses: first expert of the layer, first table entry, pages of an expert, place."""

LOG_ENTRIES = 8192
"""Fills that the ring of `log` holds: some 20 of each layer in the steps between two reports, of 48 layers."""
COMER_AT, VICTIM_AT, PLACE_AT, FORETOLD_AT, LAP_AT, STEP_AT = 10, 20, 31, 41, 42, 45
"""First bits of the fields of an entry of `log`; the layer slot is below. See cuda_src/moe/residency.cu."""
LAPS, STEP_BITS = 8, 18
"""Laps of the ring are counted modulo LAPS, steps modulo 2^STEP_BITS."""


def fill_entry(number: int, step: int, slot: int, comer: int, victim: int, place: int, foretold: bool) -> int:
    """Entry of `log` for fill `number` since the start; victim -1: the place was empty."""
    lap = (number // LOG_ENTRIES + 1) % LAPS
    when = (step % (1 << STEP_BITS)) << STEP_AT | lap << LAP_AT
    who = slot | comer << COMER_AT | (victim + 1) << VICTIM_AT | place << PLACE_AT
    return when | int(foretold) << FORETOLD_AT | who


def n_copy_entries(max_pages: int) -> int:
    """Entries of `copies`."""
    return 1 + MAX_COMERS * (1 + max_pages)


@dataclass(slots=True)
class LayerPlaces:
    """One layer's windows on the arrays of ExpertPlaces."""

    layout: ExpertLayerLayout
    page_bytes: int
    addresses: Array  # int64 [n_experts, n_pages]: ExpertTable.addresses
    homes: Array  # int64 [n_experts]
    pages: Array  # int64 [n_experts, n_pages]: of place p
    holders: Array  # int32 [n_experts]: of place p
    place_of: Array  # int32 [n_experts]
    last_used: Array  # int32 [n_experts]
    scores: Array  # float32 [n_experts]
    counts: Array  # int32 [n_experts]
    buffered: Array  # int32 [n_experts]
    totals: Array  # int32 [N_TOTALS]
    control: Array  # int32 [N_CONTROLS], the same for all layers
    buffers: Array  # int64 [n_buffers, most pages of an expert], the same for all layers
    copies: Array  # int64 [n_copy_entries(most pages)], the same for all layers; see cuda_src/moe/residency.cu
    now: Array  # bool [n_experts], the same for all layers: of the experts that were asked for, those that can be read
    later: Array  # bool [n_experts], the same for all layers: and those that can after join_fetch
    log: Array  # int64 [1 + LOG_ENTRIES], the same for all layers: fills since the start, and the last ones
    slot: int  # of the layer, in entries of `log`


@dataclass(slots=True)
class ExpertPlaces:
    """R experts over all layers, N table entries."""

    page_bytes: int
    addresses: Array  # int64 [N]: where each page of each expert is read from
    homes: Array  # int64 [R]: host memory that holds all pages of an expert, one after the other
    pages: Array  # int64 [N]: a layer has at most as many places as experts; 0 = no such place
    holders: Array  # int32 [R]: which expert of the layer holds a place, -1 = nobody
    place_of: Array  # int32 [R]: -1 = in none
    last_used: Array  # int32 [R]: call in which the expert was last chosen, 0 = never
    scores: Array  # float32 [R]: decayed counts
    counts: Array  # int32 [R]: assignments since the start, modulo 2^32
    buffered: Array  # int32 [R]: 1 = the table names a loading buffer
    totals: Array  # int32 [layers * N_TOTALS]
    control: Array  # int32 [N_CONTROLS]
    buffers: Array  # int64 [n_buffers, most pages of an expert]: pages of the loading buffers
    copies: Array  # int64 [n_copy_entries(most pages)]: copies that a layer still has to make
    now: Array  # bool [experts of the widest layer]
    later: Array  # bool [experts of the widest layer]
    log: Array  # int64 [1 + LOG_ENTRIES]: fills since the start, and the last ones (fill_entry)
