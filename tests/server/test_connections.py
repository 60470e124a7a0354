"""Connections that send nothing, or send it slowly, lock nobody out; requests are queued in the order they came."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fixtures import Running, running

from rimuru.server import connections
from rimuru.server.http import LARGE_BODY_BYTES
from rimuru.server.prepare import Preparer

ROOT = Path(__file__).resolve().parents[2]


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        while connection.recv(1000):  # the rest of an answer
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_more_silent_connections_than_descriptors(script_file: Path, tmp_path: Path) -> None:
    """The process may open 256 files and 300 connections come: others are answered, and the log stays short."""
    command = [sys.executable, "-m", "rimuru", "serve", str(script_file), "--port", "0", "--threads", "2"]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", *command],
            stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    silent: list[socket.socket] = []
    try:
        end = time.monotonic() + 120
        while (found := re.search(r"ready: (http://\S+)/v1", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        silent = [connect(found.group(1)) for _ in range(300)]
        for _ in range(3):
            assert httpx.get(f"{found.group(1)}/health", timeout=10).json() == {"status": "ok"}
    finally:
        process.kill()
        process.wait(10)
        for connection in silent:
            connection.close()
    text = log.read_text()
    assert len(text) < 5000 and "Traceback" not in text, text[:2000]


def test_headers_must_come_in_time(script_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends no request, or one byte at a time, is cut off; who has sent one is not, however long it takes."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)
    with running(script_file) as server:
        silent, slow, kept = (connect(server.url) for _ in range(3))
        answered = server.request_socket({"prompt": "0", "temperature": 0, "max_tokens": 3000, "ignore_eos": True})
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - started < 10:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert is_closed(silent)
        kept.sendall(b"GET /health HTTP/1.1\r\n")  # and never the rest, on a connection that had a request
        assert is_closed(kept)
        assert answered.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in (silent, slow, kept, answered):
            connection.close()
        server.wait_idle()


def test_the_limit_leaves_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, n_most in ((64, 32), (1024, 864), (1 << 20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections.most_connections() == n_most


def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    for limits in ((1024, 4096), (4096, 4096), (1024, resource.RLIM_INFINITY)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        connections.raise_descriptor_limit()
    assert told == [(4096, 4096), (65536, resource.RLIM_INFINITY)]


def test_no_descriptors_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop, trouble = asyncio.new_event_loop(), connections.LoopTrouble()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            trouble(loop, context)
        assert len(caplog.records) == 1 and "open files" in caplog.text
        trouble(loop, {"message": "something else"})
    assert len(caplog.records) == 2 and "something else" in caplog.text
    loop.close()


def test_another_protocol_is_answered_without_advice(script: Running, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    with caplog.at_level(logging.INFO):
        assert script.http.get("/health", headers=headers).status_code == 200
    assert "install" not in caplog.text and "Unsupported" not in caplog.text


@pytest.mark.parametrize("n_more_bytes", [0, LARGE_BODY_BYTES])
def test_a_burst_is_queued_in_the_order_it_came(
    script: Running, monkeypatch: pytest.MonkeyPatch, n_more_bytes: int
) -> None:
    """Though the first takes longest to prepare, and some are refused: each client's order is that of arrival."""
    submitted: list[str] = []
    prepare, submit = Preparer.completion, script.loop.submit

    def slow(self: Any, body: Any) -> Any:
        time.sleep(0.3 - 0.03 * int(body.prompt))
        return prepare(self, body)

    def noted(job: Any) -> None:
        submitted.append(script.llm.loaded.tokenizer.decode(job.prompts[0]))
        submit(job)

    monkeypatch.setattr(Preparer, "completion", slow)
    monkeypatch.setattr(script.loop, "submit", noted)
    sent = []
    for number in range(9):
        more = {"user": " " * n_more_bytes} | ({"suffix": "refused"} if number in (0, 4) else {})
        sent.append(script.request_socket({"prompt": f"{number}", "temperature": 0, "max_tokens": 2, **more}))
        time.sleep(0.01)
    replies = [connection.recv(100) for connection in sent]
    for connection in sent:
        connection.close()
    assert [reply.startswith(b"HTTP/1.1 200") for reply in replies] == [n not in (0, 4) for n in range(9)]
    assert submitted == [str(n) for n in range(9) if n not in (0, 4)]
    assert script.app.state.service._arrivals._lines == {}


def test_a_small_request_passes_a_large_one(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one still takes its time to be prepared when the small one is answered."""
    prepare, small_is_done = Preparer.completion, threading.Event()

    def slow(self: Any, body: Any) -> Any:
        assert body.user is None or small_is_done.wait(10)
        return prepare(self, body)

    monkeypatch.setattr(Preparer, "completion", slow)
    body = {"prompt": "0", "temperature": 0, "max_tokens": 2}
    large = script.request_socket({**body, "user": " " * LARGE_BODY_BYTES})
    script.wait_until(lambda: bool(script.app.state.service._arrivals._lines))
    assert script.post("/v1/completions", body).status_code == 200
    small_is_done.set()
    assert large.recv(100).startswith(b"HTTP/1.1 200")
    large.close()


def test_head_is_get_without_a_body(script: Running) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics", "/static/dashboard.js"):
        reply = script.http.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
        assert reply.headers["content-type"] == script.http.get(path).headers["content-type"]
    assert script.http.head("/v1/completions").status_code == 405
    content = script.http.get("/openapi.json").json()["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(content) == ["text/plain"]
