"""PagePool's addresses, reports and buffers; the views' tables, their publishing and their audit."""

from __future__ import annotations

import memory_pools as pools
import numpy as np
import pytest

from rimuru.base.errors import AuditError, NotEnoughMemoryError
from rimuru.memory.page_pool import PagePool
from rimuru.memory.views import ExpertView, SSMView, Table


def test_addresses_count_pages_of_each_kinds_own_size() -> None:
    pool = pools.make_pool(pools.hybrid(), 2)
    assert pool.address("kv", 7) == pool.base + 7 * 48
    np.testing.assert_array_equal(pool.addresses("ssm", [[0, 2], [-1, 1]]) - pool.base * np.array([[1, 1], [0, 1]]),
                                  [[0, 1536], [0, 768]])  # fmt: skip


def test_stats_name_every_byte() -> None:
    pool = pools.make_pool(pools.hybrid(), 4)
    idle = pool.stats()
    assert idle["total_bytes"] == idle["free_bytes"] == 4 * 2304
    pool.allocate("kv", 3)
    pool.allocate("conv", 2)
    pool.allocate("ssm", 1)
    pool.allocate_expert(3)
    buffer = pool.reserve_buffer(2)
    assert buffer is not None
    stats = pool.stats()
    assert stats["views"] == {
        "expert": {"pages": 3, "bytes": 864},
        "ssm": {"pages": 1, "bytes": 768},
        "kv": {"pages": 3, "bytes": 144},
        "conv": {"pages": 6, "bytes": 192},
        "buffer": {"pages": 2, "bytes": 576},
    }
    assert stats["free_bytes"] == 4 * 2304 - 864 - 768 - 144 - 192 - 576
    assert set(stats["levels"]) == {"l1", "l2", "l3"}
    pool.audit()
    pool.release_buffer(buffer)
    with pytest.raises(AuditError, match="no loading buffer"):
        pool.release_buffer(buffer)
    assert pool.stats()["views"]["buffer"] == {"pages": 0, "bytes": 0}


def test_pool_smaller_than_a_huge_page_is_refused() -> None:
    with pytest.raises(NotEnoughMemoryError, match="less than one huge page"):
        PagePool(pools.Ram(2303), pools.hybrid())


def test_poison_on_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIMURU_POISON", "1")
    pool = pools.make_pool(pools.hybrid(), 2)
    ids = pool.allocate("conv", 2)
    assert ids is not None
    pool.free("conv", ids[:1])
    assert (pools.page_bytes_of(pool, "conv", int(ids[0])) == 0xFF).all()
    assert (pools.page_bytes_of(pool, "conv", int(ids[1])) == 0).all()
    assert np.isnan(pools.page_bytes_of(pool, "conv", int(ids[0])).view(np.float16)).all()


def test_poison_never_meets_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's copies come when they come, beside what is written to pages meanwhile: the fill is waited for."""

    class LateCopier(pools.RamCopier):
        def __init__(self) -> None:
            super().__init__()
            self.queued: list[tuple[int, int, int]] = []

        def fill(self, address: int, n_bytes: int, value: int) -> None:
            self.queued.append((address, n_bytes, value))

        def wait(self, marker: object = None) -> None:
            while self.queued:
                super().fill(*self.queued.pop(0))

    monkeypatch.setenv("RIMURU_POISON", "1")
    copier = LateCopier()
    pool = pools.make_pool(pools.hybrid(), 2, copier=copier)
    ids = pool.allocate("kv", 1)
    assert ids is not None
    pool.free("kv", ids)
    content = pools.page_bytes_of(pool, "kv", int(ids[0]))
    assert (content == 0xFF).all()
    content[:] = 7
    copier.wait()
    assert (content == 7).all()


def test_audit_notices_lost_buffers_and_memory() -> None:
    pool = pools.make_pool(pools.hybrid(), 2)
    buffer = pool.reserve_buffer(2)
    assert buffer is not None
    pool.allocator.set_owners("expert", buffer, 3)
    with pytest.raises(AuditError, match="belong to somebody else"):
        pool.audit()
    pool = pools.make_pool(pools.hybrid(), 2)
    pool.memory.resize(2304)
    with pytest.raises(AuditError, match="are mapped"):
        pool.audit()


def test_table_publishes_each_change_once() -> None:
    table = Table(10, np.int64, 0)
    mirror = np.zeros(10, np.int64)
    calls: list[int] = []

    def upload(indices: np.ndarray, values: np.ndarray) -> None:
        mirror[indices] = values
        calls.append(indices.size)

    table.set(slice(2, 5), np.array([7, 8, 9]))
    table.set(np.array([4, 9]), 5)
    assert table.publish(upload) == 4 and table.publish(upload) == 0
    assert calls == [4]
    np.testing.assert_array_equal(mirror, table.values)
    table.set(slice(0, 1), 1)
    assert table.publish(None) == 1


def test_expert_view_tables() -> None:
    pool = pools.make_pool(pools.hybrid(), 4)
    view = ExpertView(pool)
    assert view.n_experts == 10 and view.row(1, 2) == 8 and view.slot_of(8) == (1, 2) and view.slot_of(5) == (0, 5)
    ids = pool.allocate_expert(2, view.row(1, 2))
    assert ids is not None
    view.place(1, 2, ids)
    assert view.layer(1).shape == (4, 2) and view.layer(0).shape == (6, 3)
    np.testing.assert_array_equal(view.layer(1)[2], pool.base + ids.astype(np.int64) * 288)
    assert view.is_resident(1).tolist() == [False, False, True, False]
    assert view.pages(0, 0) is None
    view.audit()
    back = view.place_elsewhere(1, 2, np.array([111, 222]))
    np.testing.assert_array_equal(back, ids)
    assert view.layer(1)[2].tolist() == [111, 222] and not view.is_resident(1).any()
    assert view.publish() == 2


def test_expert_view_audit_notices_damage() -> None:
    def placed() -> tuple[ExpertView, np.ndarray]:
        pool = pools.make_pool(pools.hybrid(), 4)
        view = ExpertView(pool)
        ids = pool.allocate_expert(3, view.row(0, 1))
        assert ids is not None
        view.place(0, 1, ids)
        view.audit()
        return view, ids

    view, ids = placed()
    view.table.values[3] += 288
    with pytest.raises(AuditError, match="not that of its pool page"):
        view.audit()
    view, ids = placed()
    view.place(0, 2, ids)
    with pytest.raises(AuditError, match="more than one"):
        view.audit()
    view, ids = placed()
    view.pool.allocator.set_owners("expert", ids, 4)
    with pytest.raises(AuditError, match="another expert"):
        view.audit()
    view, ids = placed()
    view.pool.free("expert", ids)
    with pytest.raises(AuditError, match="not allocated"):
        view.audit()


def test_sequence_view_grows_and_flips() -> None:
    pool = pools.make_pool(pools.hybrid(), 4)
    assert pool.layout.ssm is not None
    view = SSMView(pool, pool.layout.ssm)
    view.ids[3] = [4, 5]
    view.reserve(100, 2)
    assert view.ids.shape == (100, 2) and view.ids[3].tolist() == [4, 5] and (view.ids[4:] == -1).all()
    view.flip(np.array([5, 9], np.int32), np.array([1, 2], np.int32))
    assert view.ids[3].tolist() == [4, 1]
    assert view.addresses(3).tolist() == [pool.base + 4 * 768, pool.base + 768] and view.addresses(0).tolist() == [0, 0]
