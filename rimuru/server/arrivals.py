"""Requests are prepared side by side in threads, and handed to the engine in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Place:
    """One request's place in the line of its client."""

    def __init__(self, line: deque[Place] | None) -> None:
        self._line = line
        self.is_first = asyncio.Event()

    async def turn(self) -> None:
        """Wait until all that came before it are handed over, or have failed."""
        if self._line is not None and self._line[0] is not self:
            await self.is_first.wait()


class Arrivals:
    """A line for each client. Only of one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Place]] = {}

    @contextmanager
    def place(self, client: str, in_line: bool) -> Iterator[Place]:
        """A place at the end of the client's line until the block ends, however it does; none unless `in_line`."""
        if not in_line:
            yield Place(None)
            return
        line = self._lines.setdefault(client, deque())
        place = Place(line)
        line.append(place)
        try:
            yield place
        finally:
            line.remove(place)
            if line:
                line[0].is_first.set()
            elif self._lines.get(client) is line:
                del self._lines[client]
