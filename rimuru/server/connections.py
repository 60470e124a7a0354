"""Connections before they become requests: how many there may be, and how long one may say nothing.

uvicorn limits neither. Sockets that send nothing would stay open until no file descriptor is left, which locks
everybody out.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 20.0
"""For a request's first line and headers: from the connection, or from the first byte of a later request."""
ACCEPT_AT_ONCE = 16
"""Connections that asyncio takes in before it looks at those it has; a few times as many are open beyond the limit."""
MOST_CONNECTIONS = 8192
KEPT_DESCRIPTORS = 160
"""For everything else: the model's files, pipes, the connections that are about to be closed."""
MOST_DESCRIPTORS = 65536
TROUBLE_EVERY_S = 30.0
_NO_DESCRIPTOR = "socket.accept() out of system resource"


def raise_descriptor_limit() -> None:
    """Let this process open as many files as its hard limit says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections may be open at once, so that descriptors are left for the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, max(soft // 2, soft - KEPT_DESCRIPTORS)))


class Connection(H11Protocol):
    """One connection. Beyond the limit the one that has been without a request for longest makes room."""

    n_most = MOST_CONNECTIONS
    _header_timer: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """No request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = time.monotonic()
        self._start_timer()
        if len(self.connections) > self.n_most:
            self._make_room()

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, Connection) and c is not self and c.is_idle]
        leaving = min(others, key=lambda connection: connection._idle_since, default=self)
        self.connections.discard(leaving)  # its socket is closed soon; nobody need close it twice
        leaving.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_timer()
        elif self._header_timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._no_request)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _no_request(self) -> None:
        self._header_timer = None
        if self.is_idle:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        log.debug("a request asked for another protocol; it is answered over HTTP")


def connection_class(n_most: int) -> type[Connection]:
    """Connections of a server that has at most n_most of them."""
    return type("LimitedConnection", (Connection,), {"n_most": n_most})


class LoopTrouble:
    """Exception handler of the event loop: having no descriptors left is one line now and then, not thousands."""

    def __init__(self) -> None:
        self._told: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != _NO_DESCRIPTOR:
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self._told is None or now - self._told >= TROUBLE_EVERY_S:
            self._told = now
            log.error("no connection can be taken in: %s; raise the limit on open files", context.get("exception"))
