"""NumPy twin of cuda_src/moe/residency.cu."""

from __future__ import annotations

import numpy as np

from rimuru.ops.base import Array
from rimuru.ops.host import bytes_at
from rimuru.ops.places import (
    ASKED,
    BY_RECENCY,
    COMMAND_FIELDS,
    DECAY_TOKENS,
    FILLS,
    HITS,
    MAX_FILLS,
    MOST_FILLS,
    STEPS,
    TOKENS,
    ExpertPlaces,
    LayerPlaces,
)


def fetch_experts(ids: Array, positions: Array, places: LayerPlaces) -> None:
    """See Ops.fetch_experts."""
    n_experts, page_bytes = places.layout.n_experts, places.page_bytes
    valid = ids[positions >= 0]
    valid = valid[(valid >= 0) & (valid < n_experts)]
    chosen = np.bincount(valid, minlength=n_experts)
    n_tokens = int((positions >= 0).sum())
    decay = np.float32(np.exp(np.float32(-n_tokens) / np.float32(DECAY_TOKENS)))
    scores = (places.scores.astype(np.float64) * np.float64(decay) + chosen).astype(np.float32)
    resident = places.place_of >= 0
    missed = np.flatnonzero((chosen > 0) & ~resident)
    missed = missed[np.argsort(-scores[missed], kind="stable")]
    leaving = np.flatnonzero((chosen == 0) & resident)
    order = (scores[leaving], places.last_used[leaving]) if places.control[BY_RECENCY] else (scores[leaving],)
    leaving = leaving[np.lexsort(order)]
    empty = np.flatnonzero((places.pages[:, 0] != 0) & (places.holders < 0))
    targets = [(int(place), -1) for place in empty] + [(int(places.place_of[v]), int(v)) for v in leaving]
    n_fills = 0
    for comer, (place, victim) in zip(missed[: min(int(places.control[MOST_FILLS]), MAX_FILLS)], targets, strict=False):
        if victim >= 0 and not places.control[BY_RECENCY] and not scores[victim] < scores[comer]:
            break
        for j, page in enumerate(places.pages[place]):
            bytes_at(int(page), page_bytes)[:] = bytes_at(int(places.homes[comer]) + j * page_bytes, page_bytes)
        if victim >= 0:
            places.addresses[victim] = places.homes[victim] + np.arange(places.layout.n_pages) * page_bytes
            places.place_of[victim] = -1
        places.addresses[comer] = places.pages[place]
        places.place_of[comer], places.holders[place] = place, comer
        n_fills += 1
    places.scores[...] = scores
    places.last_used[chosen > 0] = places.totals[STEPS] + 1
    places.counts += chosen.astype(np.int32)
    ids[positions < 0] = -1
    n_asked = int((chosen > 0).sum())
    for field, n in ((STEPS, 1), (TOKENS, n_tokens), (ASKED, n_asked), (HITS, n_asked - len(missed)), (FILLS, n_fills)):
        places.totals[field] += n


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
