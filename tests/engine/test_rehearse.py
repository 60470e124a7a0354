"""Batches that a backend gets ready for: shapes of every kind of step, and kernels noted instead of launched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rimuru.engine.rehearse import batch_of, rehearsal_batches, rehearsal_steps
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.memory.specs import PoolLayout
from rimuru.ops.cuda.launch import Kernel, rehearsal


class NoPages:
    kv = ssm = conv = None


def test_every_decode_size_and_pieces_up_to_the_longest() -> None:
    layout: PoolLayout = NoPages()  # type: ignore[assignment]
    batches = list(rehearsal_batches(700, [1, 2, 12], layout))
    assert [batch.n_seqs for batch in batches[:3]] == [1, 2, 12] and all(batch.is_decode for batch in batches[:3])
    lengths = [batch.n_tokens for batch in batches[3:] if batch.n_seqs == 1]
    assert lengths[0] == 2 and lengths[-1] == 700 and lengths == sorted(set(lengths))
    assert all(after <= max(before + 1, 1.25 * before) for before, after in itertools.pairwise(lengths))


@pytest.mark.parametrize(("max_tokens", "sizes"), [(700, [1, 2, 12]), (8, [1, 16, 32]), (2, [1, 2]), (1, [1])])
def test_answers_beside_pieces_of_prompts(max_tokens: int, sizes: list[int]) -> None:
    """Few and many, beside the first piece and the longest, within the tokens and sequences that a step may have."""
    layout: PoolLayout = NoPages()  # type: ignore[assignment]
    mixed = [
        np.diff(batch.query_start) for batch in rehearsal_batches(max_tokens, sizes, layout) if not batch.is_decode
    ]
    mixed = [counts for counts in mixed if len(counts) > 1]
    assert all(counts.sum() <= max_tokens and len(counts) <= max(sizes) for counts in mixed)
    assert all((counts[:-1] == 1).all() and counts[-1] > 1 for counts in mixed)
    found = {(len(counts), int(counts[-1])) for counts in mixed}
    if max_tokens == 700:
        assert {(2, 2), (3, 2), (8, 2), (12, 2), (2, 699), (12, 689)} <= found
    assert bool(found) == (max_tokens > 2 and max(sizes) > 1)


def test_steps_are_gone_through_in_every_way_that_they_may_run() -> None:
    """All in the way that most begin with; answers and short pieces in the others, answers with every expert there."""
    layout: PoolLayout = NoPages()  # type: ignore[assignment]
    store = object.__new__(DeviceExpertStore)
    plain = [batch.n_tokens for batch in rehearsal_batches(40, [1, 2, 12], layout)]
    for ways in (("before", "beside", "in place"), ("in place",), ("before", "beside", "ahead")):
        store.is_watching, store.ways, store.way = True, ways, "before"
        found: dict[str, list[int]] = {}
        for batch in rehearsal_steps(40, [1, 2, 12], layout, store):
            found.setdefault(store.way if store.is_watching else "resident", []).append(batch.n_tokens)
        assert store.is_watching and store.way == "before"
        assert found.pop("resident") == [1, 2, 12]
        first = "ahead" if "ahead" in ways else "beside" if "beside" in ways else "before"
        assert found.pop(first) == plain
        assert set(found) == set(ways) - {first, "in place"}
        for lengths in found.values():
            assert lengths[:3] == [1, 2, 12] and {2, 3, 4, 5} <= set(lengths[3:]) and max(lengths) <= 40
    assert [batch.n_tokens for batch in rehearsal_steps(40, [1, 2, 12], layout, None)] == plain


def test_batches_are_whole() -> None:
    layout: PoolLayout = NoPages()  # type: ignore[assignment]
    batch = batch_of([1, 3, 2], layout)
    assert batch.positions.tolist() == [0, 0, 1, 2, 0, 1] and batch.query_start.tolist() == [0, 1, 4, 6]
    assert batch.logit_rows.tolist() == [0, 3, 5] and batch.seq_of_token.tolist() == [0, 1, 1, 1, 2, 2]
    for name in ("token_ids", "positions", "query_start", "context_len", "kv_pages", "logit_rows"):
        assert getattr(batch, name).dtype == np.int32, name


def test_a_rehearsal_notes_kernels_and_launches_nothing() -> None:
    first, second = (Kernel("no/such.cu", name, "n: i32") for name in ("first", "second"))
    with rehearsal() as used:
        first((1,), (32,), (1,), shared_bytes=100)
        first((9,), (32,), (1,), shared_bytes=300)
        first((1,), (32,), (1,), shared_bytes=200)
        second((1,), (32,), (1,))
    assert used == {first: 300, second: 0}
    with pytest.raises(Exception, match=r"cupy|such"):
        second((1,), (32,), (1,))
