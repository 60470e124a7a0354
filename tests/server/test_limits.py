"""What a request may not do, and what a failure may not reach (H11, M07): status, error body, others untouched."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from script_model import ALPHABET, HELLO
from server_fixtures import Running, running

from rimuru import LLM
from rimuru.base.errors import NotEnoughMemoryError
from rimuru.server.errors import FieldError
from rimuru.server.openai_schema import ChatRequest, CompletionRequest, parse_body
from rimuru.server.settings import ServerSettings

KEY = "correct horse"
DIGITS = {"prompt": "0", "temperature": 0}


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error object; checks its shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert "Traceback" not in reply.text
    return dict(error)


@pytest.fixture(scope="module")
def strict(script_file: Path) -> Iterator[Running]:
    """One place, one may wait, a key, small bodies."""
    settings = ServerSettings(port=0, api_keys=(KEY, "second"), max_waiting=1, max_body_bytes=20_000)
    with running(script_file, settings, max_sequences=1) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


# ---- what the body says
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "top_p": 1.5}, "top_p"),
        ({"messages": HELLO, "n": 0}, "n"),
        ({"messages": HELLO, "n": 10_000}, "n"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"messages": HELLO, "stop": 5}, "stop"),
        ({"messages": HELLO, "stop": ["a"] * 100}, "stop"),
        ({"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}, "tools"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": HELLO, "response_format": {"json_schema": {"schema": {}}}}, "response_format"),
    ],
)
def test_wrong_fields_are_named(script: Any, body: dict[str, Any], param: str) -> None:
    error = error_of(script.post("/v1/chat/completions", body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": NaN}',
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_object(script: Any, data: bytes) -> None:
    error_of(script.http.post("/v1/chat/completions", content=data), 400)


def test_messages_that_no_template_can_use(script: Any) -> None:
    for message in (
        {"role": 3},
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": [{"type": {}, "text": "x"}]},
    ):
        error_of(script.post("/v1/chat/completions", {"messages": [message]}), 400)


UNKNOWN_WISHES: list[dict[str, Any]] = [
    {"guided_json": {}}, {"guided_regex": "a+"}, {"guided_choice": ["a"]}, {"grammar": 'root ::= "a"'},
    {"structured_outputs": {"regex": "a"}}, {"json_schema": {}}, {"min_tokens": 5}, {"stop_token_ids": [3]},
    {"functions": [{"name": "f"}]}, {"function_call": "auto"}, {"function_call": {"name": "f"}}, {"n_predict": 3},
    {"repeat_penalty": 1.1}, {"bad_words": ["a"]}, {"mirostat": 2}, {"typical_p": 0.5}, {"prompt_logprobs": 0},
    {"chat_template": "{{ 1 }}"}, {"modalities": ["audio"]}, {"skip_special_tokens": False}, {"min_tokens": "x"},
    {"echo": True}, {"suffix": "end"}, {"best_of": 4},
]  # fmt: skip


@pytest.mark.parametrize("field", UNKNOWN_WISHES, ids=lambda field: str(field)[:40])
def test_fields_that_would_change_the_answer_are_refused(script: Any, field: dict[str, Any]) -> None:
    name = next(iter(field))
    for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", DIGITS)):
        error = error_of(script.post(path, {**body, **field}), 400)
        assert (error["code"], error["param"]) == ("not_supported", name)
        assert error["message"].startswith(f"{name} is not supported: ")


def test_fields_that_ask_for_nothing_are_no_error(script: Any) -> None:
    off = {"min_tokens": 0, "stop_token_ids": [], "grammar": "", "guided_json": None, "repeat_penalty": 1.0}
    off |= {"mirostat": 0, "functions": [], "function_call": "none", "typical_p": 1, "skip_special_tokens": True}
    off |= {"echo": False, "suffix": "", "best_of": 1}
    assert script.post("/v1/completions", {**DIGITS, **off, "max_tokens": 3}).json()["choices"][0]["text"] == "123"


@pytest.mark.parametrize(
    ("model", "body", "told"),
    [
        (CompletionRequest, {"prompt": [[1]] * 500_000}, "prompt: at most 128 prompts"),
        (CompletionRequest, {"prompt": [1] * 500_000 + ["x"]}, "prompt: at most 128 prompts"),
        (CompletionRequest, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(500_000)), "x")}, "logit_bias"),
        (ChatRequest, {"messages": [1] * 500_000}, "messages: expected a list of objects"),
        (ChatRequest, {"messages": HELLO, "tools": [1] * 500_000}, "tools: expected a list of objects"),
        (ChatRequest, {"messages": HELLO, "stop": [1] * 500_000}, "stop"),
    ],
)
def test_wrong_values_by_the_hundred_thousand_take_no_time(model: Any, body: dict[str, Any], told: str) -> None:
    """Checking them holds everybody else up; noting each took seconds."""
    started = time.monotonic()
    with pytest.raises(FieldError, match=told):
        parse_body(model, body)
    assert time.monotonic() - started < 0.5


def test_unknown_fields_are_tolerated(script: Any) -> None:
    body = {"messages": HELLO, "temperature": 0, "mirostat": 0, "cache_prompt": True, "user": {"odd": []}, "stop": None}
    assert script.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == ALPHABET


def test_odd_prompts_and_texts(script: Any) -> None:
    for prompt in ([], [[]], "", [""], [-1], [10**9], [[1], [264_000]], {"a": 1}, None, [1, "x"]):
        error_of(script.post("/v1/completions", {"prompt": prompt}), 400)
    lone = script.http.post("/v1/completions", content=b'{"prompt": "0\\ud83d", "max_tokens": 2, "model": "\\udc00"}')
    assert lone.status_code == 200
    error_of(script.post("/detokenize", {"tokens": [10**8]}), 400)
    error_of(script.post("/tokenize", {}), 400)


def test_addresses_and_methods(script: Any) -> None:
    assert error_of(script.post("/v1/embeddings", {"input": "x"}), 400)["code"] == "not_supported"
    assert error_of(script.http.get("/v1/nothing"), 404)["code"] == "not_found"
    error_of(script.http.get("/v1/completions"), 405)
    error_of(script.http.get("/static/../http.py"), 404)
    error_of(script.http.get("/static/secret"), 404)


# ---- the context (H11)
def test_prompts_around_the_context(script: Any) -> None:
    """511 tokens leave room for one more, 512 and 513 do not; an endless stream beside them does not notice."""
    beside = script.request_socket({**DIGITS, "max_tokens": 450, "stream": True})
    fits = script.post("/v1/completions", {"prompt": "0" * 511, "temperature": 0, "max_tokens": 9}).json()
    assert (fits["choices"][0]["finish_reason"], fits["usage"]["completion_tokens"]) == ("length", 1)
    for n in (512, 513, 5000):
        error = error_of(script.post("/v1/completions", {"prompt": "0" * n}), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(n) in error["message"] and "512" in error["message"]
        with pytest.raises(openai.BadRequestError, match="context"):
            list(script.client.completions.create(model="m", prompt="0" * n, stream=True))
    data = b""
    while b"[DONE]" not in data:
        data += beside.recv(65536)
    beside.close()
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    assert len("".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)) == 450


def test_reaching_the_context_is_a_length_stop(script: Any) -> None:
    reply = script.post("/v1/completions", {"prompt": "0" * 500, "temperature": 0, "max_tokens": 400}).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["total_tokens"]) == ("length", 512)


# ---- memory (M07)
def test_a_small_pool_queues_and_goes_on(script_file: Path) -> None:
    """Room for few pages: a prompt that never fits is refused, endless streams take turns, all get their answers."""
    with LLM(script_file, device="cpu", max_step_tokens=32, max_sequences=8) as llm:
        loaded = llm.loaded
        fixed = loaded.dense_bytes + loaded.scratch_bytes
        huge = loaded.layout.huge_bytes
    for n_huge in range(8, 200, 4):
        try:
            options = {"memory": fixed + n_huge * huge, "max_step_tokens": 32, "max_sequences": 8}
            with running(script_file, **options) as server:
                if server.llm.context_length < 60:
                    continue
                check_small_pool(server)
                return
        except NotEnoughMemoryError:
            continue
    raise AssertionError("no pool was small enough to test and large enough to serve")


def check_small_pool(server: Running) -> None:
    context = server.llm.context_length
    error_of(server.post("/v1/completions", {"prompt": "0" * (context + 20)}), 400)
    body = {**DIGITS, "max_tokens": 600}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.post("/v1/completions", body), range(8)))
    for reply in replies:
        assert reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] == "length"
        assert reply.json()["usage"]["total_tokens"] == context
    assert server.post("/v1/completions", {**DIGITS, "max_tokens": 3}).json()["choices"][0]["text"] == "123"
    server.wait_idle()


@pytest.mark.parametrize("where", ["runner", "scheduler"])
def test_a_failing_step_fails_its_requests_only(script: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = script.llm.loaded.engine
    target, name = (engine.runner, "run") if where == "runner" else (engine.scheduler, "schedule")
    real, failing = getattr(target, name), threading.Event()

    def sometimes(*args: Any) -> Any:
        if failing.is_set():
            failing.clear()
            raise MemoryError("injected")
        return real(*args)

    monkeypatch.setattr(target, name, sometimes)
    stream = script.client.completions.create(model="m", prompt="0", temperature=0, max_tokens=400, stream=True)
    next(stream)
    failing.set()
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    failing.set()
    error = error_of(script.post("/v1/completions", DIGITS), 500)
    assert (error["type"], error["code"]) == ("server_error", "engine_step_failed") and "injected" not in error[
        "message"
    ]
    failing.set()
    error_of(script.post("/v1/completions", {**DIGITS, "stream": True}), 500)
    assert script.post("/v1/completions", {**DIGITS, "max_tokens": 3}).json()["choices"][0]["text"] == "123"


def test_a_failure_while_giving_pages_back_is_survived(script_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(script_file) as server:
        engine = server.llm.loaded.engine
        monkeypatch.setattr(engine, "finish", lambda sequence: 1 / 0)
        connection = server.request_socket({**DIGITS, "stream": True, "max_tokens": 400})
        connection.recv(1000)
        connection.close()
        server.wait_until(lambda: server.loop.n_jobs == 0)
        monkeypatch.undo()
        assert server.post("/v1/completions", {**DIGITS, "max_tokens": 3}).json()["choices"][0]["text"] == "123"


# ---- queue, time, size
def test_a_full_queue_is_refused_with_429(strict: Running) -> None:
    running_one = threading.Thread(target=strict.post, args=("/v1/completions", {**DIGITS, "max_tokens": 400}))
    running_one.start()
    strict.wait_until(lambda: len(strict.llm.loaded.engine.scheduler.running) == 1)
    waiting_one = threading.Thread(target=strict.post, args=("/v1/completions", {**DIGITS, "max_tokens": 2}))
    waiting_one.start()
    strict.wait_until(lambda: len(strict.llm.loaded.engine.scheduler.waiting) == 1)
    reply = strict.post("/v1/completions", DIGITS)
    error = error_of(reply, 429)
    assert (error["type"], error["code"], reply.headers["retry-after"]) == ("rate_limit_error", "queue_full", "1")
    assert error["message"].startswith("1 answer is waiting")
    error_of(strict.post("/v1/completions", {**DIGITS, "stream": True}), 429)
    running_one.join(30)
    waiting_one.join(30)


def test_a_queue_of_nothing_lets_nobody_wait(script_file: Path) -> None:
    """What finds a place runs at once, what does not is refused; alone on the server, a request may have more answers
    than there are places."""
    settings, body = ServerSettings(port=0, max_waiting=0), {**DIGITS, "ignore_eos": True}
    with running(script_file, settings, max_sequences=2) as server, ThreadPoolExecutor(2) as threads:
        scheduler = server.llm.loaded.engine.scheduler
        long = []
        for number in range(2):
            long.append(threads.submit(server.post, "/v1/completions", {**body, "max_tokens": 450}))
            server.wait_until(lambda number=number: len(scheduler.running) == number + 1)
            refused = server.post("/v1/completions", {**body, "n": 2 - number, "max_tokens": 2})
            assert error_of(refused, 429)["code"] == "queue_full" and "no answer may wait" in refused.text
            assert not scheduler.waiting
        assert [reply.result().status_code for reply in long] == [200, 200]
        assert server.post("/v1/completions", {**body, "n": 5, "max_tokens": 2}).status_code == 200
        server.wait_idle()


def test_requests_end_in_time(script: Any) -> None:
    started = time.monotonic()
    body = {"prompt": ["0"] * 40, "max_tokens": 400, "temperature": 0, "timeout": 0.3}
    assert error_of(script.post("/v1/completions", body), 504)["code"] == "request_timeout"
    assert time.monotonic() - started < 2
    with pytest.raises(openai.APIError, match="within"):
        options = {**body, "timeout": 60, "extra_body": {"timeout": 0.3}}
        list(script.client.completions.create(stream=True, model="m", **options))


def test_large_bodies_are_refused(strict: Running) -> None:
    error = error_of(strict.post("/v1/completions", {"prompt": "x" * 30_000}), 413)
    assert error["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 1000

    error_of(strict.http.post("/v1/completions", content=chunks()), 413)
    assert strict.post("/v1/completions", {"prompt": "x" * 100, "max_tokens": 1}).status_code == 200


def test_all_bodies_together_are_bounded(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies on their way in are held in memory: beyond what all may take, the next is told to come again."""
    bodies = script.app.state.service.bodies
    monkeypatch.setattr(bodies, "most_held_bytes", 200_000)
    host, port = script.url.removeprefix("http://").split(":")
    slow = []
    for _ in range(2):  # the rest of these never comes
        connection = socket.create_connection((host, int(port)), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n\r\n"
        connection.sendall(head.encode() + b" " * 90_000)
        slow.append(connection)
    script.wait_until(lambda: bodies.held_bytes == 180_000)
    refused = script.post("/v1/completions", {**DIGITS, "user": " " * 50_000})
    assert error_of(refused, 503)["code"] == "server_busy" and refused.headers["retry-after"]
    assert script.post("/v1/completions", {**DIGITS, "max_tokens": 1}).status_code == 200
    for connection in slow:
        connection.close()
    script.wait_until(lambda: bodies.held_bytes == 0)
    assert script.post("/v1/completions", {**DIGITS, "user": " " * 50_000, "max_tokens": 1}).status_code == 200
    assert bodies.held_bytes == 0


# ---- doors
def test_api_keys(strict: Running) -> None:
    anyone = httpx.Client(base_url=strict.url)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
        for path in ("/v1/models", "/metrics", "/v1/memory", "/v1/dashboard", "/openapi.json"):
            error = error_of(anyone.get(path, headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert anyone.get("/health").status_code == 200 and anyone.get("/").status_code == 200
    assert anyone.get("/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200
    assert strict.client.models.list().data
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="no", max_retries=0).models.list()


def test_pages_of_other_origins_are_refused(script: Any, script_file: Path) -> None:
    host = script.url.removeprefix("http://")
    for origin in ("http://evil.example", "null", "http://[", f"http://{host}.evil.example", ""):
        reply = script.http.post("/v1/completions", json=DIGITS, headers={"Origin": origin})
        assert error_of(reply, 403)["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in reply.headers
    assert script.http.get("/v1/models", headers={"Origin": f"http://{host}"}).status_code == 200
    with running(script_file, ServerSettings(port=0, cors_origins=("http://friend.example",))) as server:
        reply = server.http.get("/v1/models", headers={"Origin": "http://friend.example"})
        assert reply.headers["access-control-allow-origin"] == "http://friend.example"
        asked = {"Origin": "http://friend.example", "Access-Control-Request-Method": "POST"}
        assert server.http.options("/v1/completions", headers=asked).status_code == 200
        assert server.http.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403


def test_health_answers_while_a_long_text_is_tokenized(script: Running) -> None:
    """Encoding a megabyte takes a good part of a second, and putting its ids into JSON too."""
    text = "ab 12 " * 170_000
    with ThreadPoolExecutor(1) as threads, httpx.Client(base_url=script.url, timeout=60) as other:
        reply = threads.submit(script.post, "/tokenize", {"content": text})
        n = 0
        while not reply.done():
            assert other.get("/health").status_code == 200
            n += 1
    tokens = reply.result().json()["tokens"]
    assert script.llm.detokenize(tokens) == text and reply.result().json()["count"] == len(tokens) == len(text)
    assert n >= 20
    assert other.is_closed and script.http.head("/health").status_code == 200
    pieces = script.post("/tokenize", {"content": "ab", "with_pieces": True}).json()
    assert pieces["pieces"] == ["a", "b"] and pieces["count"] == 2
    assert script.post("/tokenize", {"content": ""}).json()["tokens"] == []


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        (ServerSettings(port=0), (200, 200, 200)),
        (ServerSettings(port=0, host="0.0.0.0"), (403, 403, 403)),
        (ServerSettings(port=0, admin_keys=("admin",)), (403, 403, 200)),
        (ServerSettings(port=0, api_keys=(KEY,)), (401, 403, 401)),
        (ServerSettings(port=0, api_keys=(KEY,), admin_keys=("admin",)), (401, 403, 200)),
    ],
    ids=["this machine", "network", "admin key", "API key", "both"],
)
def test_who_may_resize_the_memory(script_file: Path, settings: ServerSettings, statuses: tuple[int, ...]) -> None:
    """Nobody's key, an API key, an admin key: only the last, unless all who can come are on this machine."""
    with running(script_file, settings) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        size = {"memory": server.llm.loaded.memory_report()["total_bytes"]}
        for key, status in zip((None, KEY, "admin"), statuses, strict=True):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            reply = httpx.post(f"{url}/v1/memory/resize", json=size, headers=headers, timeout=60)
            assert reply.status_code == status, reply.text
            if status == 403:
                assert reply.json()["error"]["code"] == "admin_key_needed"
            if status == 200 and settings.api_keys:
                assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == (401 if settings.api_keys else 200)
