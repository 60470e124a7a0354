"""What tests of SequenceCache do with one: prompts written in pieces, bytes put into pages and looked for."""

from __future__ import annotations

import memory_pools as pools
import numpy as np

from rimuru.memory.cache import SequenceCache


def prefill(cache: SequenceCache, seq_id: object, tokens: list[int], step: int = 1000) -> int:
    """Open and write a prompt; how many of its tokens were in the cache."""
    hit = cache.open(seq_id, tokens).n_cached_tokens  # type: ignore[arg-type]
    for start in range(hit, len(tokens), step):
        piece = tokens[start : start + step]
        assert cache.extend(seq_id, len(piece))  # type: ignore[arg-type]
        cache.commit(seq_id, piece)  # type: ignore[arg-type]
    cache.audit()
    return hit


def batch_rows(cache: SequenceCache, seq_ids: list[object]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    layout = cache.pool.layout
    assert layout.kv is not None
    n, n_blocks = len(seq_ids), cache.max_blocks(seq_ids)  # type: ignore[arg-type]
    kv = np.full((len(layout.kv.groups), n, n_blocks + 2), 77, np.int32)
    ssm = np.zeros((n, 0 if layout.ssm is None else len(layout.ssm.layers)), np.int32)
    conv = np.zeros((n, 0 if layout.conv is None else len(layout.conv.layers)), np.int32)
    fresh = np.zeros(n, np.bool_)
    cache.fill_batch(seq_ids, kv, ssm, conv, fresh)  # type: ignore[arg-type]
    return kv, ssm, conv, fresh


def fill_states(cache: SequenceCache, seq_id: object, value: int) -> None:
    slot = cache._slots[seq_id]  # type: ignore[index]
    for kind, ids in cache.states.pages(slot).items():
        for page in ids:
            pools.page_bytes_of(cache.pool, kind, int(page))[:] = value


def states_hold(cache: SequenceCache, seq_id: object, value: int) -> bool:
    slot = cache._slots[seq_id]  # type: ignore[index]
    return all(
        (pools.page_bytes_of(cache.pool, kind, int(page)) == value).all()
        for kind, ids in cache.states.pages(slot).items()
        for page in ids
    )


def write_kv(cache: SequenceCache, seq_id: object, value: int) -> None:
    for page in batch_rows(cache, [seq_id])[0][0, 0]:
        if page >= 0:
            pools.page_bytes_of(cache.pool, "kv", int(page))[:] = value
