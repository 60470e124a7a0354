"""Fair order between clients: who waits for whom, priorities, who gave way, and that nobody is forgotten."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from engine_fakes import expected_answer, fake_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.engine.queue import MOST_CLIENTS, WaitingQueue
from rimuru.request import SamplingParams, Sequence

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def sequence(number: int, client: str = "", priority: int = 0, n_tokens: int = 10) -> Sequence:
    rng = np.random.default_rng(0)
    return Sequence(number, [1] * n_tokens, n_tokens, GREEDY, rng, frozenset(), 100, priority=priority, client=client)


def order(queue: WaitingQueue) -> list[int]:
    return [queue.pop().seq_id for _ in range(len(queue))]


def test_one_client_is_served_in_order() -> None:
    queue = WaitingQueue()
    for number in range(20):
        queue.add(sequence(number, n_tokens=1 + number % 3), cost=5 + 40 * (number % 2))
    assert order(queue) == list(range(20))


def test_a_flood_does_not_hold_up_others() -> None:
    """After a hundred requests of one client, another client's come next, in turn with the flood."""
    queue = WaitingQueue()
    for number in range(100):
        queue.add(sequence(number, "flood"), cost=10)
    for _ in range(5):
        queue.pop()
    for number in range(100, 104):
        queue.add(sequence(number, "quiet"), cost=10)
    served = order(queue)
    assert max(served.index(number) for number in range(100, 104)) <= 8


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = WaitingQueue()
    for number in range(100):
        queue.add(sequence(number, "long"), cost=100)
        queue.add(sequence(1000 + number, "short"), cost=10)
    first = Counter("short" if number >= 1000 else "long" for number in order(queue)[:66])
    assert first["short"] >= 9 * first["long"]


def test_who_asked_for_nothing_saves_no_credit() -> None:
    queue = WaitingQueue()
    queue.add(sequence(0, "late"), cost=1)
    queue.pop()
    for number in range(1, 51):
        queue.add(sequence(number, "steady"), cost=10)
        queue.pop()
    for number in range(51, 61):
        queue.add(sequence(number, "steady"), cost=10)
        queue.add(sequence(100 + number, "late"), cost=10)
    first = order(queue)[:10]
    assert 4 <= sum(number > 100 for number in first) <= 6


def test_higher_priorities_go_first_and_who_gave_way_keeps_the_place() -> None:
    queue = WaitingQueue()
    for number, priority in enumerate((0, 0, 2, 1, 2)):
        queue.add(sequence(number, f"client {number}", priority), cost=10)
    first = queue.pop()
    second = queue.pop()
    assert (first.seq_id, second.seq_id) == (2, 4)
    queue.put_back(second)
    queue.put_back(first)
    assert order(queue) == [2, 4, 3, 0, 1]


def test_what_was_not_used_is_paid_back_and_what_was_used_beyond_is_paid() -> None:
    def order_after(cost: float) -> list[int]:
        queue = WaitingQueue()
        queue.add(sequence(0, "a"), cost=100)
        queue.add(sequence(1, "b"), cost=100)
        done = queue.pop()
        queue.add(sequence(2, "b"), cost=100)
        queue.settle(done, cost)
        queue.add(sequence(3, "a"), cost=100)
        return order(queue)

    assert order_after(cost=5) == [1, 3, 2]
    assert order_after(cost=500) == [1, 2, 3]


def test_newcomers_do_not_overtake_for_ever() -> None:
    """A client that has been served before waits, while new clients come without end."""
    queue = WaitingQueue()
    queue.add(sequence(0, "old"), cost=100)
    queue.pop()
    queue.add(sequence(1, "old"), cost=100)
    for number in range(2, 60):
        queue.add(sequence(number, f"new {number}"), cost=100)
        queue.add(sequence(100 + number, f"new {number}"), cost=100)
        served = queue.pop()
        if served.seq_id == 1:
            return
        queue.settle(served, 100)
    raise AssertionError("58 newcomers went first")


def test_clients_are_forgotten() -> None:
    queue = WaitingQueue()
    for number in range(3 * MOST_CLIENTS):
        queue.add(one := sequence(number, f"client {number}"), cost=10)
        queue.pop()
        queue.settle(one, 10)
    assert len(queue._clients) <= MOST_CLIENTS + 1 and not queue._places


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_nobody_is_lost(rng: random.Random) -> None:
    """Random arrivals, departures and returns: who waits, and how many of whom, is always right."""
    queue, waiting, running = WaitingQueue(), {}, []
    for number in range(200):
        client = rng.choice("abc")
        if rng.random() < 0.5:
            queue.add(one := sequence(number, client), cost=rng.randrange(1, 50))
            waiting[number] = one
        elif queue and rng.random() < 0.7:
            running.append(queue.pop())
            del waiting[running[-1].seq_id]
        elif running and rng.random() < 0.5:
            back = running.pop(rng.randrange(len(running)))
            queue.put_back(back)
            waiting[back.seq_id] = back
        elif waiting:
            gone = waiting.pop(rng.choice(list(waiting)))
            queue.remove(gone)
            queue.settle(gone, 0)
        assert {s.seq_id for s in queue} == set(waiting) and len(queue) == len(waiting)
        for name in "abc":
            assert queue.n_waiting_of(name) == sum(s.client == name for s in waiting.values())
    assert {queue.pop().seq_id for _ in range(len(waiting))} == set(waiting)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_engine_serves_a_quiet_client_amid_a_flood(overlaps: bool) -> None:
    engine = fake_engine(n_huge=8, max_sequences=2, overlaps=overlaps)
    flood = [engine.add([1 + i, 2, 3], GREEDY, client="flood") for i in range(20)]
    for _ in range(4):
        engine.step()
    quiet = engine.add([7, 8, 9], GREEDY, client="quiet")
    engine.run_until([quiet])
    assert quiet.output_ids == expected_answer([7, 8, 9], 6)
    assert sum(s.is_finished for s in flood) <= 6
    engine.run_until(flood)
    assert all(s.output_ids == expected_answer(s.tokens[:3], 6) for s in flood)
    assert not engine.has_work


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_long_prompt_does_not_hold_up_another_clients(overlaps: bool) -> None:
    """While one client's prompt takes many steps, another's starts at once and gets half of each step. Within a client
    prompts run one after another, and a share that nobody takes is not lost."""
    engine = fake_engine(n_huge=32, max_step_tokens=8, context=200, overlaps=overlaps)
    long = engine.add([i % 90 for i in range(150)], GREEDY, client="long")
    engine.step()
    engine.step()
    quick = engine.add(list(range(12)), GREEDY, client="quick")
    n_before = engine.n_steps
    while quick.n_output == 0:
        engine.step()
    assert engine.n_steps - n_before <= 4 + overlaps
    assert set(engine.runner.steps) == {8}, "every step is full while there is something to run"
    engine.run_until([quick, long])
    assert quick.output_ids == expected_answer(list(range(12)), 6)
    assert long.output_ids == expected_answer(long.tokens[:150], 6)


def test_a_low_priority_gives_way_first() -> None:
    """Room for two of three: the last of the lowest priority waits, though it came first."""
    engine = fake_engine(n_huge=1)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    low = engine.add(list(range(6)), params, priority=-1)
    engine.step()
    high = [engine.add(list(range(n, n + 6)), params) for n in (20, 40)]
    engine.run_until([low, *high])
    assert low.n_preemptions > 0 and all(s.n_preemptions == 0 for s in high)
    assert low.output_ids == expected_answer(low.tokens[:6], 9)
