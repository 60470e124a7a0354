"""The tools that time kernels: cases name verbs, copies keep what tables point at, groups of rows are averaged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "bench"))
import kernels
import paged_weights
import paging
from cases import moe, pointwise, timed

from rimuru.ops.base import Ops
from rimuru.ops.reference import ReferenceOps


def test_every_case_names_a_verb() -> None:
    cases = timed.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert all(hasattr(Ops, verb) for verb in kernels.verbs_of(case)), case.name


def test_only_the_verb_is_timed() -> None:
    calls: list[int] = []

    def call(verb: Any) -> None:
        calls.append(1)
        verb()

    case = moe.combine_case(2, 2, 64, True)
    hooked = kernels.Hooked(ReferenceOps(), kernels.verbs_of(case), call)
    case.run(hooked, case.inputs())  # type: ignore[arg-type]
    assert len(calls) == 1 and len(hooked.kept) == 3


def test_a_host_backend_gets_a_rate() -> None:
    case = pointwise.embed_case("q8_0", 2, 64, 9)
    (row,) = kernels.host_rows(ReferenceOps(), [case], 0.01)
    assert row["us"] > 0 and row["gb_per_s"] == pytest.approx(case.bytes_moved(case.inputs()) / row["us"] / 1e3)


def test_what_each_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    bench = kernels.DeviceBench(None, 0.0)
    costs = {"count": 2.0, "scan": 3.0, "place": 4.0}
    monkeypatch.setattr(bench, "microseconds", lambda some, n: sum(costs[one[0].name] for one in some) / n)
    launches = [(Named(name), (), {}) for _ in range(5) for name in ("count", "scan", "place", "count")]
    assert bench.parts(launches, 5, 11.0) == pytest.approx({"count": 4.0, "scan": 3.0, "place": 4.0})


def test_overheads_are_averaged_by_group() -> None:
    figures = ((1, 0.03), (8, 0.0), (1024, 0.01), (4096, 0.02))
    rows = [{"tokens": n, "overhead": x, "pool_share": 0.5} for n, x in figures]
    rows += [{"tokens": n, "overhead": 9.0, "pool_share": paged_weights.LOOKED_UP} for n, _ in figures]  # stands beside
    assert paging.means(rows) == pytest.approx({"all": 0.015, "from 1024 tokens": 0.015, "1 token": 0.03})
    assert paging.median_ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0]) == 3.0


def test_page_parts_cover_every_row() -> None:
    layout = moe.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 4, 512, 256, 20_000)
    for p in layout.projections:
        rows = np.concatenate([np.arange(part.start, part.stop) for _, part in paged_weights.page_parts(p)])
        assert np.array_equal(rows, np.arange(p.n_rows))


def test_parts_of_experts_lie_in_the_tensors_without_overlap() -> None:
    """The table that names the contiguous tensors finds every byte of every projection once."""
    layout = moe.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 4, 512, 256, 20_000)
    starts, n_bytes = paged_weights.first_rows(layout)
    places, seen = paged_weights.places_in_tensors(layout), np.zeros(n_bytes, np.int64)
    for p in layout.projections:
        begin = starts[p.name] * p.row_bytes
        for page, rows in paged_weights.page_parts(p):
            for expert in range(layout.n_experts):
                at = int(places[expert, page])
                assert at == begin + (expert * p.n_rows + rows.start) * p.row_bytes
                seen[at : at + (rows.stop - rows.start) * p.row_bytes] += 1
        assert (seen[begin : begin + layout.n_experts * p.n_rows * p.row_bytes] == 1).all(), p.name
    assert seen.max() == 1


def test_pages_of_a_pool_are_those_that_its_allocator_gives() -> None:
    """Each once, inside the pool; many experts' side by side, and some not."""
    pages, n_pool = paged_weights.pages_after_moves(np.random.default_rng(1), 4, 32, 6)
    assert pages.shape == (4, 32, 6) and len(np.unique(pages)) == pages.size
    assert pages.min() >= 0 and pages.max() < n_pool
    assert 0.2 < (np.diff(pages, axis=-1) == 1).all(axis=-1).mean() < 1


def test_a_wrong_result_is_named() -> None:
    right = [np.ones((2, 3), np.float32), np.zeros(4, np.float32)]
    assert paging.difference([out.copy() for out in right], right) is None
    wrong = [right[0], np.array([0, 0.5, 0, np.nan], np.float32)]
    told = paging.difference(wrong, right)
    assert told is not None and told.startswith("hidden of layer 0: 2 of 4 values")
