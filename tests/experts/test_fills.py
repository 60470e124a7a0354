"""Fills of whole engines: replayed, their records arrive at who is resident, and each names the step that it was in."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_twin import device_store

from rimuru import LLM, SamplingParams
from rimuru.engine import build
from rimuru.experts.device_places import places_bytes
from rimuru.experts.device_store import DeviceExpertStore
from rimuru.memory.decisions import EXPERT, IS_FORETOLD, N_FILL_FIELDS, PLACE, SLOT, STEP, VICTIM
from rimuru.ops.places import FILLS, FORETOLD, LOG_ENTRIES, MAX_COMERS, N_TOTALS, fill_entry

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + i, 7, 30 + i, 99, 5, 12 + i, 3] * (1 + i % 5) for i in range(12)]


def open_tiny(model: Path, tiny: int, **more: object) -> LLM:
    return LLM(model, device="cpu", memory=tiny, max_step_tokens=64, max_sequences=len(PROMPTS), **more)  # type: ignore[arg-type]


@pytest.fixture
def by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get the device's store."""

    def make(self: build._Builder, biases: Any, factors: Any, room: Any) -> DeviceExpertStore:
        return device_store(self, biases, factors, room)

    monkeypatch.setattr(build._Builder, "_make_store", make)


class Watched:
    """What a device's store does from now on: in which step each fill is, and after which a place goes."""

    def __init__(self, store: DeviceExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
        store.catch_up()
        self.store, self.log = store, store.places.arrays.log
        store.fills.rows = np.zeros((1 << 16, N_FILL_FIELDS), np.int64)
        self.n_first = store.fills.n_known
        assert self.n_first == self.log[0] and store.fills.n_lost == 0
        self.holders = store.ops.download(store.places.arrays.holders).copy()
        self.steps: dict[int, int] = {}
        self.gone: list[tuple[int, int]] = []
        """(fills before it, row of the place)"""
        ops = store.ops
        for name in ("fetch_experts", "fetch_aside", "fetch_ahead"):
            monkeypatch.setattr(ops, name, self._noting(getattr(ops, name)), raising=False)
        set_places = ops.set_places

        def noting(commands: np.ndarray, n_commands: int, places: Any) -> None:
            for command in commands[:n_commands]:
                if command[4] == 0:
                    self.gone.append((int(self.log[0]), int(command[0] + command[3])))
            set_places(commands, n_commands, places)

        monkeypatch.setattr(ops, "set_places", noting, raising=False)

    def _noting(self, fetch: Any) -> Any:
        def noting(*arguments: Any) -> None:
            before = int(self.log[0])
            fetch(*arguments)
            self.steps |= dict.fromkeys(range(before, int(self.log[0])), self.store.residency.step)

        return noting

    def check(self) -> None:
        """Replay the records, and the host's commands between them."""
        store, rows = self.store, self.store.fills.rows
        store.catch_up()
        held, gone = self.holders, list(self.gone)
        assert store.fills.n_known == self.log[0] and store.fills.n_lost == 0

        def take_away(n_fills: int) -> None:
            while gone and gone[0][0] <= n_fills:
                held[gone.pop(0)[1]] = -1

        for number in range(self.n_first, store.fills.n_known):
            take_away(number)
            row = rows[number % len(rows)]
            place = store.view.rows_before[row[SLOT]] + row[PLACE]
            assert row[STEP] == self.steps[number] and held[place] == row[VICTIM]
            held[place] = row[EXPERT]
        take_away(store.fills.n_known)
        assert np.array_equal(held, store.ops.download(store.places.arrays.holders))


@pytest.mark.parametrize("prediction", [False, True])
def test_a_devices_fills_replayed_are_its_holders(
    model: Path, tiny: int, prediction: bool, by_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests make experts leave and come back, steps are answered, and reports come every few steps."""
    with open_tiny(model, tiny, prediction=prediction, residency="recency") as llm:
        store = llm.loaded.store
        assert isinstance(store, DeviceExpertStore)
        watched, counters = Watched(store, monkeypatch), store.counters
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[3:], PROMPTS[2:4]):
            llm.generate(prompts, GREEDY)
            store.shrink(3)
            store.expand(2)
        watched.check()
        assert watched.gone and store.fills.n_known - watched.n_first > 50
        totals = store.ops.download(store.places.arrays.totals).reshape(-1, N_TOTALS)
        assert store.fills.n_foretold == totals[:, FORETOLD].sum() and bool(store.fills.n_foretold) == prediction
        assert store.fills.per_layer.tolist() == (totals[:, FILLS] + totals[:, FORETOLD]).tolist()
        assert counters.n_filled == totals[:, FILLS].sum()
        told = llm.memory()["decisions"]
        assert told["counts"]["fill"] == store.fills.n and told["fills"]["unrecorded"] == 0
        assert told["fills"]["last"][-1]["step"] == watched.steps[store.fills.n_known - 1]


def test_fills_that_no_report_tells_of_are_counted(
    model: Path, tiny: int, by_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the log holds, without a report between: the last are known, the others are as many as they were."""
    with open_tiny(model, tiny, resident_experts=0.2, residency="recency") as llm:
        store = llm.loaded.store
        assert isinstance(store, DeviceExpertStore)
        store.catch_up()
        n_before, log = store.fills.n_known, store.places.arrays.log
        for number in range(n_before, n_before + 3 * LOG_ENTRIES):
            log[1 + number % LOG_ENTRIES], log[0] = fill_entry(number, 9, 1, 2, 3, 4, False), number + 1
        monkeypatch.setattr(store.places, "ask", lambda: False)
        llm.generate(PROMPTS[:2], GREEDY)
        monkeypatch.undo()
        n_written = int(log[0]) - 3 * LOG_ENTRIES - n_before
        store.catch_up()
        assert 0 < n_written < LOG_ENTRIES and store.fills.n == log[0]
        assert store.fills.n_known - n_before == LOG_ENTRIES and store.fills.n_lost == 2 * LOG_ENTRIES + n_written
        assert llm.memory()["decisions"]["fills"]["unrecorded"] == store.fills.n_lost


def test_the_ledger_counts_the_log(model: Path, by_device: None) -> None:
    """All that the device's places take, but for loading buffers that there are not."""
    with LLM(model, device="cpu", resident_experts=0.5) as llm:
        store = llm.loaded.store
        assert isinstance(store, DeviceExpertStore)
        places, layout = store.places, store.layout
        arrays = [getattr(places.arrays, field.name) for field in fields(places.arrays)]
        n_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray)) + places._commands.nbytes
        most_buffers_bytes = 8 * MAX_COMERS * layout.max_pages
        assert 0 <= places_bytes(layout) - n_bytes <= most_buffers_bytes < places.arrays.log.nbytes


