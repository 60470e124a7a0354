"""The residency step and its commands, emulated, against their NumPy twin: who comes and goes, every byte and count."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulate
import nvrtc

from rimuru.experts.places_jit import take_fills
from rimuru.memory.decisions import EXPERT, IS_FORETOLD, N_FILL_FIELDS, PLACE, SLOT, STEP, VICTIM
from rimuru.memory.specs import ExpertLayerLayout
from rimuru.ops.cuda import residency
from rimuru.ops.places import (
    ALL_COME,
    ASKED,
    BUFFERED,
    DECAY,
    FILLS,
    FORETOLD,
    HITS,
    LOG_ENTRIES,
    MAX_COMMANDS,
    N_TOTALS,
    STEPS,
    ExpertPlaces,
    LayerPlaces,
    fill_entry,
    n_copy_entries,
)
from rimuru.ops.reference import residency as twin

PAGE_BYTES = 4096 + 16
N_PAGES = 3
SLOT_NUMBER = 7
NOT_COMPARED = ("layout", "page_bytes", "addresses", "homes", "pages", "control", "buffers", "copies", "log")
"""Of two worlds' layers: addresses differ, and logs are compared bit for bit."""

pytestmark = pytest.mark.usefixtures("on_the_host")
needs_compiler = pytest.mark.skipif(emulate.compiler() is None, reason="no C++ compiler on this machine")


class World:
    """One layer of experts with their homes, and a pool of places, in RAM."""

    def __init__(
        self, n_experts: int, n_places: int, n_held: int, by_recency: bool, most_fills: int, n_buffers: int = 0
    ) -> None:
        rng = np.random.default_rng(n_experts * 7 + n_places)
        self.store = emulate.upload(rng.integers(0, 255, n_experts * N_PAGES * PAGE_BYTES, np.uint8))
        self.pool = emulate.upload(np.full(n_experts * N_PAGES * PAGE_BYTES, 0xEE, np.uint8))
        expert_bytes = N_PAGES * PAGE_BYTES
        homes = self.store.ctypes.data + np.arange(n_experts, dtype=np.int64) * expert_bytes
        control = np.array([by_recency, by_recency, most_fills, n_buffers, 0], np.int32)
        control[DECAY] = np.float32(50.0).view(np.int32)
        self.buffers = emulate.upload(np.full(max(1, n_buffers) * (N_PAGES + 1) * PAGE_BYTES, 0xDD, np.uint8))
        order = rng.permutation(n_experts * N_PAGES)  # pages of a place lie anywhere
        at = self.pool.ctypes.data + order.astype(np.int64).reshape(n_experts, N_PAGES) * PAGE_BYTES
        self.all_pages = at.copy()
        pages = np.where(np.arange(n_experts)[:, None] < n_places, at, 0)
        addresses = homes[:, None] + np.arange(N_PAGES, dtype=np.int64) * PAGE_BYTES
        holders = np.full(n_experts, -1, np.int32)
        place_of = np.full(n_experts, -1, np.int32)
        for place, expert in enumerate(rng.permutation(n_experts)[:n_held]):
            holders[place], place_of[expert], addresses[expert] = expert, place, pages[place]
            for j in range(N_PAGES):
                twin.bytes_at(int(pages[place, j]), PAGE_BYTES)[:] = self.page(int(expert), j)
        self.layer = LayerPlaces(
            ExpertLayerLayout(0, n_experts, N_PAGES, ()), PAGE_BYTES, addresses.astype(np.int64), homes, pages,
            holders, place_of, np.zeros(n_experts, np.int32), np.zeros(n_experts, np.float32),
            np.zeros(n_experts, np.int32), np.zeros(n_experts, np.int32), np.zeros(N_TOTALS, np.int32),
            control,
            self.buffers.ctypes.data + np.arange(max(1, n_buffers) * (N_PAGES + 1), dtype=np.int64)
            .reshape(-1, N_PAGES + 1) * PAGE_BYTES,
            np.zeros(n_copy_entries(N_PAGES + 1), np.int64), np.zeros(n_experts, np.bool_),
            np.zeros(n_experts, np.bool_), np.zeros(1 + LOG_ENTRIES, np.int64), SLOT_NUMBER,
        )  # fmt: skip

    def page(self, expert: int, j: int) -> np.ndarray:
        start = (expert * N_PAGES + j) * PAGE_BYTES
        return self.store[start : start + PAGE_BYTES]

    def flat(self) -> ExpertPlaces:
        layer = self.layer
        return ExpertPlaces(
            PAGE_BYTES, layer.addresses.reshape(-1), layer.homes, layer.pages.reshape(-1), layer.holders,
            layer.place_of, layer.last_used, layer.scores, layer.counts, layer.buffered, layer.totals, layer.control,
            layer.buffers, layer.copies, layer.now, layer.later, layer.log,
        )  # fmt: skip

    def check(self) -> None:
        """Every expert is read from bytes that are its own; holders and place_of are each other's inverse."""
        layer = self.layer
        for expert in range(layer.layout.n_experts):
            for j, address in enumerate(layer.addresses[expert]):
                assert np.array_equal(twin.bytes_at(int(address), PAGE_BYTES), self.page(expert, j))
            place = layer.place_of[expert]
            assert (layer.addresses[expert] == (layer.pages[place] if place >= 0 else layer.addresses[expert])).all()
            if place >= 0:
                assert layer.holders[place] == expert
        held = layer.holders[layer.holders >= 0]
        assert len(set(held.tolist())) == len(held) == int((layer.place_of >= 0).sum())


