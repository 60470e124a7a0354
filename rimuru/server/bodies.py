"""Bodies of requests on their way in: bounded in size, in time, and in what all of them together take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from rimuru.server.errors import BodyTimeoutError, BodyTooLargeError, ServerBusyError
from rimuru.server.settings import ServerSettings

LEAST_HELD_BYTES = 256 << 20
HELD_BODIES = 8
"""Bodies of the largest size that may be held at once, on their way in or until they are parsed."""


class Bodies:
    """Reads bodies. Only of one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._limit_bytes, self._timeout_s = settings.max_body_bytes, settings.body_timeout_s
        self.most_held_bytes = max(LEAST_HELD_BYTES, HELD_BODIES * settings.max_body_bytes)
        self.held_bytes = 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """The request's body, which counts as held until the block ends. The limits hold before anything is parsed.

        Raises BodyTooLargeError, BodyTimeoutError, and ServerBusyError where the bodies of all requests are too much.
        """
        body = bytearray()
        try:
            await self._receive(request, body)
            request.state.n_body_bytes = len(body)
            yield bytes(body)
        finally:
            self.held_bytes -= len(body)

    async def _receive(self, request: Request, body: bytearray) -> None:
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {self._limit_bytes}")

        async def receive() -> None:
            async for chunk in request.stream():
                if len(body) + len(chunk) > self._limit_bytes:
                    raise BodyTooLargeError(f"the body has more than {self._limit_bytes} bytes")
                if self.held_bytes + len(chunk) > self.most_held_bytes:
                    raise ServerBusyError("too many large requests are coming in at once; try again later")
                self.held_bytes += len(chunk)
                body.extend(chunk)

        try:
            await asyncio.wait_for(receive(), self._timeout_s)
        except asyncio.TimeoutError:
            raise BodyTimeoutError(f"the body did not come within {self._timeout_s:g} seconds") from None
