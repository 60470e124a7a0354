"""Schemas, and values nested deeply, that were answered with success, changed numbers or an internal error (H11)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from script_model import HELLO, write_script_model
from server_fixtures import Running, running

pytest.importorskip("llguidance")

SELF = {"$ref": "#"}
BEYOND = 9007199254740993


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(write_script_model(tmp_path_factory.mktemp("roomy") / "roomy.gguf", context=2048)) as server:
        yield server


def ask(server: Running, schema: Any, **options: Any) -> httpx.Response:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 50, "response_format": wanted, **options}
    # Escaped: a client may send half a surrogate pair.
    return server.http.post("/v1/chat/completions", content=json.dumps(body))


def refusal(reply: httpx.Response, param: str | None) -> str:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and "\n" not in error["message"]
    return str(error["message"])


def call(server: Running, parameters: Any, **options: Any) -> httpx.Response:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "max_tokens": 50, **options}
    return server.post("/v1/chat/completions", body)


# ---- grammars that fail
@pytest.mark.parametrize(
    "schema",
    [
        SELF,
        {"type": "object", "properties": {"a": SELF}, "required": ["a"]},
        {"type": "object", "additionalProperties": SELF, "required": ["a"]},
        {"type": "array", "items": SELF, "minItems": 1},
        {"anyOf": [SELF]},
        {"allOf": [SELF]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_endless_references_are_refused(roomy: Running, schema: Any, stream: bool) -> None:
    assert "$ref" in refusal(ask(roomy, schema, stream=stream), "response_format")
    assert "$ref" in refusal(call(roomy, schema, stream=stream), "tools")


def test_references_that_may_end_are_followed(roomy: Running) -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
    node = {**tree, "required": ["next"], "additionalProperties": False}
    reply = ask(roomy, {"$ref": "#/$defs/n", "$defs": {"n": node}}, logit_bias=_bias(roomy, "n"))
    assert json.loads(reply.json()["choices"][0]["message"]["content"]) == {"next": None}


def _bias(server: Running, text: str) -> dict[str, int]:
    return {str(server.post("/tokenize", {"content": text}).json()["tokens"][0]): 60}


def _many(n: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"k{i}": {"type": "string"} for i in range(n)},
        "additionalProperties": False,
    }


def test_many_optional_properties(roomy: Running) -> None:
    for n in (520, 3000):
        reply = ask(roomy, _many(n), logit_bias=_bias(roomy, "}"))
        assert reply.status_code == 200 and json.loads(reply.json()["choices"][0]["message"]["content"]) == {}


@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "^(((a{1000}){1000}){1000})$"}, _many(7000)], ids=["pattern", "many"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_too_much_for_the_library(roomy: Running, schema: Any, stream: bool) -> None:
    refusal(ask(roomy, schema, stream=stream), "response_format")


class Breaks:
    """A matcher that fails after some tokens."""

    def __init__(self, matcher: Any, n_left: int) -> None:
        self.matcher, self.n_left = matcher, n_left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def consume_token(self, token_id: int) -> bool:
        self.n_left -= 1
        return bool(self.matcher.consume_token(token_id))

    def is_error(self) -> bool:
        return self.n_left <= 0 or bool(self.matcher.is_error())

    def get_error(self) -> str:
        return "the lexer became too large\n<state>"


def test_a_grammar_that_fails_in_the_answer(roomy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, whole or as the last event of a stream; counted as failed; nothing is left behind."""
    from rimuru.server.grammar import GrammarCompiler

    whole = GrammarCompiler._compile

    def compiled(self: GrammarCompiler, lark: str, param: str) -> Any:
        make = whole(self, lark, param)

        def new() -> Any:
            constraint = make()
            constraint._matcher = Breaks(constraint._matcher, 3)  # type: ignore[attr-defined]
            return constraint

        return new

    monkeypatch.setattr(GrammarCompiler, "_compile", compiled)
    n_failed, schema = roomy.loop.counters.n_jobs_failed, {"const": "ABCDEFGH"}
    assert "the lexer became too large" in refusal(ask(roomy, schema), "response_format")
    reply = ask(roomy, schema, stream=True)
    assert reply.status_code == 200 and '"finish_reason":"stop"' not in reply.text and "[DONE]" not in reply.text
    error = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")
    refusal(call(roomy, {"type": "object"}), "tools")
    assert roomy.loop.counters.n_jobs_failed == n_failed + 3
    roomy.wait_idle()