def same_state(a: World, b: World) -> None:
    for field in fields(LayerPlaces):
        if field.name in NOT_COMPARED:
            continue
        assert np.allclose(getattr(a.layer, field.name), getattr(b.layer, field.name), rtol=1e-5), field.name
    assert np.array_equal(a.layer.pages != 0, b.layer.pages != 0)
    assert np.array_equal(a.layer.log, b.layer.log)


CASES = [
    (16, 8, 8, True, 64), (16, 8, 5, False, 64), (300, 40, 40, True, 3), (60, 0, 0, True, 64), (40, 20, 20, False, 0),
    (70, 70, 60, False, 64), (200, 120, 100, True, 64), (60, 0, 0, True, 64, 8), (40, 20, 20, False, 64, 40),
    (300, 40, 40, True, 3, 300), (40, 20, 20, True, 0, 5),
]  # fmt: skip
"""(experts, places, of these held, by recency, most fills, loading buffers)."""


def fetch_apart(ids: np.ndarray, positions: np.ndarray, layer: LayerPlaces) -> None:
    """Plan and copies as two launches."""
    residency.plan_fetch(ids, positions, layer)
    n_copies = int(layer.copies[0])
    assert n_copies <= int(layer.later.sum())
    residency.bring(layer)


@needs_compiler
@pytest.mark.parametrize("fetch", [(residency.fetch_experts, twin.fetch_experts), (fetch_apart, twin.fetch_aside)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_is_the_twins(case: tuple[Any, ...], fetch: tuple[Any, Any]) -> None:
    ours, theirs = World(*case), World(*case)
    rng = np.random.default_rng(5)
    n_experts = case[0]
    heat = rng.gamma(0.5, 1.0, n_experts)
    for step, n_tokens in enumerate((1, 1, 4, 1, 12, 2, 40, 1, 1)):
        rows = [rng.choice(n_experts, 4, replace=False, p=heat / heat.sum()) for _ in range(n_tokens)]
        ids = np.array(rows, np.int32)
        positions = np.arange(n_tokens, dtype=np.int32) + 3
        if n_tokens > 2:
            positions[-2:] = -1  # padding
        copy = ids.copy()
        resident = ours.layer.place_of >= 0
        fetch[0](ids, positions, ours.layer)
        fetch[1](copy, positions, theirs.layer)
        if fetch[0] is fetch_apart:
            chosen = np.isin(np.arange(n_experts), ids[positions >= 0])
            assert np.array_equal(ours.layer.now, chosen & resident)
            assert np.array_equal(ours.layer.later, chosen & ~resident)
        assert np.array_equal(ids, copy) and (ids[positions < 0] == -1).all()
        same_state(ours, theirs)
        ours.check()
        theirs.check()
        assert ours.layer.totals[STEPS] == step + 1 and (ours.layer.totals[6:] == 0).all()
    totals = ours.layer.totals
    assert totals[HITS] <= totals[ASKED] and (totals[FILLS] > 0) == (case[1] > 0 and case[4] > 0)
    assert (totals[BUFFERED] > 0) == (len(case) > 5)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forecasts_are_the_twins(case: tuple[Any, ...]) -> None:
    """Before each turn some of its experts are foretold, and some that nobody chooses: they come, nothing is counted,
    and buffers of the turn before are given back by the turn."""
    ours, theirs = World(*case), World(*case)
    rng = np.random.default_rng(6)
    n_experts = case[0]
    for step, n_tokens in enumerate((1, 3, 1, 12, 2)):
        ids = np.array([rng.choice(n_experts, 4, replace=False) for _ in range(n_tokens)], np.int32)
        positions = np.arange(n_tokens, dtype=np.int32)
        foretold = ids.copy()
        foretold[:, 3] = rng.integers(0, n_experts, n_tokens)
        if n_tokens > 2:
            positions[-1] = -1
        before = [ours.layer.totals[:6].copy(), ours.layer.counts.copy(), ours.layer.scores.copy()]
        was_buffered, was_resident = ours.layer.buffered.copy(), ours.layer.place_of >= 0
        residency.plan_fetch(foretold.copy(), positions, ours.layer, foretells=True)
        n_brought = int(ours.layer.copies[0])
        residency.bring(ours.layer)
        twin.fetch_ahead(foretold.copy(), positions, theirs.layer)
        after = [ours.layer.totals[:6], ours.layer.counts, ours.layer.scores]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert np.array_equal(ours.layer.buffered, was_buffered)
        assert n_brought == int(((ours.layer.place_of >= 0) & ~was_resident).sum())
        ours.layer.now[:], ours.layer.later[:] = theirs.layer.now, theirs.layer.later  # the twin leaves them
        same_state(ours, theirs)
        fetch_apart(ids.copy(), positions, ours.layer)
        twin.fetch_aside(ids.copy(), positions, theirs.layer)
        same_state(ours, theirs)
        ours.check()
        theirs.check()
        assert ours.layer.totals[STEPS] == step + 1
    assert (ours.layer.totals[FORETOLD] > 0) == (case[1] > 0 and case[4] > 0)


def fills_of(log: np.ndarray, n_taken: int, n_steps: int) -> np.ndarray:
    """Rows (FillLog.rows) of the entries from n_taken on; n_steps: that the layer has counted, also by the host."""
    totals = np.zeros((SLOT_NUMBER + 1, N_TOTALS), np.int32)
    totals[SLOT_NUMBER, STEPS] = n_steps
    rows, per_layer = np.zeros((LOG_ENTRIES, N_FILL_FIELDS), np.int64), np.zeros(SLOT_NUMBER + 1, np.int64)
    n_by_now, n_known, n_foretold, n_lost = take_fills(log, n_taken, totals, n_steps, rows, 0, per_layer)
    assert n_by_now == log[0] and n_lost == 0 and n_known == n_by_now - n_taken == per_layer[SLOT_NUMBER]
    assert n_foretold == rows[:n_known, IS_FORETOLD].sum() and (rows[:n_known, SLOT] == SLOT_NUMBER).all()
    return rows[:n_known]


@needs_compiler
@pytest.mark.parametrize("n_logged", [0, LOG_ENTRIES - 3, 8 * LOG_ENTRIES - 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_log_explains_every_holder(case: tuple[Any, ...], n_logged: int) -> None:
    """Replayed from the first holders, it arrives at who holds them after each step, wherever the ring ends."""
    world = World(*case)
    rng, layer, n_experts = np.random.default_rng(8), world.layer, case[0]
    layer.log[0] = n_taken = n_logged
    place_of = {int(e): place for place, e in enumerate(layer.holders) if e >= 0}
    n_foretold = 0
    for step in range(1, 12):
        ids = np.array([rng.choice(n_experts, 4, replace=False) for _ in range(1 + step % 4)], np.int32)
        positions = np.arange(len(ids), dtype=np.int32)
        if step % 3 == 0:
            residency.plan_fetch(ids.copy(), positions, layer, foretells=True)
            residency.bring(layer)
            n_foretold += int(layer.log[0]) - n_taken
        (residency.fetch_experts if step % 2 else fetch_apart)(ids, positions, layer)
        for row in fills_of(layer.log, n_taken, step):
            expert, victim, place = row[[EXPERT, VICTIM, PLACE]].tolist()
            assert row[STEP] == step and expert not in place_of and victim not in ids
            assert place_of.pop(victim) == place if victim >= 0 else place not in place_of.values()
            place_of[expert] = place
        n_taken = int(layer.log[0])
        assert place_of == {int(e): place for place, e in enumerate(layer.holders) if e >= 0}
    totals = layer.totals
    assert n_taken - n_logged == totals[FILLS] + totals[FORETOLD] and totals[FORETOLD] == n_foretold
    assert (n_taken > n_logged) == (case[1] > 0 and case[4] > 0)


def test_a_log_that_overflows_or_is_being_written_tells_what_is_there() -> None:
    """Entries written over are lost; those that are not there yet come with the next report."""
    log = np.zeros(1 + LOG_ENTRIES, np.int64)

    def write(first: int, end: int, says: int) -> None:
        for number in range(first, end):
            place = number % 5
            log[1 + number % LOG_ENTRIES] = fill_entry(
                number, 300_000, 2, number % 1024, number % 1025 - 1, place, True
            )
        log[0] = says

    totals = np.zeros((3, N_TOTALS), np.int32)
    totals[2, STEPS] = 300_001
    rows, per_layer = np.zeros((4, N_FILL_FIELDS), np.int64), np.zeros(3, np.int64)
    write(0, 6, 10)  # four are counted and not there
    assert take_fills(log, 0, totals, 50, rows, 0, per_layer) == (6, 6, 6, 0)
    assert rows[[0, 1, 2, 3]].tolist() == [[49, 2, n, n - 1, n % 5, 1] for n in (4, 5, 2, 3)]
    write(6, LOG_ENTRIES + 9, LOG_ENTRIES + 9)
    assert take_fills(log, 6, totals, 50, rows, 6, per_layer) == (LOG_ENTRIES + 9, LOG_ENTRIES, LOG_ENTRIES, 3)
    write(LOG_ENTRIES + 9, 2 * LOG_ENTRIES + 11, 2 * LOG_ENTRIES + 9)  # two more than it says have been written
    found = take_fills(log, LOG_ENTRIES + 9, totals, 50, rows, 0, per_layer)
    assert found == (2 * LOG_ENTRIES + 9, LOG_ENTRIES - 2, LOG_ENTRIES - 2, 2)
    assert per_layer.tolist() == [0, 0, 6 + 2 * LOG_ENTRIES - 2]
    totals[2, STEPS] = 299_999  # foretold for the step that comes
    write(2 * LOG_ENTRIES + 11, 2 * LOG_ENTRIES + 12, 2 * LOG_ENTRIES + 12)
    take_fills(log, 2 * LOG_ENTRIES + 11, totals, 50, rows, 0, per_layer)
    assert rows[0, STEP] == 51 and take_fills(log, 2 * LOG_ENTRIES + 12, totals, 50, rows, 1, per_layer)[1:] == (
        0,
        0,
        0,
    )


@needs_compiler
def test_scores_count_a_long_step_as_its_tokens_one_by_one() -> None:
    """What a step of many tokens adds is what as many steps of one would, spread evenly."""
    whole, single = World(16, 4, 4, False, 0), World(16, 4, 4, False, 0)
    rows = np.tile(np.arange(16, dtype=np.int32).reshape(4, 4), (30, 1))
    residency.fetch_experts(rows.copy(), np.arange(120, dtype=np.int32), whole.layer)
    for row in rows:
        residency.fetch_experts(row[None].copy(), np.zeros(1, np.int32), single.layer)
    assert np.allclose(whole.layer.scores, single.layer.scores, rtol=0.1)


@needs_compiler
def test_all_come_by_score() -> None:
    """Whoever is missed comes, and the lowest score leaves."""
    world = World(16, 4, 4, False, 64)
    world.layer.control[ALL_COME] = 1
    held = world.layer.holders[:4].tolist()
    for chosen in (held, held[:3], held[:3]):
        residency.fetch_experts(np.array([chosen], np.int32), np.zeros(1, np.int32), world.layer)
    passer = next(e for e in range(16) if e not in held)
    residency.fetch_experts(np.array([[passer]], np.int32), np.zeros(1, np.int32), world.layer)
    assert set(world.layer.holders[:4].tolist()) == {*held[:3], passer}
    world.check()


@needs_compiler
def test_nobody_whom_the_step_uses_leaves() -> None:
    world = World(16, 4, 4, True, 64)
    held = world.layer.holders[:4].tolist()
    absent = [e for e in range(16) if e not in held]
    ids = np.array([[*held, *absent[:2]]], np.int32)
    residency.fetch_experts(ids, np.zeros(1, np.int32), world.layer)
    assert sorted(world.layer.holders[:4].tolist()) == sorted(held)
    assert world.layer.totals[FILLS] == 0 and world.layer.totals[HITS] == 4
    ids = np.array([[held[0], *absent[:2]]], np.int32)
    residency.fetch_experts(ids, np.zeros(1, np.int32), world.layer)
    assert set(world.layer.holders[:4].tolist()) >= {held[0], *absent[:2]}
    world.check()


@needs_compiler
def test_a_hot_set_keeps_the_hot() -> None:
    """By score, a passer-by does not push out an expert that is used more often."""
    world = World(16, 4, 4, False, 64)
    held = world.layer.holders[:4].tolist()
    passer = next(e for e in range(16) if e not in held)
    for _ in range(3):
        residency.fetch_experts(np.array([held], np.int32), np.zeros(1, np.int32), world.layer)
    residency.fetch_experts(np.array([[passer]], np.int32), np.zeros(1, np.int32), world.layer)
    assert world.layer.holders[:4].tolist() == held and world.layer.totals[FILLS] == 0
    for _ in range(4):
        residency.fetch_experts(np.array([[passer]], np.int32), np.zeros(1, np.int32), world.layer)
    assert passer in world.layer.holders[:4]
    world.check()


@needs_compiler
def test_places_move_come_and_go() -> None:
    ours, theirs = World(12, 6, 5, True, 64), World(12, 6, 5, True, 64)
    for world, set_places in ((ours, residency.set_places), (theirs, twin.set_places)):
        commands = np.zeros((MAX_COMMANDS, 4 + N_PAGES), np.int64)
        for row, (place, to) in enumerate(((0, None), (1, 9), (5, 5), (7, 7))):
            if to is not None:
                if world.layer.holders[place] >= 0:  # the host copies what moves
                    for j in range(N_PAGES):
                        source = twin.bytes_at(int(world.layer.pages[place, j]), PAGE_BYTES)
                        twin.bytes_at(int(world.all_pages[to, j]), PAGE_BYTES)[:] = source
                commands[row, 4:] = world.all_pages[to]
            commands[row, :4] = 0, 0, N_PAGES, place
        set_places(commands, 4, world.flat())
        world.check()
        assert world.layer.pages[0, 0] == 0 and world.layer.holders[0] == -1 and world.layer.pages[7, 0] != 0
    same_state(ours, theirs)


@pytest.mark.skipif(not nvrtc.available(), reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_compiles(architecture: int) -> None:
    cubin = nvrtc.compile_source("moe/residency.cu", {}, architecture)
    assert all(kernel.name.encode() in cubin for kernel in residency.KERNELS)
