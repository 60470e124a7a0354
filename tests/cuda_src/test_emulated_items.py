"""The list of items that the sort leaves for the expert kernels, on the host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases.moe import expert_layout

from rimuru.ops.base import ExpertTable
from rimuru.ops.cuda import moe, sorting
from rimuru.ops.cuda.launch import Kernel

pytestmark = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine")
N_EXPERTS = 40


@pytest.fixture
def _on_the_host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = emulate.Emulator(tmp_path_factory.mktemp("kernels"))
    monkeypatch.setattr(
        Kernel, "__call__", lambda kernel, grid, block, args: emulator.launch(kernel, grid, block, args)
    )


def items_by_hand(ids: np.ndarray, tile: int, readable: np.ndarray) -> list[tuple[int, int, int]]:
    """(expert, first place, count) of each item."""
    counts = np.bincount(ids.ravel(), minlength=N_EXPERTS)
    firsts = np.cumsum(counts) - counts
    return [
        (expert, int(firsts[expert]) + at, min(tile, int(counts[expert]) - at))
        for expert in range(N_EXPERTS)
        if readable[expert]
        for at in range(0, int(counts[expert]), tile)
    ]


@pytest.mark.usefixtures("_on_the_host")
@pytest.mark.parametrize("listed", [True, False])
def test_items_with_pages_and_none_behind_the_last(listed: bool) -> None:
    """Also where lists before were longer: up to 1024 assignments in one block, and more."""
    rng = np.random.default_rng(4)
    layout = expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, N_EXPERTS, 512, 256, 64 * 1024)
    addresses = emulate.upload(rng.integers(1 << 40, 1 << 41, (N_EXPERTS, layout.n_pages)))
    table = ExpertTable(layout, 64 * 1024, addresses, {})
    items = emulate.aligned((4096, sorting.ITEM_WORDS), np.int64)
    buffers: Any = SimpleNamespace(
        items=items, order=emulate.aligned(4096, np.int32), block_counts=emulate.aligned((4, N_EXPERTS), np.int32)
    )
    for n_tokens, n_used, tile, some in (
        (300, 40, 8, False),
        (300, 3, 8, False),
        (400, 40, 32, True),
        (50, 2, 2, True),
    ):
        ids = emulate.upload(rng.integers(0, n_used, (n_tokens, 3)).astype(np.int32))
        readable = rng.random(N_EXPERTS) < 0.5 if some else np.ones(N_EXPERTS, bool)
        active = emulate.upload(readable) if some else None
        n_most = sorting.sort_assignments(ids, active, table, tile, listed, buffers)
        wanted = items_by_hand(ids, tile, readable)
        assert len(wanted) <= n_most
        low, first = items[:n_most, 0] & 0xFFFFFFFF, items[:n_most, 0] >> 32
        found = list(zip((low & 0xFFFF).tolist(), first.tolist(), (low >> 16).tolist(), strict=True))
        assert found[: len(wanted)] == wanted
        assert not items[len(wanted) : n_most, 0].any()
        assert np.array_equal(buffers.order[: ids.size], np.argsort(ids.ravel(), kind="stable"))
        pages = items[: len(wanted), 1 : 1 + layout.n_pages]
        assert np.array_equal(pages, addresses[[expert for expert, _, _ in wanted]]) == listed


def test_scratch_has_a_line_for_every_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    from cases.moe import QWEN3_30B

    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    scratch = moe.moe_scratch(32, QWEN3_30B, 2048)
    arrays = [getattr(scratch.private, name) for name in moe.ExpertBuffers.__dataclass_fields__]
    n_bytes = sum(a.nbytes for a in [*arrays, scratch.out] if isinstance(a, np.ndarray))
    assert scratch.private.items.shape == (256, sorting.ITEM_WORDS)
    assert n_bytes == moe.moe_scratch_bytes(32, QWEN3_30B, 2048)
