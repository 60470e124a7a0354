"""Several clients of one server: floods, full queues, priorities, time in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_fixtures import Running, running

from rimuru.base.errors import BadInputError
from rimuru.server.jobs import Job
from rimuru.server.settings import ServerSettings

KEYS = ("first key", "second key")


def body(n_tokens: int, number: int = 0, **more: object) -> dict[str, object]:
    return {"prompt": f"{number}", "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def shared(script_file: Path) -> Iterator[Running]:
    """One place, four may wait, two keys."""
    settings = ServerSettings(port=0, api_keys=KEYS, max_waiting=4, queue_timeout_s=60.0, max_priority=2)
    with running(script_file, settings, max_sequences=1) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


def post(server: Running, key: str, request: dict[str, object]) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/completions", json=request, headers={"Authorization": f"Bearer {key}"}, timeout=120
    )


def n_waiting(server: Running) -> int:
    return len(server.llm.loaded.engine.scheduler.waiting)


def test_a_flood_neither_holds_up_nor_shuts_out_another_client(shared: Running) -> None:
    """One key fills the queue and is refused more; the other still gets in, and is served next."""
    ended: list[str] = []

    def ask(name: str, key: str, n_tokens: int) -> int:
        reply = post(shared, key, body(n_tokens))
        ended.append(name)
        return reply.status_code

    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(ask, "running", KEYS[0], 400)
        shared.wait_until(lambda: len(shared.llm.loaded.engine.scheduler.running) == 1)
        flood = []
        for number in range(4):
            flood.append(threads.submit(ask, f"flood {number}", KEYS[0], 150))
            shared.wait_until(lambda number=number: n_waiting(shared) == number + 1)
        refused = post(shared, KEYS[0], body(1))
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "rate_limit_error"
        quiet = threads.submit(ask, "quiet", KEYS[1], 5)
        assert [future.result() for future in (first, quiet, *flood)] == [200] * 6
    assert ended.index("quiet") <= 1, ended
    shared.wait_idle()


def test_priorities_are_bounded(shared: Running) -> None:
    assert post(shared, KEYS[0], body(1, priority=2)).status_code == 200
    assert post(shared, KEYS[0], body(1, priority=-50)).status_code == 200
    refused = post(shared, KEYS[0], body(1, priority=3))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_the_urgent_go_first(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait for the one place, the highest priority is next, whenever it came."""
    ended: list[int] = []
    end = shared.loop._end

    def noted(job: Job) -> None:
        if not job.is_over:
            ended.append(job.priority)
        end(job)

    monkeypatch.setattr(shared.loop, "_end", noted)
    with ThreadPoolExecutor(4) as threads:
        replies = [threads.submit(post, shared, KEYS[0], body(400, priority=1))]
        shared.wait_until(lambda: len(shared.llm.loaded.engine.scheduler.running) == 1)
        for number, priority in enumerate((-1, 0, 2)):
            replies.append(threads.submit(post, shared, KEYS[0], body(5, priority=priority)))
            shared.wait_until(lambda number=number: n_waiting(shared) == number + 1)
        assert [reply.result().status_code for reply in replies] == [200] * 4
    assert ended == [1, 2, 0, -1]
    shared.wait_idle()


def test_no_request_waits_longer_than_allowed(script_file: Path) -> None:
    """503 with Retry-After for who did not get its turn in time; who runs may take longer."""
    settings = ServerSettings(port=0, queue_timeout_s=0.2)
    with running(script_file, settings, max_sequences=1) as server, ThreadPoolExecutor(2) as threads:
        long = threads.submit(server.post, "/v1/completions", body(1500))
        server.wait_until(lambda: len(server.llm.loaded.engine.scheduler.running) == 1)
        late = server.post("/v1/completions", body(1))
        assert late.status_code == 503 and late.headers["retry-after"]
        assert late.json()["error"]["code"] == "queue_timeout"
        assert long.result().status_code == 200
        assert server.post("/v1/completions", body(1)).status_code == 200
        server.wait_idle()


@pytest.mark.parametrize("name", ["queue_timeout_s", "request_timeout_s"])
def test_time_outs_are_checked(name: str) -> None:
    with pytest.raises(BadInputError, match="time-out"):
        ServerSettings(**{name: 0.0})