# ---- numbers
@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"enum": [1, BEYOND]}, "enum[1]"),
        ({"const": 18446744073709551617}, "const"),
        ({"const": -9223372036854775808}, "const"),
        ({"const": {"minimum": [BEYOND]}}, "const.minimum[0]"),
        ({"type": "integer", "minimum": BEYOND, "maximum": BEYOND}, "minimum"),
        ({"type": "integer", "minimum": 10**300}, "minimum"),
        ({"type": "number", "maximum": 1e300}, "maximum"),
        ({"type": "number", "minimum": 1e-30, "maximum": 1e-30}, "minimum"),
        ({"type": "object", "properties": {"n": {"exclusiveMaximum": -BEYOND}}}, "properties.n.exclusiveMaximum"),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"anyOf": [{"const": BEYOND}]}}}, "$defs.d.anyOf[0].const"),
        ({"type": "string", "maxLength": 2**63 - 1}, "maxLength"),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(roomy: Running, schema: Any, where: str) -> None:
    message = refusal(ask(roomy, schema), "response_format")
    assert f" {where} is " in message or (where == "minimum" and " maximum is " in message)
    assert "kept exactly" in refusal(call(roomy, {"type": "object", "properties": {"p": schema}}), "tools")


def test_numbers_that_can_be_kept(roomy: Running) -> None:
    for number in (2**53, -(2**53), 2**53 - 1, 0.1, -1.5e-7):
        reply = ask(roomy, {"const": number, "default": BEYOND, "examples": [BEYOND]})
        assert json.loads(reply.json()["choices"][0]["message"]["content"]) == number


# ---- nesting
def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [400, 500, 700, 900, 5000])
def test_values_nested_deeply_are_no_internal_error(roomy: Running, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    arguments = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "@"}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"const": "@"}}}
    bodies = (
        {"messages": [{**HELLO[0], "x": "@"}]},
        {"messages": [*HELLO, arguments]},
        {"messages": HELLO, "chat_template_kwargs": {"x": "@"}},
        {"messages": HELLO, "documents": [{"x": "@"}]},
        {"messages": HELLO, "tools": [tool]},
        {"messages": HELLO, "tools": [tool], "tool_choice": "required"},
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "@"}}}},
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": "@"}}}},
    )
    for body in bodies:
        content = json.dumps({"max_tokens": 1, **body}).replace('"@"', deep)
        reply = roomy.http.post("/v1/chat/completions", content=content)
        assert reply.status_code in (200, 400), reply.text
        assert depth < 5000 or reply.status_code == 400
    # Arguments as their text, which is how clients send them.
    as_text = json.dumps({"max_tokens": 1, "messages": [*HELLO, arguments]}).replace('"@"', f'"{deep}"')
    assert roomy.http.post("/v1/chat/completions", content=as_text).status_code in (200, 400)


def test_an_internal_error_counts_as_failed(roomy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    n_failed = roomy.loop.counters.n_jobs_failed
    monkeypatch.setattr(roomy.app.state.service.preparer, "render", fails)
    logging.getLogger("uvicorn.error").disabled = True
    try:
        # On a connection of its own: the server closes it after such an error.
        assert httpx.post(f"{roomy.url}/v1/chat/completions", json={"messages": HELLO}).status_code == 500
    finally:
        logging.getLogger("uvicorn.error").disabled = False
    roomy.wait_until(lambda: roomy.loop.counters.n_jobs_failed == n_failed + 1)
    assert f"({n_failed + 1} failed" in roomy.loop.counters.line()


# ---- messages
def test_what_is_wrong_is_named(roomy: Running) -> None:
    def told(param: str, **options: Any) -> str:
        return refusal(roomy.post("/v1/chat/completions", {"messages": HELLO, **options}), param)

    assert told("stop", stop=["a"] * 200) == "stop: at most 32 texts may be given, not 200"
    assert told("stop", stop=[[]]) == told("stop", stop=5) == "stop: expected a text or a list of texts"
    assert "'none'" in (choice := told("tool_choice", tool_choice=5)) and "dictionary" in choice
    memory = refusal(roomy.post("/v1/memory/resize", {"memory": 1.5}), "memory")
    assert "string" in memory and "integer" in memory

    def pattern(text: str) -> str:
        return refusal(ask(roomy, {"type": "string", "pattern": text}), "response_format")

    assert "'(a'" in pattern("(a") and pattern("(a").endswith("unclosed group")
    assert "look-around" in pattern("a(?=b)")
    assert "'unclosed'" not in pattern("a\n(b") and pattern("a\n(b").endswith("unclosed group")
    for schema in ({"const": "\ud800"}, {"properties": {"\ud800": {}}}, {"pattern": "a\ud800"}):
        assert "half of a surrogate pair (\\ud800)" in refusal(ask(roomy, schema), "response_format")
    assert ask(roomy, {"const": "\U0001f600"}).status_code == 200
