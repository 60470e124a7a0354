"""The command `rimuru serve` as a process: address, signals, log lines, wrong options; what the metrics count."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from rimuru.cli import main
from rimuru.memory.move_budget import MoveBudget

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a text that no log may hold"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """main() sends the package's log to the stderr of its test; later tests must not write there."""
    yield
    logger = logging.getLogger("rimuru")
    logger.handlers.clear()
    logger.propagate = True


class Process:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.url = ""

    def wait_ready(self) -> None:
        end = time.monotonic() + 120
        while (found := re.search(r"ready: (http://\S+)/v1", self.log.read_text())) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        self.url = found.group(1)


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "rimuru", "serve", str(model), "--port", "0", "--threads", "2", *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stderr=file, stdout=file, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        found = Process(process, log)
        found.wait_ready()
        yield found
    finally:
        process.kill()
        process.wait(10)


def start_stream(url: str, n_tokens: int) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    body = json.dumps({"prompt": "0", "temperature": 0, "max_tokens": n_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connection.sendall(head + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionError:
        pass
    return data


def test_first_signal_drains(script_file: Path, tmp_path: Path) -> None:
    """The answer that runs comes whole, new connections are refused, the exit is clean; the log has no text."""
    with serving(script_file, tmp_path / "log") as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": SECRET, "temperature": 0, "max_tokens": 3})
        assert reply.json()["choices"][0]["text"] == "efg"
        connection = start_stream(server.url, 400)
        data = connection.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        data += read_all(connection)
        assert data.count(b'"text"') == 400 and b"[DONE]" in data
        assert server.process.wait(20) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
    log = (tmp_path / "log").read_text()
    lines = [line for line in log.splitlines() if "POST /v1/completions 200" in line]
    assert len(lines) == 2 and "prompt=27" in lines[0] and "output=3" in lines[0] and "finish=length" in lines[0]
    assert SECRET not in log and "efg" not in log and "Traceback" not in log
    assert re.search(r"served 2 requests .* 403 tokens of answers, \d+\.\d per second", log)


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def test_second_signal_stops(script_file: Path, tmp_path: Path) -> None:
    """Each request that is queued then is told why it ends: by 503, or in its stream where that has been opened."""
    with serving(script_file, tmp_path / "log", "--max-sequences", "1") as server:
        connections = [start_stream(server.url, 1500) for _ in range(20)]
        connections[0].recv(1000)
        end = time.monotonic() + 60
        while metric(server.url, "rimuru_prompt_tokens_total") < 20:  # one each: all have come to the engine
            assert time.monotonic() < end
            time.sleep(0.02)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        replies = [read_all(connection) for connection in connections]
    told = [b"shutting_down" in reply for reply in replies]
    assert any(told) and all(is_told or b"[DONE]" in reply for is_told, reply in zip(told, replies, strict=True))
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_the_log_level_holds_for_the_libraries(script_file: Path, tmp_path: Path) -> None:
    """A request that is no HTTP is uvicorn's to warn of: shown as our lines are, and not above its level."""
    for level, is_shown in (("info", True), ("error", False)):
        with serving(script_file, tmp_path / level, "--log-level", level) as server:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(b"no HTTP\r\n\r\n")
                assert b"400" in read_all(connection)
        log = (tmp_path / level).read_text()
        assert bool(re.search(r"^\d\d:\d\d:\d\d WARNING Invalid HTTP", log, re.M)) is is_shown
        assert ("Invalid HTTP" in log) is is_shown and "Started server process" not in log


def test_killed_it_starts_again(script_file: Path, tmp_path: Path) -> None:
    """Nothing that a killed server leaves behind keeps the next one from starting on the same port."""
    with serving(script_file, tmp_path / "first") as server:
        connection = start_stream(server.url, 400)
        connection.recv(100)
        server.process.kill()
        server.process.wait(10)
        port = server.url.rsplit(":", 1)[1]
    with serving(script_file, tmp_path / "second", "--port", port) as server:
        assert server.url.endswith(f":{port}")
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def digest_of(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_killed_at_any_moment_it_leaves_its_files_whole(script_file: Path, tmp_path: Path) -> None:
    """While it starts, loads a converted model, answers, or is told to end: nothing beside the model is changed, and
    the next one starts and answers."""
    folder, log = tmp_path / "models", tmp_path / "log"
    folder.mkdir()
    model = Path(shutil.copy(script_file, folder / "script.gguf"))
    assert main(["convert", str(model), "-q"]) == 0
    converted, before, rng = folder / "script.rimuru", digest_of(folder), random.Random(4)
    command = [sys.executable, "-m", "rimuru", "serve", str(converted), "--port", "0", "--memory", "24MiB"]
    for _ in range(5):
        with log.open("w") as file:
            process = subprocess.Popen(command, stderr=file, stdout=file, env={**os.environ, "PYTHONPATH": str(ROOT)})
        server, end = Process(process, log), time.monotonic() + rng.uniform(0.1, 2.5)
        while time.monotonic() < end:
            if (ready := re.search(r"ready: (http://\S+)/v1", log.read_text())) is not None and not server.url:
                server.url = ready.group(1)
                start_stream(server.url, 400)
            time.sleep(0.01)
        process.kill()
        process.wait(10)
        assert digest_of(folder) == before
    with serving(converted, log, "--memory", "24MiB") as server:
        body = {"prompt": "0", "temperature": 0, "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"] == "123"
    assert digest_of(folder) == before


def test_keys_come_from_a_file(script_file: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the house\nfirst\n\n  second  \n")
    with serving(script_file, tmp_path / "log", "--api-key-file", str(keys)) as server:
        for key, status in (("first", 200), ("second", 200), ("# of the house", 401), ("", 401)):
            headers = {"x-api-key": key}
            assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).status_code == status


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "70000"], "port"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--api-key", ""], "API key"),
        (["--allowed-host", "http://my.name"], "http://my.name"),
        (["--api-key-file", "/no/such/file"], "/no/such/file"),
        (["--api-key-file", "/dev/null"], "no API key in /dev/null"),
        (["--request-timeout", "0"], "time-out"),
        (["--max-body", "huge"], "size"),
    ],
)
def test_wrong_options_are_one_line(
    script_file: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(script_file), "-q", *options]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("rimuru: ") and told in err


def test_a_port_in_use_is_one_line(script: Any, script_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = script.url.rsplit(":", 1)[1]
    assert main(["serve", str(script_file), "-q", "--port", port]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_metrics_count(script: Any) -> None:
    names = ("rimuru_prompt_tokens_total", "rimuru_output_tokens_total", "rimuru_request_seconds_count")
    before = [script.metric(name) for name in names]
    script.post("/v1/completions", {"prompt": "012", "temperature": 0, "max_tokens": 9, "n": 2})
    assert [script.metric(name) - old for name, old in zip(names, before, strict=True)] == [6, 18, 1]
    text = script.http.get("/metrics").text
    assert 'rimuru_pool_pages{view="expert"}' in text and 'rimuru_requests_total{outcome="done"}' in text
    assert script.metric("rimuru_memory_bytes") == script.http.get("/v1/memory").json()["total_bytes"]


def test_what_is_reused_is_counted_as_what_is_asked(script: Any) -> None:
    """Four answers to a prompt that is known reuse it four times; the share of what was asked stays below one."""
    names = ("rimuru_prompt_tokens_total", "rimuru_cached_prompt_tokens_total")
    request = {"prompt": "0123456789" * 30, "temperature": 0, "max_tokens": 2, "n": 4}
    script.post("/v1/completions", request)
    before = [script.metric(name) for name in names]
    script.post("/v1/completions", request)
    asked, reused = (script.metric(name) - old for name, old in zip(names, before, strict=True))
    assert asked == 4 * 300 and 300 < reused < asked


def test_memory_report_has_the_designs_keys(script: Any) -> None:
    memory = script.http.get("/v1/memory").json()
    assert {"total_bytes", "free_bytes", "dense_bytes", "scratch_bytes", "views", "levels", "resident_experts"} <= set(
        memory
    )
    assert set(memory["views"]) == {"expert", "kv", "ssm", "conv", "buffer"}
    used = sum(view["bytes"] for view in memory["views"].values())
    pool = memory["total_bytes"] - memory["dense_bytes"] - memory["scratch_bytes"]
    assert used + memory["free_bytes"] == pool
    connection = script.request_socket({"prompt": "0" * 40, "temperature": 0, "max_tokens": 400, "stream": True})
    script.wait_until(lambda: script.http.get("/v1/memory").json()["requests"] != [])
    request = script.http.get("/v1/memory").json()["requests"][0]
    assert request["tokens"] > 0 and request["pages"] > 0
    connection.close()


def test_resizing_while_answers_run(script_file: Path) -> None:
    from server_fixtures import running

    with running(script_file) as server:
        server.llm.loaded.pool.moves = MoveBudget(1)  # a huge page between two steps
        total = server.http.get("/v1/memory").json()["total_bytes"]
        huge = server.llm.loaded.layout.huge_bytes
        for wrong in ({"memory": "1KiB"}, {"memory": "lots"}, {"memory": -1}, {}):
            assert server.post("/v1/memory/resize", wrong).status_code == 400
        connection = server.request_socket({"prompt": "0", "temperature": 0, "max_tokens": 300, "stream": True})
        connection.recv(100)
        for n_bytes in (total - 20 * huge, total - 40 * huge, total):
            reply = server.post("/v1/memory/resize", {"memory": n_bytes})
            assert reply.status_code == 200, reply.text
            assert n_bytes - huge < reply.json()["total_bytes"] <= n_bytes
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(65536)
        assert data.count(b'"text"') >= 299
        connection.close()
        server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_a_smaller_pool_cannot_hold_end_by_their_length(script_file: Path, stream: bool) -> None:
    """Over HTTP as in Python: nobody waits for ever, what was written is there, and the server stops at once."""
    from server_fixtures import running

    with running(script_file, max_sequences=4) as server:
        start = server.llm.loaded
        request = {"prompt": "0", "temperature": 0, "max_tokens": 4000, "stream": stream}
        with ThreadPoolExecutor(3) as executor:
            answers = [executor.submit(server.post, "/v1/completions", request) for _ in range(3)]
            server.wait_until(lambda: any(r["tokens"] > 300 for r in server.http.get("/v1/memory").json()["requests"]))
            least = start.dense_bytes + start.scratch_bytes + start.least_pool_bytes
            assert server.post("/v1/memory/resize", {"memory": least}).status_code == 200
            assert server.llm.context_length < 300
            replies = [answer.result(20) for answer in answers]
        for reply in replies:
            assert reply.status_code == 200
            if stream:
                assert reply.text.rstrip().endswith("[DONE]") and '"finish_reason":"length"' in reply.text.replace(
                    " ", ""
                )
            else:
                (choice,) = reply.json()["choices"]
                assert choice["finish_reason"] == "length" and len(choice["text"]) > 200
        server.wait_idle()


def test_trace_replay_reports_what_was_served(script: Any, tmp_path: Path) -> None:
    """tools/bench/serve.py against this server: every request answered in full, at the trace's times."""
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.0000000,{30 + second},{5 + second}" for second in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    command = [sys.executable, str(ROOT / "tools/bench/serve.py"), "--url", f"{script.url}/v1", "--trace", str(trace)]
    result = subprocess.run(
        [*command, "--stretch", "0.2", "--json"], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["requests"], figures["errors"]) == (4, {})
    assert figures["output_tokens"] == 5 + 6 + 7 + 8 and 0.6 <= figures["seconds"] < 20
    assert {"mean", "p50", "p95"} == set(figures["ttft_s"]) == set(figures["tpot_s"])


class Austere(BaseHTTPRequestHandler):
    """Another server: it has one model, names no usage, and refuses fields that OpenAI's API does not have."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is not the place."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "theirs"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if set(body) - {"model", "prompt", "messages", "max_tokens", "temperature", "stream"}:
            self.answer(400, json.dumps({"error": {"message": "Unrecognized request argument supplied"}}))
            return
        self.seen.append((self.path, body))
        new = {"delta": {"content": "word "}} if "messages" in body else {"text": "word "}
        events = [json.dumps({"choices": [new]})] * body["max_tokens"] + ["[DONE]"]
        self.answer(200, "".join(f"data: {event}\n\n" for event in events))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.mark.parametrize("chat", [False, True])
def test_trace_replay_against_another_server(chat: bool, tmp_path: Path) -> None:
    """Only fields that the other server takes are sent; its chunks are counted where it tells no usage."""
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n20,5\n30,7\n")
    Austere.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Austere)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        command = [sys.executable, str(ROOT / "tools/bench/serve.py"), "--url", url, "--trace", str(trace), "--json"]
        result = subprocess.run(
            [*command, *(["--chat"] if chat else [])], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["requests"], figures["errors"], figures["output_tokens"]) == (2, {}, 12)
    assert (figures["model"], figures["fields"]) == ("theirs", [])
    assert len(Austere.seen) == 2
    assert {path for path, _ in Austere.seen} == {"/v1/chat/completions" if chat else "/v1/completions"}
    assert all(body["model"] == "theirs" and body["stream"] for _, body in Austere.seen)


def replay_against(url: str, trace: Path) -> subprocess.CompletedProcess[str]:
    trace.write_text("prompt_tokens,output_tokens\n20,5\n30,7\n")
    command = [sys.executable, str(ROOT / "tools/bench/serve.py"), "--url", url, "--trace", str(trace)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_trace_replay_without_a_server_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = replay_against(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", tmp_path / "trace.csv")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and "no server answers at http://127.0.0.1" in result.stderr


class Refusing(BaseHTTPRequestHandler):
    """A server that refuses all prompts, and says why."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is not the place."""

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "theirs"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(400, {"error": {"message": "the prompt is\ntoo long"}})

    def answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def test_trace_replay_shows_why_requests_are_refused(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        result = replay_against(f"http://127.0.0.1:{server.server_port}/v1", tmp_path / "trace.csv")
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
    assert result.returncode == 1 and "HTTP 400: the prompt is too long" in result.stdout
