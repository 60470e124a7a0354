"""Orders of warmth, hot-set profiles, and the synthetic router that both are judged by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.base.errors import AuditError, BadInputError
from rimuru.experts.hotset import HotsetProfile, find_profile, load_profile, profile_path, save_profile
from rimuru.experts.residency import AUTO_RECENCY_TOKENS, Residency
from rimuru.experts.residency_jit import in_order
from rimuru.experts.routing import ROUTERS, SyntheticRouter, router_for
from rimuru.memory.specs import ExpertLayerLayout, ExpertLayout

LAYOUT = ExpertLayout(64, (ExpertLayerLayout(0, 6, 2, ()), ExpertLayerLayout(2, 4, 3, ())))


def uses(residency: Residency, *steps: dict[int, list[int]], n_tokens: int = 1) -> Residency:
    for step in steps:
        residency.begin_step(n_tokens)
        for slot, experts in step.items():
            assert residency.note(slot, np.array(experts, np.int32)).tolist() == sorted(set(experts))
    return residency


@settings(deadline=None)
@given(data=st.data())
def test_the_coldest_and_the_hottest_are_what_sorting_gives(data: st.DataObject) -> None:
    """Over layers of unlike width; stamps and scores are often equal."""
    residency = Residency(LAYOUT, data.draw(st.sampled_from(["recency", "hotset"])))
    shape = residency.scores.shape
    residency.last_used[:] = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=12, max_size=12))).reshape(shape)
    residency.scores[:] = np.array(data.draw(st.lists(st.floats(0, 5), min_size=12, max_size=12))).reshape(shape)
    there = np.array(data.draw(st.lists(st.booleans(), min_size=12, max_size=12))).reshape(shape)
    residency.resident[:] = there & residency.exists
    residency.begin_step(7)
    keys, n = residency.keys().reshape(-1), data.draw(st.integers(0, 14))
    for found, among, sign in (
        (residency.coldest_indices(n), residency.resident, 1.0),
        (residency.hottest_absent_indices(n), residency.exists & ~residency.resident, -1.0),
    ):
        assert (sign * keys[found]).tolist() == sorted((sign * keys[among.reshape(-1)]).tolist())[:n]
        assert len(set(found.tolist())) == len(found) and among.reshape(-1)[found].all()
    order = residency.coldest_first()
    expected = np.argsort(keys, kind="stable")
    assert order.tolist() == expected[residency.exists.reshape(-1)[expected]].tolist()
    assert residency.absent_of(order).tolist() == [i for i in order if not residency.resident.reshape(-1)[i]]


@settings(deadline=None)
@given(
    keys=st.lists(st.floats(allow_nan=False) | st.sampled_from([0.0, 1.0, -1.0, 1.0 + 2**-52]), max_size=60),
    exist=st.data(),
)
def test_numbers_are_sorted_by_their_bits(keys: list[float], exist: st.DataObject) -> None:
    """Any sign and size, equal ones as they come. (0 and -0 have different bits, and no key is -0.)"""
    values = np.array(keys, np.float64) + 0.0
    flags = np.array(exist.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))), np.bool_)
    expected = np.argsort(values, kind="stable")
    assert in_order(values, flags).tolist() == expected[flags[expected]].tolist()


def test_counts_of_some_experts_are_noted_like_those_of_all() -> None:
    rng = np.random.default_rng(3)
    whole, some = Residency(LAYOUT), Residency(LAYOUT)
    cells = np.flatnonzero(whole.exists.reshape(-1))
    for n_tokens in (5, 900, 1):
        counts = np.zeros(whole.scores.shape, np.int64)
        counts[whole.exists] = rng.integers(0, 3, len(cells))
        for residency in (whole, some):
            residency.begin_step(n_tokens)
        whole.note_all(counts)
        some.note_cells(cells, counts.reshape(-1)[cells].astype(np.uint32))
        for name in ("last_used", "scores", "n_chosen"):
            assert np.array_equal(getattr(whole, name), getattr(some, name)), name
    assert whole.n_chosen.sum() > 0


def test_recency_gives_up_what_was_used_longest_ago() -> None:
    residency = Residency(LAYOUT, "recency")
    residency.resident[:] = residency.exists
    uses(residency, {0: [0, 1], 1: [0]}, {0: [1, 2], 1: [1]}, {0: [3], 1: [2]})
    busy = np.zeros(6, np.bool_)
    busy[3] = True
    residency.resident[0, 5] = False
    pairs = residency.exchanges(0, busy, np.array([5]))
    assert pairs == [(5, 4)]  # never used; of these (4 and 5) the resident
    assert residency.coldest(3) == [(0, 4), (1, 3), (0, 0)]
    assert residency.hottest_absent(5) == [(0, 5)]


def test_a_hot_set_lets_nobody_in_who_is_colder_than_those_inside() -> None:
    residency = uses(Residency(LAYOUT, "hotset"), *[{0: [0, 1]}] * 5, {0: [2]}, {0: [0, 3]})
    residency.resident[0, [0, 1, 2]] = True
    busy = np.zeros(6, np.bool_)
    assert residency.exchanges(0, busy, np.array([4])) == []
    assert residency.exchanges(0, busy, np.array([3])) == [(3, 2)]  # as often, and more lately
    uses(residency, *[{0: [3, 4]}] * 9)
    assert residency.exchanges(0, busy, np.array([4, 3])) == [(3, 2), (4, 1)]
    busy[:] = True
    assert residency.exchanges(0, busy, np.array([4])) == []


def test_auto_changes_its_order_with_the_number_of_tokens() -> None:
    residency = Residency(LAYOUT, "auto")
    uses(residency, *[{0: [0]}] * 3)
    assert residency.by_recency
    uses(residency, *[{0: [0]}] * 200, n_tokens=int(AUTO_RECENCY_TOKENS) + 20)
    assert not residency.by_recency


def test_old_uses_count_less_and_long_runs_stay_finite() -> None:
    residency = uses(Residency(LAYOUT, "hotset"), {0: [0, 0]})
    for _ in range(300):
        residency.begin_step(1000)
    uses(residency, {0: [1]})
    assert np.isfinite(residency.scores).all()
    assert residency.keys(0)[1] > residency.keys(0)[0]
    assert 0 < residency.probabilities()[0, 1] < 1


def test_unknown_experts_are_filled_evenly_over_layers() -> None:
    assert Residency(LAYOUT).hottest()[:5] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert len(Residency(LAYOUT).hottest()) == LAYOUT.n_experts


def test_audit_sees_a_resident_that_does_not_exist() -> None:
    residency = Residency(LAYOUT)
    residency.audit()
    residency.resident[1, 4] = True
    with pytest.raises(AuditError, match="beyond its 4 experts"):
        residency.audit()


# ---- profiles
def profile() -> HotsetProfile:
    counts = np.array([[5, 0, 9, 1, 0, 0], [3, 3, 8, 1, 0, 0]])
    return HotsetProfile("qwen3moe", "a model", 20, (0, 2), counts)


def test_a_profile_is_found_beside_its_model_and_decides_the_first_residents(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    save_profile(profile(), LAYOUT, profile_path(model))
    found = find_profile(model, LAYOUT, "qwen3moe")
    assert found is not None and (found.counts == profile().counts).all() and found.n_tokens == 20
    residency = Residency(LAYOUT, "hotset")
    residency.load_profile(found.probabilities())
    assert residency.hottest()[:3] == [(0, 2), (1, 2), (0, 0)]
    assert find_profile(tmp_path / "other.gguf", LAYOUT, "qwen3moe") is None


def test_a_profile_that_does_not_fit_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "m.gguf"
    save_profile(profile(), LAYOUT, profile_path(model))
    other = ExpertLayout(64, (ExpertLayerLayout(0, 6, 2, ()),))
    with caplog.at_level("WARNING", logger="rimuru.experts.hotset"):
        assert find_profile(model, other, "qwen3moe") is None
        assert find_profile(model, LAYOUT, "olmoe") is None
    for text in ("", "{}", "[]", '{"format": "rimuru-hotset", "version": 2}', "\x00"):
        profile_path(model).write_text(text)
        assert find_profile(model, LAYOUT, "qwen3moe") is None
        with pytest.raises(BadInputError):
            load_profile(profile_path(model))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["layers"][0]["counts"].__setitem__(0, 10**30),
        lambda data: data["layers"][0]["counts"].__setitem__(0, 1e308),
        lambda data: data["layers"][0]["counts"].__setitem__(0, float("nan")),
        lambda data: data["layers"][0]["counts"].__setitem__(0, 3.5),
        lambda data: data["layers"][0]["counts"].__setitem__(0, True),
        lambda data: data["layers"][0]["counts"].__setitem__(0, 21),  # of 20 tokens
        lambda data: data["layers"][0]["counts"].__setitem__(0, -1),
        lambda data: data["layers"][1]["counts"].pop(),
        lambda data: data["layers"][1]["counts"].append(1),
        lambda data: data["layers"][1].update(counts=[0, 0, 0, 0]),
        lambda data: data["layers"][1].update(counts=[]),
        lambda data: data["layers"][1].update(counts=7),
        lambda data: data["layers"][1].update(layer=10**30),
        lambda data: data["layers"].pop(),
        lambda data: data.update(layers=None),
        lambda data: data.update(n_tokens=-20),
        lambda data: data.update(n_tokens=0),
        lambda data: data.update(n_tokens=10**30),
        lambda data: data.update(n_tokens=20.0),
        lambda data: data.update(model="m" * 10**6 + "\n", architecture="\x1b[31m"),
        lambda data: data.pop("model"),
    ],
)
def test_a_damaged_profile_is_one_warning_line_and_ignored(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "m.gguf"
    save_profile(profile(), LAYOUT, profile_path(model))
    data = json.loads(profile_path(model).read_text())
    damage(data)
    profile_path(model).write_text(json.dumps(data))
    assert find_profile(model, LAYOUT, "qwen3moe") is None
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "WARNING" and len(message) < 1000 and message.isprintable()
    assert "run `rimuru profile` again" in message


def test_a_profile_nested_without_end_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "m.gguf"
    profile_path(model).write_text("[" * 10**6)
    assert find_profile(model, LAYOUT, "qwen3moe") is None
    assert len(caplog.records) == 1


# ---- the synthetic router
def recency_hit_rate(chosen: np.ndarray, share: float) -> float:
    n_experts = int(chosen.max()) + 1
    n_kept, hits = int(share * n_experts), 0
    for layer in range(chosen.shape[1]):
        stamp = np.full(n_experts, -1)
        kept: set[int] = set()
        for token in range(chosen.shape[0]):
            for expert in chosen[token, layer].tolist():
                hits += expert in kept
                kept.add(expert)
                stamp[expert] = token
                if len(kept) > n_kept:
                    kept.remove(min(kept, key=lambda e: stamp[e]))
    return hits / chosen.size


def test_the_router_repeats_experts_as_published() -> None:
    """Qwen3-30B: .46 of a token's experts were used by the token before, .77 within 8; hit rates .74 / .89 / .97."""
    router = SyntheticRouter(6, 128, 8, ROUTERS["qwen3-30b"], seed=3)
    router.open(0)
    chosen = router.choices(0, 1500)
    tokens = range(8, 1500, 3)
    before = np.mean([np.isin(chosen[t, i], chosen[t - 1, i]).mean() for t in tokens for i in range(6)])
    within = np.mean([np.isin(chosen[t, i], chosen[t - 8 : t, i]).mean() for t in tokens for i in range(6)])
    assert before == pytest.approx(0.46, abs=0.03) and within == pytest.approx(0.77, abs=0.03)
    for share, published in ((0.20, 0.74), (0.36, 0.89), (0.64, 0.97)):
        assert recency_hit_rate(chosen[:900, :3], share) == pytest.approx(published, abs=0.045)


def test_unrelated_streams_use_many_experts_and_one_topic_few() -> None:
    distinct = {}
    for n_topics in (None, 1):
        router = SyntheticRouter(4, 128, 8, router_for(128), seed=5, n_topics=n_topics)
        for stream in range(16):
            router.open(stream)
        counts = np.zeros((4, 128), np.int32)
        for stream in range(16):
            router.route(stream, 1, counts)
        distinct[n_topics] = (counts > 0).sum(axis=1).mean()
    assert distinct[None] == pytest.approx(82, abs=8)  # 128 (1 - (1 - 8/128)^16)
    assert distinct[1] < 0.75 * distinct[None]


def test_the_router_is_determined_by_its_seed_and_long_pieces_are_sampled() -> None:
    def run(seed: int) -> np.ndarray:
        router = SyntheticRouter(2, 16, 2, router_for(16), seed)
        counts = np.zeros((2, 16), np.int32)
        router.open(7)
        router.route(7, 1000, counts)
        router.close(7)
        return counts

    assert (run(1) == run(1)).all() and (run(1) != run(2)).any()
    assert 0 < run(1).sum() <= 2 * 2 * 48
    with pytest.raises(BadInputError):
        router_for(8, "nobody")
