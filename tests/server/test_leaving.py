"""Clients that leave in the queue, in prefill, in decode (H05), at random (M05, R03); answers that stay apart (M09)."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from script_model import ALPHABET, HELLO, write_script_model
from server_fixtures import running

from rimuru.server.settings import ServerSettings
from tools.make_random_gguf import write_random_model

DIGITS = {"prompt": "0", "temperature": 0, "max_tokens": 8000}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One place, small prefill pieces, a long context: every state of a request lasts long enough to leave in it."""
    path = write_script_model(tmp_path_factory.mktemp("narrow") / "m.gguf", context=8192, n_layers=1)
    with running(path, ServerSettings(port=0), max_sequences=1, max_step_tokens=32) as server:
        yield server


def is_free(server: Any) -> bool:
    return server.metric("rimuru_requests_running") == 0 and server.metric("rimuru_requests_waiting") == 0


def read_until(connection: Any, n_events: int) -> bytes:
    data = b""
    while data.count(b"data: ") < n_events:
        data += connection.recv(4096)
    return data


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_decoding(narrow: Any, stream: bool) -> None:
    connection = narrow.request_socket({**DIGITS, "stream": stream})
    if stream:
        read_until(connection, 3)
    else:
        narrow.wait_until(lambda: narrow.metric("rimuru_requests_running") == 1)
    connection.close()
    narrow.wait_until(lambda: is_free(narrow), 1.0)
    narrow.wait_idle()
    assert narrow.unused_kv_pages() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_prompt_is_read(narrow: Any, stream: bool) -> None:
    """A prompt of 8000 tokens in pieces of 32; the client leaves after the first of them."""
    n_steps = narrow.llm.loaded.engine.n_steps
    noise = "".join(random.Random(stream).choices("0123456789", k=8000))
    connection = narrow.request_socket({**DIGITS, "prompt": noise, "stream": stream})
    narrow.wait_until(lambda: narrow.llm.loaded.engine.n_steps > n_steps)
    connection.close()
    narrow.wait_until(lambda: is_free(narrow), 1.0)
    assert narrow.llm.loaded.engine.n_steps < n_steps + 200, "the whole prompt was read for nobody"
    narrow.wait_idle()
    assert narrow.unused_kv_pages() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue(narrow: Any, stream: bool) -> None:
    """A dead request that waits is never started."""
    first = narrow.request_socket({**DIGITS, "stream": True})
    read_until(first, 3)
    n_prompts = narrow.metric("rimuru_cached_prompt_tokens_total")
    second = narrow.request_socket({**DIGITS, "prompt": "!", "stream": stream})
    narrow.wait_until(lambda: narrow.metric("rimuru_requests_waiting") == 1)
    second.close()
    narrow.wait_until(lambda: narrow.metric("rimuru_requests_waiting") == 0, 1.0)
    assert narrow.metric("rimuru_requests_running") == 1
    first.close()
    narrow.wait_idle()
    assert narrow.metric("rimuru_cached_prompt_tokens_total") == n_prompts


def test_the_next_in_line_gets_its_turn(narrow: Any) -> None:
    first = narrow.request_socket({**DIGITS, "stream": True})
    read_until(first, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(narrow.post, "/v1/completions", {**DIGITS, "max_tokens": 3})
        narrow.wait_until(lambda: narrow.metric("rimuru_requests_waiting") == 1)
        first.close()
        assert waiting.result(10).json()["choices"][0]["text"] == "123"


def test_many_clients_that_leave_at_random(script: Any) -> None:
    """Afterwards every page is back, and a plain request is answered at once."""
    rng = random.Random(3)
    plans = [(rng.choice([0, 0, 0.01, 0.05, 0.2]), rng.random() < 0.5, rng.randrange(1, 400)) for _ in range(120)]

    def visit(plan: tuple[float, bool, int]) -> None:
        stay_s, stream, n_prompt = plan
        connection = script.request_socket(
            {"prompt": "7" * n_prompt, "temperature": 0, "max_tokens": 100, "stream": stream, "n": 2}
        )
        time.sleep(stay_s)
        connection.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, plans))
    script.wait_idle(20)
    assert script.unused_kv_pages() == 0
    started = time.monotonic()
    assert script.post("/v1/completions", {"prompt": "0", "temperature": 0, "max_tokens": 3}).status_code == 200
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("arch", ["qwen3moe", "granitehybrid"])
def test_concurrent_answers_equal_solo_answers(arch: str, tmp_path: Path) -> None:
    """Conversations of different lengths at once, some of them abandoned: each answer is that of its solo run."""
    rng = random.Random(1)
    prompts = ["".join(rng.choices("abcdefgh ijkl", k=rng.randrange(1, 150))) for _ in range(16)]
    with running(write_random_model(tmp_path / "m.gguf", arch), max_sequences=6) as server:

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
            return str(server.post("/v1/completions", body).json()["choices"][0]["text"])

        alone = [ask(prompt) for prompt in prompts]
        assert len(set(alone)) > 8
        with ThreadPoolExecutor(16) as pool:
            for n_clients in (2, 3, 16):
                left = [server.request_socket({"prompt": p, "max_tokens": 50}) for p in prompts[:n_clients:2]]
                answers = pool.map(ask, prompts[:n_clients])
                for connection in left:
                    connection.close()
                assert list(answers) == alone[:n_clients]
        server.wait_idle()


def test_a_slow_reader_holds_nobody_up(script: Any) -> None:
    """It reads nothing for a while; others are served, and it still gets every token."""
    slow = script.request_socket({"prompt": "0", "temperature": 0, "max_tokens": 400, "stream": True})
    started = time.monotonic()
    reply = script.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0}).json()
    assert reply["choices"][0]["message"]["content"] == ALPHABET and time.monotonic() - started < 3
    script.wait_until(lambda: script.loop.n_jobs == 0, 20)
    data = b""
    while b"[DONE]" not in data:
        data += slow.recv(65536)
    slow.close()
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
    assert text == "".join(str(i % 10) for i in range(1, 401))


def test_requests_from_many_threads_of_one_client(script: Any) -> None:
    results: list[str] = []

    def ask() -> None:
        stream = script.client.completions.create(model="m", prompt="4", temperature=0, max_tokens=30, stream=True)
        results.append("".join(chunk.choices[0].text for chunk in stream))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == ["".join(str((5 + i) % 10) for i in range(30))] * 12
