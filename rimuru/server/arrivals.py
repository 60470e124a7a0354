"""Requests are prepared side by side in threads, and handed to the engine in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Place:
    """One request's place in the line of its client."""

    def __init__(self, line: deque[Place]) -> None:
        self._line = line
        self.is_first = asyncio.Event()

    async def turn(self) -> None:
        """Wait until all that came before it are handed over, or have failed."""
        if self._line[0] is not self:
            await self.is_first.wait()


class Arrivals:
    """Two lines for each client: small requests need not wait for large ones, which may take seconds to prepare. Only
    of one event loop."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, bool], deque[Place]] = {}

    @contextmanager
    def place(self, client: str, is_large: bool) -> Iterator[Place]:
        """A place at the end of one of the client's lines until the block ends, however it does."""
        key = (client, is_large)
        line = self._lines.setdefault(key, deque())
        place = Place(line)
        line.append(place)
        try:
            yield place
        finally:
            line.remove(place)
            if line:
                line[0].is_first.set()
            elif self._lines.get(key) is line:
                del self._lines[key]
