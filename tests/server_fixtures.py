"""Servers over real HTTP on loopback, in threads of the test process."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from rimuru import LLM
from rimuru.server.loop import EngineLoop
from rimuru.server.run import ServerThread
from rimuru.server.settings import ServerSettings


class Running:
    """A server, ways to talk to it, and a look inside."""

    def __init__(self, llm: LLM, thread: ServerThread, url: str) -> None:
        self.llm, self.url = llm, url
        self.loop: EngineLoop = thread.server.loop
        self.app = thread.server.app
        self.settings = thread.server.settings
        key = self.settings.api_keys[0] if self.settings.api_keys else "none"
        self.client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"there is no metric {name}")

    def request_socket(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        """A connection on which the request has just been sent; closing it is how a client leaves."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=30)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Fail unless the condition comes true in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.005)

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Until no request is left, then: no page is held by one, and every structure is sound."""
        engine = self.llm.loaded.engine
        self.wait_until(lambda: not engine.scheduler.has_work and self.loop.n_jobs == 0, seconds)
        self.loop.call(engine.audit).result(10)
        assert self.http.get("/v1/memory").json()["requests"] == []

    def unused_kv_pages(self) -> int:
        """KV pages in use minus those that only wait for reuse: zero without requests."""
        memory = self.http.get("/v1/memory").json()
        return memory["views"]["kv"]["pages"] - memory["cached_pages"]


@contextmanager
def running(path: Path, settings: ServerSettings | None = None, **options: Any) -> Iterator[Running]:
    """Serve a model file; options are LLM's."""
    with LLM(path, device="cpu", threads=2, **options) as llm:
        thread = ServerThread(llm.loaded, settings or ServerSettings(port=0))
        with thread as url:
            server = Running(llm, thread, url)
            try:
                yield server
            finally:
                server.client.close()
                server.http.close()
