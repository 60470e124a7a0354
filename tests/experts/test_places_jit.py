"""Taking over what a device reports: holders are residents, other places have names of their own, totals are added."""

from __future__ import annotations

import numpy as np
import pytest

from rimuru.experts.places_jit import add_up, take_over
from rimuru.ops.places import ASKED, FILLS, FORETOLD, HITS, N_TOTALS, STEPS, TOKENS


@pytest.mark.parametrize("seed", range(12))
def test_every_place_has_a_name_of_its_own(seed: int) -> None:
    """Two layers of 12 and 7 experts; some places there, of which some are held by whom the report says."""
    rng = np.random.default_rng(seed)
    sizes, edges = (12, 7), np.array([0, 12, 19])
    named, holders = np.full(19, -1, np.int32), np.full(19, -1, np.int32)
    for first, n in zip(edges, sizes, strict=False):
        n_places = int(rng.integers(1, n + 1))
        there = first + rng.permutation(n)[:n_places]
        named[there] = rng.permutation(n)[:n_places]
        n_held = int(rng.integers(0, n_places + 1))
        holders[there[:n_held]] = rng.permutation(n)[:n_held]
    is_known = rng.random(19) < 0.8
    holders[rng.random(19) < 0.1] = 5  # of places that have gone since, or are not known
    before, resident = named.copy(), np.ones((2, 12), np.bool_)
    is_held = is_known & (holders >= 0) & (before >= 0)
    for first, n in zip(edges, sizes, strict=False):  # a device names nobody twice
        mine = np.flatnonzero(is_held[first : first + n]) + first
        _, firsts = np.unique(holders[mine], return_index=True)
        is_known[np.setdiff1d(mine, mine[firsts])] = False
    is_held = is_known & (holders >= 0) & (before >= 0)
    assert take_over(named, holders, is_known, edges, resident) == int(((before >= 0) & ~is_held).sum())
    assert np.array_equal(named >= 0, before >= 0) and np.array_equal(named[is_held], holders[is_held])
    for slot, (first, n) in enumerate(zip(edges, sizes, strict=False)):
        rows = np.arange(first, first + n)
        names = named[rows][named[rows] >= 0]
        assert len(set(names.tolist())) == len(names) and names.max(initial=0) < n
        assert np.array_equal(np.flatnonzero(resident[slot]), np.sort(names))
        others = [row for row in rows if before[row] >= 0 and not is_held[row]]
        taken = set(named[rows[is_held[rows]]].tolist())
        for row in others:  # who may keep his name keeps it
            assert named[row] == before[row] or before[row] in taken


def test_totals_of_layers_are_added_up() -> None:
    """Two layers, one of which has seen a step less; what was forecast for experts that were asked for before is read
    once more than it was missed."""
    totals = np.zeros((2, N_TOTALS), np.uint32)
    totals[:, [STEPS, TOKENS, ASKED, HITS, FILLS, FORETOLD]] = [[3, 30, 50, 40, 8, 2], [2, 29, 60, 60, 0, 1]]
    found = add_up(totals, np.array([100, 1000])).tolist()
    assert found == [3, 30, 110, 100, 13, 8, 12 * 100 + 1 * 1000]
