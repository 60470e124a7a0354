"""A name of a foreign page's own that is pointed at this machine (DNS rebinding) opens no server on loopback."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fixtures import Running, running

from rimuru.base.errors import BadInputError
from rimuru.server.settings import ServerSettings, host_name

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
OWN = ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:8080"]
FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]
BROKEN = ["", "[::1", "::1", "evil@localhost", "localhost@evil.example", "localhost/evil", "localhost:evil", "a b"]


def ask(server: Running, host: str, method: str = "GET", path: str = "/v1/memory", **more: Any) -> httpx.Response:
    return server.http.request(method, path, headers={"Host": host, **more.pop("headers", {})}, **more)


def assert_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 403, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("permission_error", "host_not_allowed", None)
    assert "--allowed-host" in error["message"] and "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("host", OWN)
def test_local_names_are_answered(script: Running, host: str) -> None:
    assert ask(script, host).json()["total_bytes"] > 0
    same = {"Origin": f"http://{host.lower()}"}
    assert ask(script, host, "POST", "/v1/chat/completions", json=CHAT, headers=same).status_code == 200


@pytest.mark.parametrize("host", FOREIGN + BROKEN)
def test_other_names_are_refused(script: Running, host: str) -> None:
    """Also with the Origin that a page of this name has, and without any, as browsers send for GET."""
    assert_refused(ask(script, host))
    for origin in ({"Origin": f"http://{host}"}, {"Origin": f"http://{host}", "Content-Type": "text/plain"}):
        assert_refused(ask(script, host, "POST", "/v1/chat/completions", json=CHAT, headers=origin))
    for path in ("/", "/health", "/metrics", "/v1/dashboard", "/openapi.json", "/nothing"):
        assert_refused(ask(script, host, path=path))
    asked = {"Origin": f"http://{host}", "Access-Control-Request-Method": "POST"}
    assert_refused(ask(script, host, "OPTIONS", "/v1/chat/completions", headers=asked))
    assert ask(script, host, "HEAD").status_code == 403


def test_a_request_without_a_name_is_refused(script: Running) -> None:
    host, port = script.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /v1/memory HTTP/1.0\r\n\r\n")
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.startswith(b"HTTP/1.1 403 ") and b"host_not_allowed" in data


def test_names_can_be_added(script_file: Path) -> None:
    """A reverse proxy hands on the name by which it was called; the page it serves has that origin."""
    settings = ServerSettings(port=0, allowed_hosts=("Chat.Example.org", "[fd00::1]"))
    with running(script_file, settings) as server:
        for host in ("chat.example.org", "CHAT.example.org:443", "[fd00::1]:80", "127.0.0.1"):
            same = {"Origin": f"https://{host.lower()}"}
            assert ask(server, host.lower(), headers=same).status_code == 200
            assert ask(server, host).status_code == 200
        for host in ("example.org", "x.chat.example.org", "chat.example.org.", "[fd00::2]"):
            assert_refused(ask(server, host))
        assert ask(server, "chat.example.org", headers={"Origin": "https://evil.example"}).status_code == 403


def test_an_allowed_page_still_needs_a_local_name(script_file: Path) -> None:
    """What --cors-origin allows is who may ask, not what the server is called."""
    with running(script_file, ServerSettings(port=0, cors_origins=("*",), api_keys=("k",))) as server:
        key = {"Authorization": "Bearer k", "Origin": "http://evil.example"}
        assert ask(server, "localhost", headers=key).status_code == 200
        assert_refused(ask(server, "evil.example", headers=key))


def test_a_server_of_the_network_is_called_as_people_like(script_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerSettings(port=0, host="0.0.0.0", allowed_hosts=("my.name",))
    with running(script_file, settings) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        for host in ("box.lan", "10.0.0.1:8080", "my.name"):
            assert httpx.get(f"{url}/v1/memory", headers={"Host": host}).status_code == 200
    assert [r for r in caplog.records if "--allowed-host does nothing" in r.getMessage()]


@pytest.mark.parametrize(
    ("host", "address", "names"),
    [
        ("127.0.0.1", "127.0.0.1", set()),
        ("127.0.0.2", "127.0.0.2", {"127.0.0.2"}),
        ("My-Box", "127.0.1.1", {"my-box", "127.0.1.1"}),
        ("::1", "::1", set()),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", {"[::ffff:127.0.0.1]"}),
    ],
)
def test_the_bound_name_is_its_own(host: str, address: str, names: set[str]) -> None:
    assert ServerSettings(host=host).hosts_at(address) == {"localhost", "127.0.0.1", "[::1]"} | names


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_addresses_that_others_reach_have_any_name(address: str) -> None:
    assert ServerSettings(allowed_hosts=("my.name",)).hosts_at(address) is None


@pytest.mark.parametrize("name", ["", "*", "http://my.name", "my.name/path", "::1", "a b", "bücher.example"])
def test_names_that_are_none_are_told(name: str) -> None:
    with pytest.raises(BadInputError, match="an allowed host is a name"):
        ServerSettings(allowed_hosts=(name,))


def test_the_port_is_no_part_of_the_name() -> None:
    assert [host_name(text) for text in ("My.Name:80", "[::1]:", "a_b-c.d")] == ["my.name", "[::1]", "a_b-c.d"]
