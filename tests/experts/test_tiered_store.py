"""The store for models that pool and host memory do not hold, in engines on the CPU: bytes from copies or the file."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rimuru import LLM, SamplingParams
from rimuru.base.errors import NotEnoughMemoryError, RimuruError, StoreReadError
from rimuru.engine import build, stores
from rimuru.engine.room import ExpertRoom
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.experts.host_arena import HostArena, PinningError
from rimuru.experts.ram_tier import RamTier
from rimuru.experts.residency import Residency
from rimuru.experts.source import GgufExpertSource
from rimuru.experts.tiered_store import TieredExpertStore

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
N_REQUESTS = 8
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 5) for i in range(N_REQUESTS)]


@pytest.fixture
def ram_experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Engines get the tiered store; the list's number is how many experts host memory takes besides staging."""
    limit = [8]

    def make(self: build._Builder, biases: Any, factors: Any, room: ExpertRoom) -> TieredExpertStore:
        layout = self.layout.expert
        assert layout is not None
        self.source = self.source or GgufExpertSource(self.gguf, layout)
        parts = stores.StoreParts(
            layout, self.pool, self.source, self.ops, self.ops.copier, biases, factors, self.quotas, room, self.config,
            2,
        )  # fmt: skip
        return parts.tiered(self.n_buffers, (limit[0] + 4) * layout.max_pages * layout.page_bytes)

    monkeypatch.setattr(build._Builder, "_make_store", make)
    monkeypatch.setattr("rimuru.experts.tiered_store.N_STAGING", 3)
    yield limit


def open_tiny(model: Path, tiny: int, **more: object) -> LLM:
    return LLM(model, device="cpu", memory=tiny, max_step_tokens=64, max_sequences=N_REQUESTS, **more)  # type: ignore[arg-type]


def store_of(llm: LLM) -> TieredExpertStore:
    store = llm.loaded.store
    assert isinstance(store, TieredExpertStore)
    return store


def run(llm: LLM) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]


VARIANTS: dict[str, tuple[int, dict[str, object]]] = {
    "paper": (8, {"policy": "paper"}),
    "cost, hot set": (8, {"policy": "cost", "residency": "hotset"}),
    "cost, recency, few copies": (0, {"policy": "cost", "residency": "recency"}),
    "all copied": (1000, {"policy": "paper"}),
    "none resident": (8, {"resident_experts": 0}),
    "paper, no fill on read": (8, {"policy": "paper", "fill_on_read": False}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same(
    model: Path, tiny: int, answers: list[list[int]], ram_experts: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are poisoned when they are given back, and every structure is audited after every step."""
    monkeypatch.setenv("RIMURU_POISON", "1")
    monkeypatch.setenv("RIMURU_AUDIT", "1")
    ram_experts[0], more = VARIANTS[name]
    with open_tiny(model, tiny, **more) as llm:
        assert run(llm) == answers
        store, tiers = store_of(llm), llm.memory()["tiers"]
        n_outside = store.layout.n_experts - tiers["pool_experts"]
        assert tiers["ram_experts"] <= min(ram_experts[0] + 3, store.layout.n_experts)
        assert (tiers["read_from_disk"] > 15) == (ram_experts[0] < n_outside)
        assert tiers["read_from_ram"] > 10
        assert not store._transfers and len(store._free_staging) == len(store._staging)


def test_a_resident_that_leaves_is_copied_and_not_read_again(
    model: Path, tiny: int, ram_experts: list[int], answers: list[list[int]]
) -> None:
    ram_experts[0] = 1000
    with open_tiny(model, tiny, policy="paper") as llm:
        store, room = store_of(llm), llm.loaded.room
        assert isinstance(room, ExpertRoom)
        before = store.n_from_disk
        assert room.shrink(5) == 5
        for index in np.flatnonzero(store.residency.exists & ~store.residency.resident):
            place = store.residency.place_of(int(index))
            copy, want = store.ram.get(place), np.empty(store._expert_bytes(place[0]), np.uint8)
            store.source.read_expert(*place, want.reshape(-1, store.layout.page_bytes))
            assert copy is not None and np.array_equal(copy, want)
        assert run(llm) == answers
        assert store.n_from_disk == before


@contextmanager
def replaced(owner: object, name: str, call: Callable[..., None]) -> Iterator[None]:
    """`owner.name(...)` becomes `call(original, ...)`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: call(original, *args))
    try:
        yield
    finally:
        setattr(owner, name, original)


def test_reads_that_arrive_late_change_nothing(
    model: Path, tiny: int, answers: list[list[int]], ram_experts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIMURU_POISON", "1")
    chance = random.Random(4)

    def late(original: Callable[..., None], *args: object) -> None:
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.004)
        original(*args)

    with open_tiny(model, tiny, policy="paper") as llm, replaced(store_of(llm).source, "read_expert", late):
        assert run(llm) == answers
        llm.loaded.engine.audit()


@pytest.mark.parametrize(
    ("what", "nth"),
    [("read", 1), ("read", 7), ("read", 30), ("copy in", 1), ("copy in", 20), ("copy out", 1), ("copy out", 3)],
)
def test_a_fault_leaves_a_working_engine(
    model: Path, tiny: int, answers: list[list[int]], ram_experts: list[int], what: str, nth: int
) -> None:
    count = 0
    error: Exception = StoreReadError("expert 3: checksum mismatch") if what == "read" else OSError("copy failed")

    def fail_once(original: Callable[..., None], *args: object) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise error
        original(*args)

    with open_tiny(model, tiny, policy="paper") as llm:
        engine, store = llm.loaded.engine, store_of(llm)
        owner, name = (store.source, "read_expert") if what == "read" else (store.copier, what.replace(" ", "_"))
        with replaced(owner, name, fail_once):
            first = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:8]]
            engine.run_until(first)
        assert count >= nth
        for sequence, answer in zip(first, answers, strict=False):
            if sequence.error is None:
                assert sequence.output_ids == answer
            else:
                assert isinstance(sequence.error, RimuruError) and str(error) in str(sequence.error)
        engine.audit()
        assert run(llm) == answers
        engine.audit()
        assert not store._transfers and len(store._free_staging) == len(store._staging)


