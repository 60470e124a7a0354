"""`auto` on a device is as good as the better of recency and the hot set where routing is like that of trained models,
and better than recency where some experts are always likelier."""

from __future__ import annotations

from tools.bench.simulate_places import POLICIES, SHARES, hit_rates

CELLS = ((32, 4, 4), (8, 15, 20), (1, 100, 150))


def test_auto_follows_the_number_of_streams_at_once() -> None:
    found = {policy: hit_rates(policy, "qwen3-30b", SHARES["8 GB"], 0, CELLS) for policy in POLICIES}
    for n_streams, rate in found["auto"].items():
        missed, missed_at_best = 1 - rate, 1 - max(found["recency"][n_streams], found["hotset"][n_streams])
        assert missed < 1.06 * missed_at_best, n_streams  # what is missed is what a step waits for
    assert found["hotset"][1] < 0.7 < 0.8 < found["auto"][1]


def test_auto_keeps_what_is_always_likelier() -> None:
    auto, recency = (hit_rates(policy, "fixed", SHARES["8 GB"], 0, CELLS) for policy in ("auto", "recency"))
    assert auto[8] > recency[8] + 0.03 and auto[1] > recency[1] + 0.03
