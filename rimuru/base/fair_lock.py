"""A lock that goes to whoever waits for it."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """As threading.Lock in a `with`; but a thread that lets go and wants it again at once, as a loop of steps does,
    comes after one that waits. (threading.Lock may go back to the thread that has just had it, because that one runs.)

    Not for code that a signal's exception may cut in two (see Shield): `__enter__` takes the lock before `with` knows.
    """

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it just now."""
        return self._turn.locked()

    def __enter__(self) -> None:
        with self._turn:  # who waits for the lock holds it, so that nobody else comes first
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._lock.release()
