"""Routing and experts on a GPU: every case, equal bits wherever an expert lies, and no dependence on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import moe as cases
from cases.common import Case, address_of
from cases.matmul import filled_act

from rimuru.arch.spec import MoeSpec
from rimuru.ops.base import ExpertTable
from rimuru.ops.cuda import moe_kernels

pytestmark = pytest.mark.gpu

SPEC = MoeSpec(16, 4, 512)
PAGE_BYTES = 64 * 1024


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    from rimuru.ops.cuda import CudaOps

    yield CudaOps(deterministic=request.param)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case(ops: Any, case: Case) -> None:
    case.check(ops)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 24, 25, 33, 64, 65, 100, 129, 130, 161])
def test_every_switch_of_kernel(ops: Any, n_tokens: int) -> None:
    """An expert gets half as many assignments as there are tokens: dots, strips of 8, 16 and 32 tokens, two tiles."""
    formats = {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}
    cases.experts_case(f"switch T={n_tokens}", formats, MoeSpec(4, 2, 256), 256, n_tokens).check(ops)


@pytest.mark.parametrize("n_tokens", [1, 3, 4, 5])
@pytest.mark.parametrize("down", ["q4_k", "q6_k", "mxfp4"])
def test_down_and_the_sum_in_one_kernel_are_equal_to_both(ops: Any, down: str, n_tokens: int) -> None:
    spec = MoeSpec(16, 6, 768)
    case = cases.experts_case("summed", {"gate": "q4_k", "up": "q4_k", "down": down}, spec, 512, n_tokens, biases=True)
    inputs = case.inputs()
    assert np.array_equal(case.run(ops, inputs)["out"], cases.summed_at_once(ops, inputs, spec))


@pytest.mark.parametrize("n_tokens", [9, 20, 40])
@pytest.mark.parametrize(
    ("gate", "up", "down"), [("q4_k", "q4_k", "q6_k"), ("q6_k", "q4_k", "q4_k"), ("q8_0", "q8_0", "q5_0")]
)
def test_strips_through_shared_memory_give_the_same_bits(
    ops: Any, gate: str, up: str, down: str, n_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over and over: a slot that is filled before it has been read would show at times only."""
    spec = MoeSpec(8, 4, 768)
    inputs = (case := cases.experts_case("ring", {"gate": gate, "up": up, "down": down}, spec, 2048, n_tokens)).inputs()
    found = [case.run(ops, inputs)["slots"] for _ in range(20)]
    for table in (moe_kernels.UP_RINGS, moe_kernels.DOWN_RINGS):
        for tokens_of_strip in table:
            monkeypatch.setitem(table, tokens_of_strip, {})
    wanted = case.run(ops, inputs)["slots"]
    assert all(np.array_equal(slots, wanted) for slots in found)
    for table in (moe_kernels.UP_RINGS, moe_kernels.DOWN_RINGS):
        for tokens_of_strip in table:
            monkeypatch.setitem(table, tokens_of_strip, dict.fromkeys((gate, up, down), (3, 512)))
    assert all(np.array_equal(case.run(ops, inputs)["slots"], wanted) for _ in range(20))


class Layer:
    """One layer's experts, in device memory and again in pinned host memory."""

    def __init__(self, ops: Any) -> None:
        import cupy

        self.ops = ops
        self.layout = cases.expert_layout({"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, 16, 1024, 512, PAGE_BYTES)
        pool, pages = cases.fill_pool(np.random.default_rng(6), self.layout, PAGE_BYTES)
        self.pool = ops.upload(pool)
        self.memory = cupy.cuda.alloc_pinned_memory(pool.nbytes)
        np.frombuffer(self.memory, np.uint8, pool.nbytes)[:] = pool
        offsets = pages.astype(np.int64) * PAGE_BYTES
        self.on_device, self.on_host = address_of(self.pool) + offsets, int(self.memory.ptr) + offsets

    def run(self, addresses: np.ndarray, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        table = ExpertTable(self.layout, PAGE_BYTES, self.ops.upload(addresses), {})
        scratch = self.ops.moe_scratch(len(x), SPEC, 1024)
        self.ops.moe_experts(filled_act(self.ops, x), self.ops.upload(ids), table, None, SPEC, scratch)
        return np.asarray(self.ops.download(scratch.out)).reshape(len(x), SPEC.top_k, -1)


@pytest.fixture(scope="module")
def layer(ops: Any) -> Layer:
    return Layer(ops)


def tokens(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    ids = np.stack([rng.permutation(16)[: SPEC.top_k] for _ in range(n)]).astype(np.int32)
    return rng.standard_normal((n, 1024)).astype(np.float32), ids


@pytest.mark.parametrize("n", [1, 2, 7, 30, 100, 400])
def test_placement_never_changes_a_bit(layer: Layer, n: int) -> None:
    x, ids = tokens(n)
    mixed = np.where(np.arange(16)[:, None] % 3 == 0, layer.on_host, layer.on_device)
    want = layer.run(layer.on_device, x, ids)
    assert np.array_equal(layer.run(mixed, x, ids), want)
    assert np.array_equal(layer.run(layer.on_host, x, ids), want)


@pytest.mark.parametrize("n", [5, 300, 1024, 2500])
def test_loading_buffers_are_pages_as_any_other(layer: Layer, n: int) -> None:
    """Half of the experts in an allocation of their own, tokens as in a prefill."""
    x, ids = tokens(n)
    want = layer.run(layer.on_device, x, ids)
    buffers = layer.pool.copy()
    in_buffers = layer.on_device + (address_of(buffers) - address_of(layer.pool))
    layer.ops.synchronize()
    mixed = np.where(np.arange(16)[:, None] % 2 == 0, in_buffers, layer.on_device)
    assert np.array_equal(layer.run(mixed, x, ids), want)
    assert np.isfinite(want).all() and want.any()


@pytest.mark.parametrize("n", [2, 4, 30, 100])
def test_deterministic_experts_do_not_depend_on_the_batch(layer: Layer, n: int) -> None:
    if n > 4 and not layer.ops.deterministic:
        pytest.skip("larger batches may use tensor cores")
    x, ids = tokens(n)
    whole = layer.run(layer.on_device, x, ids)
    assert np.array_equal(layer.run(layer.on_device, x[:1], ids[:1]), whole[:1])
    assert np.array_equal(layer.run(layer.on_device, x[::-1].copy(), ids[::-1].copy()), whole[::-1])
