"""Decode steps as one graph, step after step, on a GPU: what kernels read before their predecessor has ended is that of
the step before, never older. Norms, matrices, attention that prepares for itself, a router; convolution, DeltaNet."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases.attention import AttentionShape
from cases.common import address_of, make_batch, normal
from cases.matmul import random_rows

from rimuru.arch.spec import DeltaNetSpec, MoeSpec
from rimuru.batch import Batch
from rimuru.formats.quants import BY_NAME
from rimuru.memory.specs import ConvLayout, SsmLayout
from rimuru.ops.base import KvLayer, StateLayer, Step

pytestmark = pytest.mark.gpu

WIDTH, N_LAYERS, N_STEPS, FIRST = 512, 3, 12, 58
MOE = MoeSpec(16, 4, 512, renormalise=True)
DELTA = DeltaNetSpec(2, 4, 64, 4, "tiled")


class Steps:
    """Residuals through N_LAYERS layers of one set of weights; every layer has pages and states of its own."""

    def __init__(self, ops: Any, n_seqs: int) -> None:
        self.ops, self.n_seqs, rng = ops, n_seqs, np.random.default_rng(4)
        self.shape = AttentionShape([1] * n_seqs, [FIRST + N_STEPS] * n_seqs, 8, 2, 64, 64, 16, "f16")
        self.batch = make_batch(rng, [1] * n_seqs, self.shape.context_len, [16], N_LAYERS, [3] * N_LAYERS)
        channels, state_bytes = DELTA.conv_channels, 4 * 4 * 64 * 64
        self.ssm, self.conv = (
            SsmLayout(state_bytes, state_bytes, (0,)),
            ConvLayout(4 * channels, 4 * channels, 3, (0,), "ssm"),
        )
        self.pools = [
            normal(rng, n_seqs * 5 * self.shape.page_bytes // 2).astype(np.float16) for _ in range(N_LAYERS)
        ] + [normal(rng, n_seqs * N_LAYERS * n // 4) for n in (state_bytes, 3 * 4 * channels)]
        self.on_device = [ops.upload(pool.copy()) for pool in self.pools]
        self.weights = {
            name: ops.weight(random_rows(rng, BY_NAME[fmt], n_out, n_in), BY_NAME[fmt], n_in)
            for name, fmt, n_out, n_in in (
                ("q", "q4_k", 512, 512), ("k", "q4_k", 128, 512), ("v", "q6_k", 128, 512), ("o", "q4_k", 512, 512),
                ("u", "q8_0", channels, 512), ("b", "q8_0", 4, 512), ("down", "q8_0", 512, 256),
            )
        }  # fmt: skip
        self.router = ops.weight(normal(rng, 16, WIDTH, scale=0.05).view(np.uint8), BY_NAME["f32"], WIDTH)
        self.vectors = {
            "norm": np.ones(WIDTH, np.float32), "head": np.ones(64, np.float32), "taps": normal(rng, channels, 4),
            "a": -np.exp(normal(rng, 4)), "dt": normal(rng, 4), "rope": normal(rng, FIRST + N_STEPS, 64),
            "gate": np.ones(64, np.float32),
        }  # fmt: skip
        self.vectors = {name: ops.upload(v) for name, v in self.vectors.items()}
        sizes = {
            "x": 512,
            "q": 512,
            "k": 128,
            "v": 128,
            "u": channels,
            "mixed": channels,
            "b": 4,
            "al": 4,
            "d": 256,
            "l": 16,
            "w": 4,
        }
        self.f32 = {name: ops.empty((n_seqs, n), np.float32) for name, n in sizes.items()}
        self.ids = ops.empty((n_seqs, 4), np.int32)
        self.acts = {n: ops.act(n_seqs, n) for n in (WIDTH, 256)}
        self.attended = ops.act(n_seqs, WIDTH)

    def batch_of(self, at: int) -> Batch:
        position = np.full(self.n_seqs, FIRST + at, np.int32)
        return replace(self.batch, positions=position, context_len=position + 1)

    def forward(self, step: Step) -> None:
        ops, f, w, v = self.ops, self.f32, self.weights, self.vectors
        for layer in range(N_LAYERS):
            act = self.acts[WIDTH]
            ops.rms_norm(f["x"], v["norm"], 1e-6, act, may_wait=True)
            ops.linear(act, (w["q"], w["k"], w["v"]), (f["q"], f["k"], f["v"]))
            kv = KvLayer(address_of(self.on_device[layer]), self.shape.page_bytes, self.shape.group, 0, 0)
            ops.prepare_qkv(
                f["q"], f["k"], f["v"], v["head"], v["head"], "head", False, 1e-6, v["rope"], False, 8, 64, step, kv,
                may_wait=True,
            )  # fmt: skip
            ops.attention(f["q"], 8, 64, False, step, kv, 0.125, None, None, self.attended)
            ops.linear(self.attended, (w["o"],), (f["x"],), add=True)
            ops.rms_norm(f["x"], v["norm"], 1e-6, act, may_wait=True)
            ops.choose_experts(act, self.router, None, f["l"], MOE, None, self.ids, f["w"])
            ops.linear(act, (w["u"], w["b"]), (f["u"], f["b"]))
            conv = StateLayer(address_of(self.on_device[-1]), None, 0, self.conv, layer)
            ops.conv_update(f["u"], v["taps"], None, True, step, conv, f["mixed"])
            ssm = StateLayer(address_of(self.on_device[-2]), self.ssm, layer, None, 0)
            ops.delta_net(f["mixed"], f["b"], f["b"], v["a"], v["dt"], DELTA, 1e-6, step, ssm, f["d"])
            ops.gated_norm(f["d"], f["d"], v["gate"], 1e-6, 4, False, self.acts[256])
            ops.linear(self.acts[256], (w["down"],), (f["x"],), add=True)

    def start(self) -> None:
        for array, host in zip(self.on_device, self.pools, strict=True):
            self.ops.assign(array, host)

    def input_of(self, at: int) -> None:
        x = np.random.default_rng(at).standard_normal((self.n_seqs, WIDTH)).astype(np.float32)
        self.ops.assign(self.f32["x"], x)

    def results(self) -> list[np.ndarray]:
        found = [self.ops.download(array).copy() for array in (self.f32["x"], self.f32["l"], self.ids, self.f32["w"])]
        return found + [self.ops.download(array).view(np.uint8).copy() for array in self.on_device]


def captured(steps: Steps, step: Step) -> Any:
    import cupy

    gc.disable()
    steps.ops.stream.use()
    steps.ops.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
    try:
        steps.forward(step)
    finally:
        graph = steps.ops.stream.end_capture()
        gc.enable()
    return graph


@pytest.mark.parametrize("n_seqs", [1, 3, 8])
def test_steps_as_graphs_are_those_of_launches_one_by_one(n_seqs: int) -> None:
    from rimuru.ops.cuda import CudaOps

    steps = Steps(CudaOps(), n_seqs)
    want = []
    steps.start()
    for at in range(N_STEPS):
        steps.input_of(at)
        steps.forward(steps.ops.stage(steps.batch_of(at)))
        want.append(steps.results())
    assert np.isfinite(want[-1][0]).all() and not np.array_equal(want[0][2], want[-1][2])
    graph = captured(steps, steps.ops.stage(steps.batch_of(0)))
    for _ in range(3):
        steps.start()
        for at in range(N_STEPS):
            steps.input_of(at)
            steps.ops.stage(steps.batch_of(at))
            graph.launch(steps.ops.stream)
            if at % 4 == 3:  # the others follow without a pause
                assert all(np.array_equal(a, b) for a, b in zip(steps.results(), want[at], strict=True)), at
