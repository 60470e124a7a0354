"""Who waits for the lock has it next, however soon its holder wants it again."""

from __future__ import annotations

import threading
import time

import pytest

from rimuru.base.fair_lock import FairLock


def test_who_waits_comes_before_who_had_it() -> None:
    lock = FairLock()
    for _ in range(100):
        order: list[str] = []

        def wait_for_it(order: list[str] = order) -> None:
            with lock:
                order.append("waited")

        waiter = threading.Thread(target=wait_for_it)
        with lock:
            waiter.start()
            while not lock.is_wanted:
                time.sleep(0.0001)
        with lock:
            order.append("had it")
        waiter.join(10)
        assert order == ["waited", "had it"] and not lock.is_wanted


def test_many_threads_never_have_it_together() -> None:
    lock, n_inside, most_inside, n_turns = FairLock(), [0], [0], [0]

    def take_it() -> None:
        for _ in range(50):
            with lock:
                n_inside[0] += 1
                most_inside[0] = max(most_inside[0], n_inside[0])
                time.sleep(0)
                n_inside[0] -= 1
                n_turns[0] += 1

    threads = [threading.Thread(target=take_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most_inside == [1] and n_turns == [300]


def test_an_error_lets_go() -> None:
    lock = FairLock()
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), lock:
            raise ValueError("inside")
