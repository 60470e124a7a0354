"""The CUDA runtime: pool on a reserved range, graphs that outlive resizes, copies, pinned memory, staging."""

from __future__ import annotations

from typing import Any

import memory_pools
import numpy as np
import pytest
from cases.attention import AttentionShape, attention_inputs
from cases.common import make_batch, normal

from rimuru.base.errors import NotEnoughMemoryError
from rimuru.base.units import MIB
from rimuru.memory.page_pool import PagePool
from rimuru.ops.base import KvLayer

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops() -> Any:
    from rimuru.ops.cuda import CudaOps

    return CudaOps()


def test_usable(ops: Any) -> None:
    from rimuru.ops.cuda.device import free_bytes, usable

    assert usable() is None
    assert usable(device_id=99) == "there is no NVIDIA GPU"
    assert 0 < free_bytes() <= ops.info.total_bytes


def test_pool_keeps_addresses_and_content(ops: Any) -> None:
    from rimuru.ops.cuda.pool import MappedPool

    pool, copier = ops.reserve_pool(0, 256 * MIB), ops.copier()
    assert isinstance(pool, MappedPool) and pool.mapped_bytes == 0
    pool.resize(64 * MIB)
    base, mapped = pool.base, pool.mapped_bytes
    assert 64 * MIB <= mapped < 64 * MIB + pool.piece_bytes
    data = np.random.default_rng(0).integers(0, 256, 16 * MIB).astype(np.uint8)
    copier.copy_in(base, data)
    copier.wait()
    for n_bytes in (256 * MIB, 16 * MIB, 128 * MIB):
        pool.resize(n_bytes)
        assert pool.base == base and pool.mapped_bytes >= n_bytes
    back = np.empty_like(data)
    copier.copy_out(back, base)
    copier.wait()
    assert np.array_equal(back, data)
    with pytest.raises(NotEnoughMemoryError, match="reserved for"):
        pool.resize(300 * MIB)
    assert pool.mapped_bytes == 128 * MIB
    pool.close()


@pytest.mark.alone
def test_a_pool_that_cannot_grow_stays_as_it_was(ops: Any) -> None:
    pool = ops.reserve_pool(32 * MIB, 2 * ops.info.total_bytes)
    before = pool.mapped_bytes
    with pytest.raises(NotEnoughMemoryError, match="smaller --memory"):
        pool.resize(ops.info.total_bytes + 8192 * MIB)
    assert pool.mapped_bytes == before
    pool.close()


def test_graph_outlives_a_resize(ops: Any) -> None:
    """The same captured decode step before and after the pool shrank and grew under it: same graph, same bits."""
    shape = AttentionShape([1] * 3, [70, 200, 5], 8, 2, 128, 128, 16, "f16")
    inputs = attention_inputs(shape, np.random.default_rng(1))
    pool, copier = ops.reserve_pool(64 * MIB, 128 * MIB), ops.copier()
    copier.copy_in(pool.base, inputs["pool"])
    copier.wait()
    kv = KvLayer(pool.base, shape.page_bytes, shape.group, 0, shape.layer_offset_bytes)
    q = ops.upload(np.concatenate([inputs["q"], inputs["q"][:1]]))
    weight = ops.upload(np.ones(8 * 128, np.float32))
    out, normed = ops.act(4, 8 * 128), ops.act(4, 8 * 128)

    def forward(step: Any) -> Any:
        n = step.host.n_tokens
        ops.attention(q[:n], 8, 128, False, step, kv, 0.1, None, None, out.head(n))
        ops.rms_norm(out.head(n).f32, weight, 1e-6, normed.head(n))
        return normed.f32

    results = []
    for turn in range(4):
        if turn == 2:
            pool.resize(32 * MIB)
        if turn == 3:
            pool.resize(128 * MIB)
        out.f32.fill(np.nan)
        results.append(ops.download(ops.graphs.run(inputs["batch"], forward))[:3])
    assert ops.graphs.n_graphs == 1
    assert all(np.array_equal(results[0], result) for result in results[1:])
    assert np.isfinite(results[0]).all()
    inputs["batch"].context_len[:] = [60, 150, 4]  # new lengths, same graph
    inputs["batch"].positions[:] = [59, 149, 3]
    changed = ops.download(ops.graphs.run(inputs["batch"], forward))[:3]
    want = ops.download(forward(ops.stage(inputs["batch"])))[:3]
    assert np.array_equal(changed, want) and not np.array_equal(changed, results[0])
    ops.graphs.clear()
    pool.close()


