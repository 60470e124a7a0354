"""The longest request that a pool is said to hold, where layers with a window give pages back: it runs."""

from __future__ import annotations

import memory_pools as pools
import pytest
from cache_lives import prefill

from rimuru.engine.resolve import longest_request, request_bytes
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
