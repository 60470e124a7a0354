"""The server against its own OpenAPI description: requests made from it, right ones and wrong ones (schemathesis)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from script_model import write_script_model
from server_fixtures import Running, running

from rimuru.server.openapi import ROUTES
from rimuru.server.settings import ServerSettings

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

KEY, ADMIN = "a key", "of the admin"
CHECKS = [
    status_code_conformance, content_type_conformance, response_schema_conformance, response_headers_conformance,
    negative_data_rejection, ignored_auth,
]  # fmt: skip
WITH_BODY = [path for path, told in ROUTES.items() if 413 in told.errors]
OFTEN_REFUSED = {"/v1/embeddings", "/v1/models/{name}", "/v1/memory/resize"}
N_EXAMPLES = 30
LIMITS = settings(
    max_examples=N_EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A short context: a request may ask for 128 answers as long as it."""
    path = write_script_model(tmp_path_factory.mktemp("openapi") / "m.gguf", context=160, n_layers=1)
    doors = ServerSettings(port=0, api_keys=(KEY,), admin_keys=(ADMIN,), max_body_bytes=1 << 20)
    with running(path, doors) as server:
        server.http.headers["Authorization"] = f"Bearer {ADMIN}"
        yield server


@pytest.fixture(scope="module")
def operations(server: Running) -> dict[str, Any]:
    description = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    description.config.update(base_url=server.url)
    return {result.ok().path: result.ok() for result in description.get_all_operations()}


def test_every_route_is_described(server: Running, operations: dict[str, Any]) -> None:
    assert set(operations) == set(ROUTES)


@pytest.mark.parametrize(
    ("path", "mode"),
    [(path, GenerationMode.POSITIVE) for path in ROUTES] + [(path, GenerationMode.NEGATIVE) for path in WITH_BODY],
)
def test_requests_from_the_description(server: Running, operations: dict[str, Any], path: str, mode: Any) -> None:
    """No status, body or header that is not described; nothing wrong accepted; no 5xx."""
    statuses: list[int] = []

    @LIMITS
    @given(case=operations[path].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(headers={"Authorization": f"Bearer {ADMIN}"})
        statuses.append(response.status_code)
        wants_time = isinstance(case.body, dict) and case.body.get("timeout") is not None
        got_little_time = response.status_code == 504 and wants_time  # as the client wished
        case.validate_response(response, checks=CHECKS if got_little_time else [not_a_server_error, *CHECKS])

    check()
    assert statuses and (mode is GenerationMode.NEGATIVE or path in OFTEN_REFUSED or 200 in statuses)
    server.wait_idle()