def test_stage_gives_equal_addresses(ops: Any) -> None:
    rng = np.random.default_rng(2)
    ops.reserve_step(64, 16, 64, 8)
    first = ops.stage(make_batch(rng, [1, 1], [5, 9], (4,), 2, (3,)))
    batch = make_batch(rng, [1, 1], [6, 10], (4,), 2, (3,))
    second = ops.stage(batch)
    for name in ("token_ids", "positions", "kv_pages", "ssm_pages", "conv_pages", "fresh_state", "logit_rows"):
        assert getattr(first, name).data.ptr == getattr(second, name).data.ptr
        assert np.array_equal(ops.download(getattr(second, name)), getattr(batch, name)), name
    for _ in range(20):  # more than there are pinned slots: each must have been copied before it is written again
        batch = make_batch(rng, [1, 3, 1], [6, 10, 7], (4,), 2, (3,))
        assert np.array_equal(ops.download(ops.stage(batch).positions), batch.positions)


def test_copier(ops: Any) -> None:
    copier = ops.copier()
    source = copier.alloc_host(3 * MIB)
    assert copier.is_pinned(source) and not copier.is_pinned(np.zeros(4, np.uint8))
    source[:] = np.random.default_rng(3).integers(0, 256, source.size).astype(np.uint8)
    device = ops.empty((8 * MIB,), np.uint8)
    at = int(device.data.ptr)
    ops.synchronize()
    copier.copy_in(at, source)
    copier.copy_within(at + 4 * MIB, at, 1 * MIB)
    copier.fill(at, 4096, 0xAB)
    marker = copier.record()
    copier.wait(marker)
    assert copier.done(marker)
    host = ops.download(device)
    assert (host[:4096] == 0xAB).all()
    assert np.array_equal(host[4096 : source.size], source[4096:])
    assert np.array_equal(host[4 * MIB : 5 * MIB], source[: 1 * MIB])
    back = np.zeros(1000, np.uint8)
    copier.copy_out(back, at + 4096)
    copier.wait()
    assert np.array_equal(back, source[4096:5096])
    copier.close()


def test_copies_and_kernels_in_order(ops: Any) -> None:
    """`follow` and `lead` order the two streams: a kernel reads what was copied before it, and not what came after."""
    copier = ops.copier()
    old, new = copier.alloc_host(4 * MIB), copier.alloc_host(4 * MIB)
    old.view(np.float32)[:] = 1.0
    new.view(np.float32)[:] = 2.0
    x = ops.empty((1024, 1024), np.float32)
    outs = [ops.act(1024, 1024) for _ in range(2)]
    ops.synchronize()
    for turn in range(10):
        copier.copy_in(int(x.data.ptr), old)
        copier.lead(ops.stream)
        ops.multiply(x, x, outs[0])
        copier.follow(ops.stream)
        copier.copy_in(int(x.data.ptr), new)
        copier.lead(ops.stream)
        ops.multiply(x, x, outs[1])
        copier.follow(ops.stream)
        assert (ops.download(outs[0].f32) == 1.0).all(), turn
        assert (ops.download(outs[1].f32) == 4.0).all(), turn
    copier.close()


def test_poison_never_meets_the_next_owner(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A freed page's NaN patterns are there when `free` returns, however much the copying stream has to do before."""
    from cupy.cuda import runtime

    monkeypatch.setenv("RIMURU_POISON", "1")
    layout, copier = memory_pools.hybrid(), ops.copier()
    pool = PagePool(ops.reserve_pool(layout.huge_bytes, 2 * MIB), layout, None, copier)
    busy = ops.empty((512 * MIB,), np.uint8)
    half = busy.nbytes // 2
    ids = pool.allocate("kv", 1)
    assert ids is not None
    address, n_bytes = pool.address("kv", int(ids[0])), pool.layout.page_bytes("kv")
    ops.synchronize()
    for _ in range(50):
        copier.copy_within(int(busy.data.ptr), int(busy.data.ptr) + half, half)
    pool.free("kv", ids)
    runtime.memsetAsync(address, 7, n_bytes, ops.stream.ptr)
    ops.synchronize()
    copier.wait()
    found = np.zeros(n_bytes, np.uint8)
    copier.copy_out(found, address)
    copier.wait()
    assert (found == 7).all()
    copier.close()
    pool.memory.close()


def test_kernels_read_pinned_memory(ops: Any) -> None:
    """In-place reads: a kernel takes its input from pinned host memory by the same address."""
    import cupy

    copier = ops.copier()
    host = copier.alloc_host(4 * 1024 * 64).view(np.float32).reshape(64, 1024)
    host[:] = normal(np.random.default_rng(4), 64, 1024)
    from rimuru.ops.cuda import pointwise

    out = ops.empty((64, 1024), np.float32)
    pointwise._glu((64, 1), (256,), (None, int(host.ctypes.data), out, None, None, None, 1024, 1024, 4))
    assert np.array_equal(ops.download(out), host)
    assert isinstance(out, cupy.ndarray)
    copier.close()


def test_large_upload(ops: Any) -> None:
    host = np.random.default_rng(5).integers(0, 256, 50 * MIB + 77).astype(np.uint8)
    assert np.array_equal(ops.download(ops.upload(host)), host)
