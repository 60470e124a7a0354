"""One server from start to end: socket, signals, draining."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rimuru.base.errors import BadInputError, RimuruError
from rimuru.base.units import counted
from rimuru.engine.build import LoadedModel
from rimuru.server.connections import (
    ACCEPT_AT_ONCE,
    LoopTrouble,
    connection_class,
    most_connections,
    raise_descriptor_limit,
)
from rimuru.server.guard import Guard
from rimuru.server.http import create_app
from rimuru.server.loop import EngineLoop
from rimuru.server.settings import ServerSettings

log = logging.getLogger(__name__)


LAST_WORDS_S = 1.0
"""How long clients have to take in that their requests were ended, before their connections are cut."""
BACKLOG = 2048
"""Connections that the system holds ready."""


class _Uvicorn(uvicorn.Server):
    """First signal: no new requests, those that run are finished. Second: they are ended too."""

    def __init__(self, config: uvicorn.Config, loop: EngineLoop) -> None:
        super().__init__(config)
        self._loop = loop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(LoopTrouble())
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(BACKLOG)  # uvicorn's number is also how many asyncio takes in at once, and so it is small

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            requests = counted(self._loop.n_jobs, "request")
            log.warning("%s: finishing %s; again to stop now", signal.Signals(sig).name, requests)
            self._loop.drain()
            self.should_exit = True
        else:
            self.stop_now()

    def stop_now(self) -> None:
        """End all requests with an error that says why; cut off who does not read it."""
        self.should_exit = True
        self._loop.fail_all()
        timer = threading.Timer(LAST_WORDS_S, self._cut)
        timer.daemon = True
        timer.start()

    def _cut(self) -> None:
        self.force_exit = True


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Requests whose connection is cut at the end are no errors."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class Server:
    """A bound server. `serve` blocks until a signal, or `stop` from another thread."""

    def __init__(self, loaded: LoadedModel, settings: ServerSettings) -> None:
        """Binds the address. Raises BadInputError where that fails."""
        self.settings = settings
        self.loop = EngineLoop(loaded, settings.max_waiting, settings.queue_timeout_s)
        self.app = create_app(self.loop, settings)
        self._socket = bind(settings.host, settings.port)
        door = guarded(self.app, settings, self._socket.getsockname()[0])
        config = uvicorn.Config(
            door, log_config=None, access_log=False, lifespan="off", server_header=False,
            http=connection_class(most_connections()), ws="none", backlog=ACCEPT_AT_ONCE,
            timeout_keep_alive=30, h11_max_incomplete_event_size=64 << 10,
        )  # fmt: skip
        self._uvicorn = _Uvicorn(config, self.loop)
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)

    @property
    def url(self) -> str:
        """The address with the port that was really bound."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def serve(self, ready: Callable[[str], None] | None = None) -> None:
        """Answer until told to end. `ready(url)` is called once requests are taken."""
        self.loop.start()
        try:
            self._socket.listen(BACKLOG)
            if ready is not None:
                ready(self.url)
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self.loop.stop()
            self._socket.close()
            log.info("%s", self.loop.counters.line())

    def stop(self, at_once: bool = False) -> None:
        """What a signal does; from any thread."""
        self.loop.drain()
        self._uvicorn.should_exit = True
        if at_once:
            self._uvicorn.stop_now()


class ServerThread:
    """A server in a thread of this process, for tests and tools: `with ServerThread(loaded, settings) as url`."""

    def __init__(self, loaded: LoadedModel, settings: ServerSettings) -> None:
        self.server = Server(loaded, settings)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rimuru-http", daemon=True)

    def _run(self) -> None:
        try:
            self.server.serve(lambda url: self._ready.set())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self.server.url

    def __exit__(self, *_: object) -> None:
        self.server.stop(at_once=True)
        self._thread.join(30)


def guarded(app: ASGIApp, settings: ServerSettings, address: str) -> ASGIApp:
    """The application behind the doors that the settings ask for, of a server bound to this IP address."""
    if settings.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    hosts = settings.hosts_at(address)
    if hosts is None and settings.allowed_hosts:
        log.warning("--allowed-host does nothing where other machines can reach the server")
    return Guard(app, settings, hosts)


def show_messages_of_libraries() -> None:
    """What uvicorn and asyncio say goes where the package's own messages go, at the same level. uvicorn's INFO only
    repeats ours: it is shown at DEBUG."""
    package = logging.getLogger("rimuru")
    level = package.getEffectiveLevel()
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING if level == logging.INFO else level)
        if name != "uvicorn.error":  # it hands on to uvicorn
            logger.handlers, logger.propagate = list(package.handlers), package.propagate


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises BadInputError in one line: in use, not allowed, no such address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None


def serve(loaded: LoadedModel, settings: ServerSettings, ready: Callable[[str], None]) -> None:
    """Serve a loaded model until a signal ends it."""
    raise_descriptor_limit()
    if not settings.is_local and not settings.api_keys:
        log.warning("the server is open to the network without an API key; set one with --api-key-file")
    server = Server(loaded, settings)
    show_messages_of_libraries()
    try:
        server.serve(ready)
    except RimuruError:
        raise
    except OSError as error:
        raise BadInputError(f"the server cannot run: {error.strerror or error}") from None
