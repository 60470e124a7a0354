"""The simulated device's places: who comes and who leaves is what the device's residency step says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rimuru.arch.shapes import shape_gguf
from rimuru.experts.device_places import n_loading_buffers, rule_of
from rimuru.experts.residency import ResidencyPolicy
from rimuru.memory.specs import ExpertLayerLayout
from rimuru.ops.places import (
    ALL_COME,
    ASKED,
    BY_RECENCY,
    DECAY,
    HITS,
    LOG_ENTRIES,
    MAX_COMERS,
    MOST_FILLS,
    N_CONTROLS,
    N_TOTALS,
    LayerPlaces,
)
from rimuru.ops.reference.residency import fetch_experts
from rimuru.simulate.cards import card_named
from rimuru.simulate.simulator import Settings, Simulation
from rimuru.simulate.store import SimulatedPlaces
from rimuru.simulate.traces import TraceRequest

SLOT, TOP_K = 3, 8


def open_simulation(**more: object) -> Simulation:
    """Qwen3-30B-A3B, of whose experts 14 GB hold half."""
    known = {"memory_bytes": int(14e9), "card": card_named("rtx4090"), "by_device": True, "profile_tokens": 0}
    return Simulation(shape_gguf("qwen3-30b-a3b", "q4_k_m")[0], Settings(**known | more))  # type: ignore[arg-type]


def twin_of(resident: np.ndarray) -> LayerPlaces:
    """A layer whose places are held by these experts; pages of no bytes."""
    n = len(resident)
    held = np.where(resident, np.arange(n), -1).astype(np.int32)
    return LayerPlaces(
        ExpertLayerLayout(0, n, 1, ()), 0, np.zeros((n, 1), np.int64), np.ones(n, np.int64),
        (held >= 0).astype(np.int64)[:, None], held.copy(), held.copy(), np.zeros(n, np.int32),
        np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(N_TOTALS, np.int32),
        np.zeros(N_CONTROLS, np.int32), np.zeros((0, 1), np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_),
        np.zeros(0, np.bool_), np.zeros(1 + LOG_ENTRIES, np.int64), 0,
    )  # fmt: skip


@pytest.mark.parametrize("n_streams", [1, 8, 32])
@pytest.mark.parametrize("policy", ["auto", "recency", "hotset"])
def test_residents_are_those_of_the_residency_step(policy: ResidencyPolicy, n_streams: int) -> None:
    simulation = open_simulation(resident_experts=0.5, residency=policy)
    store, router = simulation.store, simulation.router
    store.residency.n_requests = n_streams
    twin = twin_of(store.residency.resident[SLOT])
    by_recency, all_come, decay_tokens = rule_of(store.residency)
    twin.control[[BY_RECENCY, ALL_COME, MOST_FILLS]] = by_recency, all_come, MAX_COMERS
    twin.control[DECAY] = np.float32(decay_tokens).view(np.int32)
    for stream in range(n_streams):
        router.open(stream)
    for _ in range(40):
        counts = np.zeros(store.residency.resident.shape, np.int32)
        for stream in range(n_streams):
            router.route(stream, 1, counts)
        store.use(counts, n_streams)
        ids = np.repeat(np.arange(len(twin.place_of), dtype=np.int32), counts[SLOT]).reshape(-1, TOP_K)
        fetch_experts(ids, np.zeros(len(ids), np.int32), twin)
        assert np.array_equal(store.residency.resident[SLOT], twin.place_of >= 0)
    assert 0 < twin.totals[HITS] < twin.totals[ASKED]
    simulation.audit()


def test_places_that_the_adjuster_adds_are_empty_until_somebody_comes() -> None:
    """Adding a place moves nothing: whoever is missed next comes into it, and is counted as missed."""
    simulation = open_simulation(resident_experts=0.5, residency="hotset")
    store = simulation.store
    assert isinstance(store, SimulatedPlaces) and store.expands_freely
    store.shrink(6)
    n_before = store.residency.n_resident
    begun = store.expand(4)
    assert len(begun) == 4 and store.residency.n_resident == n_before + 4 and store.queued_bytes == 0
    slot = begun[0][0]
    names = [expert for s, expert in begun if s == slot]
    absent = np.flatnonzero(~store.residency.resident[slot])[: len(names)].tolist()
    counts = np.zeros(store.residency.resident.shape, np.int32)
    counts[slot, [*names[:1], *absent[1:]]] = 1
    missed = store.use(counts, 1)[1]
    assert missed[slot] == len(names) * store.layout.layers[slot].useful_bytes
    assert store.residency.resident[slot, [*names[:1], *absent[1:]]].all()
    assert not store.residency.resident[slot, names[1:]].any()  # they were there in name only
    assert store.residency.n_resident == n_before + 4
    simulation.audit()


def test_cells_follow_each_other_on_one_engine() -> None:
    """Who ran is gone after `stop`, what is resident stays; no later request has the prompt of an earlier one."""
    simulation = open_simulation(has_buffers=True)
    pool = simulation.pool
    n_buffers = n_loading_buffers(simulation.experts, pool.total_bytes, 0)
    assert pool.n_buffer_pages == n_buffers * simulation.experts.max_pages > 0
    hits = []
    for _ in range(2):
        simulation.start([TraceRequest(0.0, 118, 400)] * 4 + [TraceRequest(1e9, 118, 4)])
        store = simulation.store
        before = store.n_asked, store.n_hits
        for _ in range(60):
            assert simulation.step()
        assert simulation.recorder.n_started == 4 and simulation.scheduler.reuse_rate < 1.0
        hits.append((store.n_hits - before[1]) / (store.n_asked - before[0]))
        assert not any(sequence.n_reused for sequence in simulation.scheduler.running)
        simulation.stop()
        assert not simulation.scheduler.has_work and not simulation.step()
        simulation.audit()
    assert 0.5 < hits[0] < 1.0 and hits[1] == pytest.approx(hits[0], abs=0.1)


def test_a_layer_that_reads_over_the_link_waits_for_it() -> None:
    """A card as it is used reads no fewer bytes, but each layer with a missed expert waits a little longer."""
    plain = card_named("rtx4090")
    took = []
    for card in (plain, dataclasses.replace(plain, miss_overhead_us=100.0), dataclasses.replace(plain, overlap=0.0)):
        simulation = open_simulation(card=card, resident_experts=0)
        simulation.start([TraceRequest(0.0, 8, 4)])
        assert simulation.step()
        took.append(simulation.now_s)
    n_layers = len(simulation.experts.layers)
    assert took[1] == pytest.approx(took[0] + n_layers * 100e-6, rel=1e-6) and took[2] > took[0]


def test_loading_buffers_are_few_where_they_are_seldom_needed() -> None:
    """A fixed number of residents leaves room for a layer's experts; a pool that could hold all gives what it has
    beyond, and a little in any case; where all experts stay, there are none."""
    experts = open_simulation().experts
    total = experts.n_pages * experts.page_bytes
    one = experts.max_pages * experts.page_bytes
    widest = max(layer.n_experts for layer in experts.layers)
    assert n_loading_buffers(experts, 2 * total, total) == 0
    assert n_loading_buffers(experts, 2 * total, total // 2) == min(widest, 2 * total // 32 // one)
    assert n_loading_buffers(experts, total - one, 0) == min(widest, (total - one) // 32 // one) > 0
    assert n_loading_buffers(experts, total, 0) == min(widest, total // 256 // one) > 0
    assert n_loading_buffers(experts, 2 * total, 0) == min(widest, 2 * total // 32 // one)
    assert n_loading_buffers(experts, total + 4 * (one - 1), total) == 0