def test_an_expansion_comes_from_copies_and_a_failed_one_concerns_nobody(
    model: Path, tiny: int, answers: list[list[int]], ram_experts: list[int]
) -> None:
    with open_tiny(model, tiny, policy="paper", residency="hotset", fill_on_read=False) as llm:
        store, room = store_of(llm), llm.loaded.room
        assert isinstance(room, ExpertRoom)
        room.shrink(6)

        def fail(original: Callable[..., None], *args: object) -> None:
            raise OSError("unreadable")

        with replaced(store.source, "read_expert", fail):
            begun = store.expand(6)
            store.finish_reads()
        n_came = sum(bool(store.residency.resident[place]) for place in begun)
        assert len(begun) == 6 and n_came == sum(store.ram.get(place) is not None for place in begun) > 0
        llm.loaded.engine.audit()
        assert run(llm) == answers
        llm.loaded.engine.audit()


# ---- host memory
def a_tier(model: Path, n_slots: int) -> RamTier:
    with LLM(model, device="cpu") as llm:
        layout = llm.loaded.layout.expert
    assert layout is not None
    arena = HostArena(lambda n: np.zeros(n, np.uint8), n_slots * layout.max_pages * layout.page_bytes)
    return RamTier(layout, arena, Residency(layout))


def test_copies_that_are_worth_least_go_first(model: Path) -> None:
    tier = a_tier(model, 3)
    scores = tier.residency.scores
    scores[0, :5] = [5, 4, 3, 2, 9]
    for expert in range(3):
        assert tier.claim((0, expert), []) is not None
    assert tier.claim((0, 3), []) is None  # worth less than any that is there
    assert tier.claim((0, 4), [(0, 2)]) is not None and tier.get((0, 1)) is None and tier.get((0, 2)) is not None
    tier.residency.resident[0, 4] = True  # its copy is of no use now
    assert tier.claim((0, 3), []) is not None and tier.get((0, 4)) is None and len(tier) == 3
    tier.audit()
    tier.drop((0, 3))
    assert len(tier) == 2
    tier.audit()


def test_memory_that_is_not_pinned_is_not_lent_to_a_device() -> None:
    pinned = [True, False]
    arena = HostArena(lambda n: np.zeros(n, np.uint8), 1 << 30, lambda block: pinned.pop(0))
    assert arena.take(1000).size == 1000
    with pytest.raises(PinningError):
        arena.reserve(1 << 29)
    with pytest.raises(NotEnoughMemoryError):
        HostArena(lambda n: np.zeros(n, np.uint8), 100).take(1000)


def test_blocks_that_are_made_ahead_are_used() -> None:
    made: list[int] = []

    def alloc(n_bytes: int) -> np.ndarray:
        made.append(n_bytes)
        return np.zeros(n_bytes, np.uint8)

    arena = HostArena(alloc, 600 << 20)
    arena.reserve(300 << 20)
    assert len(made) == 2 and arena.held_bytes == sum(made)
    for _ in range(4):
        arena.take(100 << 20)
    assert len(made) == 2 and arena.held_bytes <= 600 << 20


# ---- which store
def device_parts(llm: LLM, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> stores.StoreParts:
    loaded = llm.loaded
    layout, room = loaded.layout.expert, loaded.room
    assert layout is not None and isinstance(room, ExpertRoom) and loaded.source is not None

    def copier() -> Any:
        made = loaded.ops.copier()
        monkeypatch.setattr(made, "is_pinned", lambda array: pinned)
        return made

    n_layers = len(layout.layers)
    return stores.StoreParts(
        layout, loaded.pool, loaded.source, loaded.ops, copier, [{}] * n_layers, [{}] * n_layers, None, room,
        stores.EngineConfig(), 2,
    )  # fmt: skip


def test_too_little_pinned_memory_means_staging(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model, device="cpu") as llm:
        assert isinstance(device_parts(llm, True, monkeypatch).device(0, 1 << 30), DeviceExpertStore)
        with caplog.at_level("WARNING"):
            assert device_parts(llm, False, monkeypatch).device(0, 1 << 30) is None
        assert "staging" in caplog.text


def test_the_disk_is_needed_where_pool_and_ram_are_too_small(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model, device="cpu") as llm:
        layout = llm.loaded.layout.expert
        assert layout is not None
        n_bytes = layout.n_pages * layout.page_bytes
        assert not stores.needs_disk(layout, "cpu", 0, 0) and not stores.needs_disk(None, "cuda", 0, 0)
        assert stores.needs_disk(layout, "cuda", n_bytes // 2, n_bytes // 4)
        assert not stores.needs_disk(layout, "cuda", n_bytes // 2, n_bytes)
        parts = device_parts(llm, True, monkeypatch)
        store = parts.device(0, n_bytes // 2)  # what leaves the pool must find a place in RAM
        assert store is not None and not store.by_device
        assert parts.room.offload_limit is not None and 0 < parts.room.offload_limit <= layout.n_experts // 2
