"""The kernels that the cost of paging is measured with: experts in tensors give what experts in pages give."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
import emulate
import nvrtc
import paged_weights
import paging
from cases import matmul as matmul_cases
from cases import moe as moe_cases

from rimuru.arch.spec import MoeSpec
from rimuru.ops.base import ExpertTable
from rimuru.ops.cuda import moe, moe_kernels, routing

SPEC = MoeSpec(8, 2, 256, renormalise=True)
N_IN = 512


def tensors_of(layout: Any, pool: np.ndarray, pages: np.ndarray, page_bytes: int) -> np.ndarray:
    """The experts of a pool image as tensors."""
    starts, n_bytes = paged_weights.first_rows(layout)
    tensors = emulate.aligned((n_bytes,), np.uint8)
    for p in layout.projections:
        for expert in range(layout.n_experts):
            for page, rows in paged_weights.page_parts(p):
                at = (starts[p.name] + expert * p.n_rows + rows.start) * p.row_bytes
                source = int(pages[expert, page]) * page_bytes
                n = (rows.stop - rows.start) * p.row_bytes
                tensors[at : at + n] = pool[source : source + n]
    return tensors.view(np.int64)


@pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize(
    "n_tokens, down, page_kib, routed",
    [
        (1, "q4_k", 8, False), (1, "q6_k", 64, True), (4, "q6_k", 8, True), (4, "q4_k", 64, True),
        (1, "q6_k", 64, False), (4, "q4_k", 64, False),
        (5, "q4_k", 64, True),
        (5, "q6_k", 8, False), (9, "q4_k", 64, False), (40, "q4_k", 8, False), (40, "q6_k", 64, False),
        (140, "q4_k", 64, False), (520, "q6_k", 64, False),
    ],
)  # fmt: skip
def test_results_are_equal(
    n_tokens: int, down: str, page_kib: int, routed: bool, on_the_host: emulate.Emulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """routed: by a router that has looked up where experts of single assignments lie."""
    rng, page_bytes = np.random.default_rng(n_tokens), page_kib * 1024
    n_in = 256 if n_tokens > 100 else N_IN  # the emulator takes its time
    ops: Any = emulate.EmulatedOps()
    layout = moe_cases.expert_layout(
        {"gate": "q4_k", "up": "q4_k", "down": down}, SPEC.n_experts, n_in, 256, page_bytes
    )
    image, pages = moe_cases.fill_pool(rng, layout, page_bytes)
    pool = emulate.upload(image)
    table = ExpertTable(layout, page_bytes, pool.ctypes.data + pages.astype(np.int64) * page_bytes, {})
    ids = np.stack([rng.permutation(8)[:2] for _ in range(n_tokens)]).astype(np.int32)
    x = matmul_cases.filled_act(ops, moe_cases.normal(rng, n_tokens, n_in))
    monkeypatch.setattr(paging, "QWEN3_30B", SPEC)
    monkeypatch.setattr(paging, "N_IN", n_in)
    monkeypatch.setattr(moe, "UNSORTED_TOKENS", 4)
    monkeypatch.setattr(moe, "SPARSE_UNSORTED_TOKENS", {})  # of so few experts, sorted ones soon go to tensor cores
    for module in (routing, paging):
        monkeypatch.setattr(module, "LINED_TOKENS", range(1, 17))
    router = paging.router_for(ops, n_tokens, 1) if routed else None
    with paging.recorded() as launches:
        scratch, total = paging.run_layer(ops, x, ids, table, router)
    assert (launches[0].kernel.name == "router") == routed
    is_summed = launches[-1].kernel.name == "moe_down_sum"
    assert is_summed == (n_tokens < 5)
    outputs = [total if is_summed else scratch.out, scratch.private.hidden]
    wanted = [out.copy() for out in outputs]
    for out in outputs:
        out.fill(np.nan)
    tensors = tensors_of(layout, image, pages, page_bytes)
    image[...] = 255
    pool[...] = 255  # nothing may be read there any more
    for launch in launches:
        paging.on_contiguous(launch, layout, tensors)()
    assert all(np.array_equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    n_sorts = 0 if n_tokens < 5 else 3 if n_tokens > 512 else 1
    assert len(launches) == routed + n_sorts + 2
    # Experts of a few pages have them listed with every item; else the table is read.
    listed = page_kib == 64 and (n_sorts > 0 or routed)
    assert all(("ITEM_PAGES" in k.kernel.defines) == listed for k in launches[routed + n_sorts :])
    if n_tokens > 100:  # as of fewer; and they have read a table before
        return
    # The same tensors through a table.
    for out in outputs:
        out.fill(np.nan)
    table.addresses[...] = tensors.ctypes.data + paged_weights.places_in_tensors(layout)
    for launch in launches:
        launch()
    assert all(np.array_equal(a, b) for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.skipif(not nvrtc.available(), reason="no compiler library")
def test_they_compile() -> None:
    layout = moe_cases.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 128, 2048, 768, 432 * 1024)
    kernels = [
        moe_kernels.up_kernel("q4_k", "q4_k", 1, *moe.up_shape(1, 1)),
        moe_kernels.down_kernel("q6_k", 1, *moe.down_shape("q6_k", 768, 1, 16)),
        moe_kernels.up_matrix_kernel("q4_k", "q4_k", moe_kernels.up_matrix_shape(2.0)),
        moe_kernels.down_matrix_kernel("q6_k", moe_kernels.down_matrix_shape(100.0)),
    ]
    assert layout.n_pages == 7
    for kernel in map(paging.contiguous_kernel, kernels):
        assert nvrtc.compile_source(kernel.path, kernel.defines, 90)


def test_first_rows_do_not_overlap() -> None:
    layout = moe_cases.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 128, 2048, 768, 432 * 1024)
    starts, n_bytes = paged_weights.first_rows(layout)
    gate, up, down = layout.projections
    assert starts["up"] * up.row_bytes == 128 * 768 * gate.row_bytes
    assert starts["down"] * down.row_bytes >= 2 * 128 * 768 * gate.row_bytes
    assert starts["down"] * down.row_bytes % 16 == 0
    assert n_bytes >= (starts["down"] + 128 * 2048) * down.row_bytes


class Stream:
    """As CuPy's: the end of a `with` makes the null stream the current one, though `use` had chosen another."""

    def __init__(self, current: list[object]) -> None:
        self.current = current

    def use(self) -> None:
        self.current[:] = [self]

    def __enter__(self) -> Stream:
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        self.current[:] = ["null"]

    def begin_capture(self, mode: object) -> None: ...

    def end_capture(self) -> list[object]:
        return list(self.current)


def test_what_follows_a_capture_goes_to_the_stream_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.SimpleNamespace(streamCaptureModeThreadLocal=1)
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    current: list[object] = ["null"]
    ops = types.SimpleNamespace(stream=Stream(current))
    done: list[object] = []
    graph = paging.graph_of(ops, [lambda: done.append(list(current))], 2)  # type: ignore[list-item]
    assert graph == [ops.stream] == current
    assert done == [current, current]
