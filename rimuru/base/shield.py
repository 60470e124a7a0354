"""Calls that Ctrl-C cannot cut in two.

Python raises the exception of a signal in the main thread, between any two steps of its code. What must not be left
half done runs in another thread; the main thread waits for it there, and only its waiting is interrupted.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Call:
    """A function on its way through the thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = threading.Lock()
        self.is_done.acquire()

    def run(self) -> None:
        try:
            self.result = self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self.is_done.release()


class Shield:
    """Runs calls of the main thread in a thread of its own, in the order in which they come; those of other threads,
    which no signal reaches, where they are."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pid = 0

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """function(*arguments), with what it returns or raises. An interrupt ends the waiting, not the call."""
        if threading.current_thread() is not threading.main_thread():
            return function(*arguments)
        if self._pid != os.getpid():  # the first call, or the first after a fork
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_run_all, args=(self._calls,), name="rimuru-shield", daemon=True).start()
            self._pid = os.getpid()
        call = _Call(function, arguments)
        self._calls.put(call)
        call.is_done.acquire()
        try:
            if call.error is not None:
                raise call.error
            return call.result
        finally:
            del call  # an error's traceback would keep it, and it the error

    def close(self) -> None:
        """End the thread after the calls that were made."""
        self._calls.put(None)
        self._pid = 0


def _run_all(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # keeps nothing alive while it waits
