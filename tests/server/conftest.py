"""One server for the tests of this folder that do not need it in a special state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")

from script_model import write_script_model
from server_fixtures import Running, running


@pytest.fixture(scope="session")
def script_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("script") / "script.gguf")


@pytest.fixture(scope="session")
def script(script_file: Path) -> Iterator[Running]:
    """One server for all tests that do not need it in a special state."""
    with running(script_file) as server:
        yield server


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the shared server: it is idle, sound, and holds no page."""
    yield
    if "script" in request.fixturenames:
        request.getfixturevalue("script").wait_idle()
