"""A captured chain of dependent launches gives the bits of the same launches one after the other, on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cases import moe as cases
from cases.common import address_of

from rimuru.arch.spec import MoeSpec
from rimuru.ops.base import ExpertTable

pytestmark = pytest.mark.gpu

SPEC = MoeSpec(16, 4, 512)
WIDTH, PAGE_BYTES, N_LAYERS = 1024, 64 * 1024, 6


class Chain:
    """Norm, routing, experts and their sum, N_LAYERS times over: every buffer is written anew in each turn, with other
    values, while the cores still have in their caches what it held before."""

    def __init__(self, n_tokens: int) -> None:
        from rimuru.ops.cuda import CudaOps

        self.ops = ops = CudaOps()
        layout = cases.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 16, WIDTH, 512, PAGE_BYTES)
        pool, pages = cases.fill_pool(np.random.default_rng(6), layout, PAGE_BYTES)
        self.pool = ops.upload(pool)
        addresses = address_of(self.pool) + pages.astype(np.int64) * PAGE_BYTES
        self.table = ExpertTable(layout, PAGE_BYTES, ops.upload(addresses), {})
        self.x, self.total = (ops.empty((n_tokens, WIDTH), np.float32) for _ in range(2))
        self.logits = [ops.empty((n_tokens, 16), np.float32) for _ in range(N_LAYERS)]
        self.ids, self.weights = ops.empty((n_tokens, 4), np.int32), ops.empty((n_tokens, 4), np.float32)
        self.act, self.scratch = ops.act(n_tokens, WIDTH), ops.moe_scratch(n_tokens, SPEC, WIDTH)
        self.scratch.only_summed = True
        self.ones = ops.upload(np.ones(WIDTH, np.float32))

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in (self.x, *self.logits):
            self.ops.assign(array, rng.standard_normal(array.shape).astype(np.float32))
        self.ops.assign(self.total, np.zeros(self.total.shape, np.float32))

    def run(self) -> None:
        source = self.x
        for logits in self.logits:
            self.ops.rms_norm(source, self.ones, 1e-6, self.act)
            self.ops.route(logits, SPEC, None, self.ids, self.weights)
            self.ops.moe_experts(self.act, self.ids, self.table, None, SPEC, self.scratch)
            self.ops.moe_combine(self.scratch, self.weights, self.total, False, 1.0)
            source = self.total

    def capture(self) -> Any:
        import cupy

        gc.disable()
        self.ops.stream.use()
        self.ops.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            self.run()
        finally:
            graph = self.ops.stream.end_capture()
            gc.enable()
        return graph


@pytest.mark.parametrize("n_tokens", [1, 4, 8, 16, 40])
def test_a_graph_gives_what_launches_one_by_one_give(n_tokens: int) -> None:
    chain = Chain(n_tokens)
    chain.fill(0)
    chain.run()
    graph = chain.capture()
    for seed in range(1, 25):
        chain.fill(seed)
        chain.run()
        want = chain.ops.download(chain.total).copy()
        chain.fill(seed)
        graph.launch(chain.ops.stream)
        assert np.array_equal(chain.ops.download(chain.total), want), seed
        assert np.isfinite(want).all() and want.any()
