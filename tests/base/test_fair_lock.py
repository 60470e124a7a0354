"""Who waits for the lock has it next, however soon its holder wants it again."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from rimuru.base.fair_lock import FairLock


def test_a_loop_lets_others_in() -> None:
    """Two threads that wait for something while they have it, and want it again at once, take turns."""
    lock, stop, turns, n_inside, most_inside = FairLock(), threading.Event(), [], [0], [0]

    def loop(number: int) -> None:
        while not stop.is_set():
            with lock:
                n_inside[0] += 1
                most_inside[0] = max(most_inside[0], n_inside[0])
                turns.append(number)
                time.sleep(0.0005)  # as a step on a device: others run meanwhile
                n_inside[0] -= 1

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while len(turns) < 400:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(10)
    both = turns[turns.index(1 - turns[0]) :]  # from where the second one has begun
    n_again = sum(one == other for one, other in itertools.pairwise(both))
    assert most_inside == [1] and n_again <= len(both) // 50, (n_again, len(both))


def test_an_error_lets_go() -> None:
    lock = FairLock()
    for _ in range(2):
        with pytest.raises(ValueError, match="inside"), lock:
            raise ValueError("inside")
