"""Work of the engine's thread that is done in pieces, as resizing is: steps run between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fixtures import running


def test_work_in_pieces_lets_steps_run_between_them(script_file: Path) -> None:
    """One after the other, no step waits for more than a piece, an error is its caller's only, and
    nobody waits for ever when the server stops."""
    seen: list[tuple[str, int]] = []
    with running(script_file) as server:
        engine, go_on = server.llm.loaded.engine, threading.Event()

        def pieces(name: str, n: int) -> Iterator[None]:
            for _ in range(n):
                seen.append((name, engine.n_steps))
                yield

        def broken() -> Iterator[None]:
            yield
            raise ValueError("broken")

        def endless() -> Iterator[None]:
            while True:
                go_on.set()
                yield

        connection = server.request_socket({"prompt": "0", "temperature": 0, "max_tokens": 300, "stream": True})
        connection.recv(100)
        futures = [server.loop.call_in_pieces(pieces(name, 5)) for name in "ab"]
        with pytest.raises(ValueError, match="broken"):
            server.loop.call_in_pieces(broken()).result(10)
        assert [future.result(10) for future in futures] == [None, None]
        connection.close()
        assert [name for name, _ in seen] == ["a"] * 5 + ["b"] * 5
        assert len({n_steps for _, n_steps in seen}) == 10, "a step ran between any two pieces"
        last = server.loop.call_in_pieces(endless())
        assert go_on.wait(10)
        server.wait_idle()
    with pytest.raises(Exception, match="shutting down"):
        last.result(10)
