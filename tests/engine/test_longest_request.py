"""The longest request that a pool is said to hold, where layers with a window give pages back: it runs."""

from __future__ import annotations

import memory_pools as pools
import pytest
from cache_lives import prefill

from rimuru.engine.resolve import longest_request, request_bytes, staying_experts
from rimuru.experts.store import pages_of
from rimuru.memory.cache import SequenceCache

LIMIT = 400
STEP = 4


@pytest.mark.parametrize("n_huge", [5, 9, 12])
def test_windows_make_requests_longer(n_huge: int) -> None:
    layout = pools.moe((4, None), (4, 8))
    pool_bytes = n_huge * layout.huge_bytes
    plain = longest_request(layout, pool_bytes, 0, LIMIT)
    windowed = longest_request(layout, pool_bytes, 0, LIMIT, STEP)
    assert plain < windowed < LIMIT
    assert request_bytes(layout, windowed, STEP) <= pool_bytes < request_bytes(layout, windowed + 1, STEP)
    cache = SequenceCache(pools.make_pool(layout, n_huge), layout, prefix_cache=False)
    prefill(cache, "a", list(range(windowed)), step=STEP)
    cache.release("a")
    cache.audit()


def test_without_windows_nothing_changes() -> None:
    layout = pools.moe((4, None), (6, None))
    for n_huge in (3, 9):
        pool_bytes = n_huge * layout.huge_bytes
        assert longest_request(layout, pool_bytes, 0, LIMIT, STEP) == longest_request(layout, pool_bytes, 0, LIMIT)


def test_experts_beyond_the_limit_stay_where_they_are_largest() -> None:
    """At most so many may be absent: who stays is not known, so that the pages of the largest are counted."""
    layout = pools.hybrid().expert
    assert layout is not None and [(layer.n_experts, layer.n_pages) for layer in layout.layers] == [(6, 3), (4, 2)]
    assert staying_experts(layout, None, None) == [0, 0] and staying_experts(None, None, 3) == []
    assert staying_experts(layout, None, 10) == staying_experts(layout, None, 99) == [0, 0]
    assert staying_experts(layout, None, 6) == [4, 0] and staying_experts(layout, None, 3) == [6, 1]
    assert staying_experts(layout, None, 0) == [6, 4] and pages_of(layout, [6, 1]) == 20
    assert staying_experts(layout, [2, 1], 3) == [2, 1], "a fixed number goes before a limit"
