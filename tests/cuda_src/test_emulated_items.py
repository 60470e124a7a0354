"""The items that the sort, or the router of few tokens, leaves for the expert kernels, on the host."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
from cases.common import normal
from cases.matmul import filled_act
from cases.moe import expert_layout

from rimuru.arch.spec import MoeSpec
from rimuru.formats.quants import BY_NAME
from rimuru.ops.base import ExpertTable, MoeScratch
from rimuru.ops.cuda import moe, routing, sorting
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
    items = emulate.aligned((4096, routing.ITEM_WORDS), np.int64)
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


def chosen_with_items(n_tokens: int, top_k: int, page_bytes: int) -> tuple[np.ndarray, np.ndarray, ExpertTable | None]:
    """(ids, items, the table that they are of) of a router."""
    rng, spec, width = np.random.default_rng(n_tokens), MoeSpec(N_EXPERTS, top_k, 256), 128
    layout = expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q4_k"}, N_EXPERTS, 512, 256, page_bytes)
    addresses = emulate.upload(rng.integers(1 << 40, 1 << 41, (N_EXPERTS, layout.n_pages)))
    table, ops = ExpertTable(layout, page_bytes, addresses, {}), emulate.EmulatedOps()
    private = SimpleNamespace(items=emulate.aligned((n_tokens * top_k, routing.ITEM_WORDS), np.int64), lined=None)
    ids, weights = (emulate.aligned((n_tokens, top_k), kind) for kind in (np.int32, np.float32))
    logits = emulate.aligned((n_tokens, N_EXPERTS), np.float32)
    router = ops.weight(normal(rng, N_EXPERTS, width).view(np.uint8), BY_NAME["f32"], width)
    x: Any = filled_act(ops, normal(rng, n_tokens, width))  # type: ignore[arg-type]
    ops.choose_experts(x, router, None, logits, spec, None, ids, weights, (table, MoeScratch(logits, private)))
    return ids, private.items, private.lined


@pytest.mark.usefixtures("_on_the_host")
@pytest.mark.parametrize("n_tokens, top_k, page_kib", [(6, 3, 64), (5, 8, 15), (10, 11, 64)])
def test_a_router_makes_an_item_of_each_assignment(
    n_tokens: int, top_k: int, page_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd number of experts, 15 pages of each, more experts than are looked up at a time."""
    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    ids, items, table = chosen_with_items(n_tokens, top_k, page_kib * 1024)
    assert table is not None
    n_pages, experts = table.layout.n_pages, ids.ravel()
    assert (n_pages == 15) == (page_kib == 15)
    assert np.array_equal(items[:, 0], experts | 1 << 16 | np.arange(ids.size, dtype=np.int64) << 32)
    assert np.array_equal(items[:, 1 : 1 + n_pages], table.addresses[experts])


@pytest.mark.usefixtures("_on_the_host")
@pytest.mark.parametrize(
    "n_tokens, page_kib", [(routing.LINED_TOKENS.stop, 64), (routing.LINED_TOKENS.start - 1, 64), (6, 8)]
)
def test_no_items_of_many_or_few_tokens_nor_of_many_pages(
    n_tokens: int, page_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    _, items, table = chosen_with_items(n_tokens, 4, page_kib * 1024)
    assert table is None and (items == -1).all()


def test_scratch_has_a_line_for_every_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    from cases.moe import QWEN3_30B

    monkeypatch.setitem(sys.modules, "cupy", emulate.fake_cupy())
    scratch = moe.moe_scratch(32, QWEN3_30B, 2048)
    arrays = [getattr(scratch.private, name) for name in moe.ExpertBuffers.__dataclass_fields__]
    n_bytes = sum(a.nbytes for a in [*arrays, scratch.out] if isinstance(a, np.ndarray))
    assert scratch.private.items.shape == (256, routing.ITEM_WORDS)
    assert n_bytes == moe.moe_scratch_bytes(32, QWEN3_30B, 2048)