@pytest.mark.parametrize("residency", ["recency", "hotset"])
def test_the_hosts_fills_replayed_are_its_residents(model: Path, residency: str) -> None:
    """On the CPU, with a fixed number of residents."""
    with LLM(model, device="cpu", resident_experts=0.4, residency=residency, prefix_cache=False) as llm:  # type: ignore[arg-type]
        store = llm.loaded.store
        assert store is not None
        fills, first, step = store.fills, store.fills.n_known, store.residency.step
        fills.rows = np.zeros((1 << 16, N_FILL_FIELDS), np.int64)
        resident = store.residency.resident.copy()
        n_before = llm.memory()["decisions"]["counts"]["fill"]
        for prompt in PROMPTS:
            llm.generate(prompt, GREEDY)
        n_exchanges = 0
        for number in range(first, fills.n_known):
            row = fills.rows[number]
            assert step < row[STEP] <= store.residency.step and not row[IS_FORETOLD]
            step = int(row[STEP]) - 1
            assert not resident[row[SLOT], row[EXPERT]]
            if row[VICTIM] >= 0:
                assert resident[row[SLOT], row[VICTIM]]
                resident[row[SLOT], row[VICTIM]] = False
                n_exchanges += 1
            resident[row[SLOT], row[EXPERT]] = True
        assert n_exchanges > 10 and np.array_equal(resident, store.residency.resident)
        decisions = llm.memory()["decisions"]
        assert decisions["counts"]["fill"] - n_before == fills.n_known - first
        assert {record["action"] for record in decisions["fills"]["last"]} == {"fill"}
