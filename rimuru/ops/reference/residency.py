"""NumPy twin of cuda_src/moe/residency.cu."""

from __future__ import annotations

import numpy as np

from rimuru.ops.base import Array
from rimuru.ops.host import bytes_at
from rimuru.ops.places import (
    ALL_COME,
    ASKED,
    BUFFERED,
    BY_RECENCY,
    COMMAND_FIELDS,
    DECAY,
    FILLS,
    FORETOLD,
    HITS,
    LOG_ENTRIES,
    MAX_COMERS,
    MOST_BUFFERED,
    MOST_FILLS,
    STEPS,
    TOKENS,
    ExpertPlaces,
    LayerPlaces,
    fill_entry,
)


def fetch_experts(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_experts."""
    _fetch(ids, positions, places, False)


def fetch_ahead(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_ahead; nothing runs beside anything here."""
    _fetch(ids, positions, places, True)


def _fetch(ids: Array, positions: Array, places: LayerPlaces, foretells: bool) -> None:
    n_experts, page_bytes = places.layout.n_experts, places.page_bytes
    valid = ids[positions >= 0]
    valid = valid[(valid >= 0) & (valid < n_experts)]
    chosen = np.bincount(valid, minlength=n_experts)
    n_tokens = int((positions >= 0).sum())
    time = np.float32(max(n_tokens, 1)) / places.control[DECAY : DECAY + 1].view(np.float32)[0]
    decay, gain = np.exp(-time), -np.expm1(-time) / time
    added = (gain * chosen.astype(np.float32)).astype(np.float64)
    scores = (places.scores.astype(np.float64) * np.float64(decay) + added).astype(np.float32)
    resident = places.place_of >= 0
    missed = np.flatnonzero((chosen > 0) & ~resident)
    missed = missed[np.argsort(-scores[missed], kind="stable")]
    leaving = np.flatnonzero((chosen == 0) & resident)
    order = (scores[leaving], places.last_used[leaving]) if places.control[BY_RECENCY] else (scores[leaving],)
    leaving = leaving[np.lexsort(order)]
    empty = np.flatnonzero((places.pages[:, 0] != 0) & (places.holders < 0))
    targets = [(int(place), -1) for place in empty] + [(int(places.place_of[v]), int(v)) for v in leaving]
    n_fills = 0
    own_pages = np.arange(places.layout.n_pages) * page_bytes
    if not foretells:
        for e in np.flatnonzero(places.buffered):
            if places.place_of[e] < 0:
                places.addresses[e] = places.homes[e] + own_pages
        places.buffered[:] = 0
    missed = missed[:MAX_COMERS]
    for comer, (place, victim) in zip(missed[: int(places.control[MOST_FILLS])], targets, strict=False):
        if victim >= 0 and not places.control[ALL_COME] and not scores[victim] < scores[comer]:
            break
        _bring(places, int(comer), places.pages[place])
        if victim >= 0:
            places.addresses[victim] = places.homes[victim] + own_pages
            places.place_of[victim] = -1
        places.place_of[comer], places.holders[place] = place, comer
        number, step = int(places.log[0]), int(places.totals[STEPS]) + 1
        entry = fill_entry(number, step, places.slot, int(comer), victim, place, foretells)
        places.log[1 + number % LOG_ENTRIES], places.log[0] = entry, number + 1
        n_fills += 1
    if foretells:
        places.totals[FORETOLD] += n_fills
        return
    buffers = places.buffers[: int(places.control[MOST_BUFFERED]), : places.layout.n_pages]
    n_buffered = min(len(missed) - n_fills, len(buffers))
    for comer, pages in zip(missed[n_fills : n_fills + n_buffered], buffers, strict=False):
        _bring(places, int(comer), pages)
        places.buffered[comer] = 1
    places.scores[...] = scores
    places.last_used[chosen > 0] = places.totals[STEPS] + 1
    places.counts += chosen.astype(np.int32)
    ids[positions < 0] = -1
    n_asked, n_hits = int((chosen > 0).sum()), int(((chosen > 0) & resident).sum())
    places.totals[[STEPS, TOKENS, ASKED, HITS, FILLS, BUFFERED]] += 1, n_tokens, n_asked, n_hits, n_fills, n_buffered


def fetch_aside(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_aside; nothing runs beside anything here."""
    resident = places.place_of >= 0
    chosen = np.zeros(places.layout.n_experts, np.bool_)
    valid = ids[positions >= 0]
    chosen[valid[(valid >= 0) & (valid < len(chosen))]] = True
    fetch_experts(ids, positions, places)
    places.now[:], places.later[:] = chosen & resident, chosen & ~resident


def join_fetch() -> None:
    """See Ops.join_fetch."""


def _bring(places: LayerPlaces, expert: int, pages: Array) -> None:
    """Copy an expert from its home to these pages, and read it there."""
    home, page_bytes = int(places.homes[expert]), places.page_bytes
    for j, page in enumerate(pages.tolist()):
        bytes_at(page, page_bytes)[:] = bytes_at(home + j * page_bytes, page_bytes)
    places.addresses[expert] = pages


def set_places(commands: Array, n_commands: int, places: ExpertPlaces) -> None:
    """See Ops.set_places."""
    for command in commands[:n_commands]:
        row, entry, n_pages, place = (int(value) for value in command[:COMMAND_FIELDS])
        given = command[COMMAND_FIELDS : COMMAND_FIELDS + n_pages]
        holder = int(places.holders[row + place])
        span = slice(entry + place * n_pages, entry + (place + 1) * n_pages)
        places.pages[span] = given
        if holder >= 0:
            home = places.homes[row + holder] + np.arange(n_pages) * places.page_bytes
            table = slice(entry + holder * n_pages, entry + (holder + 1) * n_pages)
            places.addresses[table] = home if given[0] == 0 else given
        if given[0] == 0:
            places.holders[row + place] = -1
            if holder >= 0:
                places.place_of[row + holder] = -1
