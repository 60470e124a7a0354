"""Tools, reasoning and structured answers through the API: what a model writes, and what a grammar makes it write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from script_model import ALPHABET, CHATML, HELLO, write_script_model
from server_fixtures import Running, running

TEMPLATE = CHATML + "{% if tools %}{# the model knows <think> and <tool_call> #}{% endif %}"
THOUGHT, CITY = "I need the\u00a0weather.", {"city": "São Paulo", "days": 3}
WORDS = [
    "<think>", "\nI need ", "the\u00a0weather.", "\n</think>", "\n\n", "Let me look.", "\n<tool_", "call>\n",
    '{"name": "weather", ', '"arguments": ', '{"city": "São', ' Paulo", ', '"days": 3}', "}\n</tool_call>",
    '\n<tool_call>{"name"', ': "now", "arguments": {}', "}</tool_", "call>",
]  # fmt: skip
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Compare if temp > 10 & humidity < 50",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "exact": {"type": "boolean"}},
                "required": ["unit", "exact"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that thinks, talks and calls two tools."""
    path = write_script_model(tmp_path_factory.mktemp("caller") / "caller.gguf", WORDS, TEMPLATE)
    with running(path) as server:
        yield server


def ask(server: Any, **options: Any) -> Any:
    options = {"messages": HELLO, "temperature": 0, "max_tokens": 200, **options}
    return server.client.chat.completions.create(model="m", **options)


def gather(chunks: Any) -> tuple[str, str, list[dict[str, Any]], str]:
    """(reasoning, content, calls, finish reason) of a stream; checks the order of deltas that H13 asks for."""
    reasoning, content, reason = "", "", None
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert (call.type, call.function.arguments) == ("function", "") and call.id
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[call.index]["arguments"] += call.function.arguments
        reason = choice.finish_reason or reason
    return reasoning, content, calls, str(reason)


def test_calls_whole_and_streamed_are_equal(caller: Running) -> None:
    whole = ask(caller, tools=TOOLS).choices[0]
    message = whole.message
    assert (message.reasoning_content, message.content.strip()) == (THOUGHT, "Let me look.")
    assert whole.finish_reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("weather", CITY),
        ("now", {}),
    ]
    reasoning, content, calls, reason = gather(ask(caller, tools=TOOLS, stream=True))
    assert (reasoning, content, reason) == (THOUGHT, message.content, "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    assert len({c["id"] for c in calls} | {c.id for c in message.tool_calls}) == 4


def test_without_tools_a_call_is_text(caller: Running) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = ask(caller, **options).choices[0].message
        assert message.tool_calls is None and message.content.count("<tool_call>") == 2
    assert ask(caller, extra_body={"reasoning_format": "none"}).choices[0].message.content.startswith("<think>")


def test_a_call_that_the_budget_cuts_off(caller: Running) -> None:
    choice = ask(caller, tools=TOOLS, max_tokens=11).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "São'


def test_one_call_where_parallel_calls_are_off(caller: Running) -> None:
    assert len(ask(caller, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


# ---- grammars
llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "unit": {"enum": ["A", "BC"]}, "n": {"const": 7}},
    "required": ["ok", "unit", "n"],
    "additionalProperties": False,
}


def in_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_a_schema_shapes_the_answer(script: Any) -> None:
    for seed in range(4):
        for stream in (False, True):
            answer = ask(script, response_format=in_schema(SCHEMA), temperature=3, seed=seed, stream=stream)
            text = gather(answer)[1] if stream else answer.choices[0].message.content
            value = json.loads(text)
            assert set(value) == {"ok", "unit", "n"} and isinstance(value["ok"], bool)
            assert value["unit"] in ("A", "BC") and value["n"] == 7
    answer = script.client.completions.create(
        model="m", prompt="0", temperature=0, max_tokens=99, extra_body={"response_format": in_schema({"const": [1]})}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("[1]", "stop")


def test_json_objects(script: Any) -> None:
    body = {"response_format": {"type": "json_object"}, "logit_bias": {script_id(script, "}"): 60}, "temperature": 0}
    assert json.loads(ask(script, **body).choices[0].message.content) == {}


def script_id(server: Any, text: str) -> str:
    return str(server.post("/tokenize", {"content": text}).json()["tokens"][0])


def test_constrained_and_free_answers_run_together(script: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(i: int) -> str:
        options = {"response_format": in_schema({"enum": ["XYZ", 12]})} if i % 2 else {}
        return str(ask(script, **options).choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    assert set(answers[::2]) == {ALPHABET} and all(json.loads(a) in ("XYZ", 12) for a in answers[1::2])


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A template without tools is told of them in words, and each byte is a token."""
    with running(write_script_model(tmp_path_factory.mktemp("roomy") / "roomy.gguf", context=2048)) as server:
        yield server


def test_tool_choice_makes_a_call(roomy: Running) -> None:
    for choice, names in (
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        for stream in (False, True):
            answer = ask(roomy, tools=TOOLS, tool_choice=choice, temperature=2, seed=3, stream=stream)
            if stream:
                _, content, calls, reason = gather(answer)
            else:
                content, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
                calls = [c.function.model_dump() for c in answer.choices[0].message.tool_calls]
            assert (content, reason, len(calls)) == ("", "tool_calls", 1)
            assert calls[0]["name"] in names
            arguments = json.loads(calls[0]["arguments"])
            assert calls[0]["name"] == "now" or (
                arguments["unit"] in ("celsius", "kelvin") and isinstance(arguments["exact"], bool)
            )


def test_reasoning_comes_before_the_grammar(caller: Running) -> None:
    """The model thinks as it likes; what follows is a call of the wanted tool with arguments of its schema."""
    answer = ask(caller, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    message = answer.choices[0].message
    assert message.reasoning_content == THOUGHT and not (message.content or "").strip()
    assert json.loads(message.tool_calls[0].function.arguments)["unit"] in ("celsius", "kelvin")


@pytest.mark.parametrize("schema", [{"type": "foo"}, {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "#/nowhere"}, 7, []])
def test_schemas_that_cannot_be_used(script: Any, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(script, response_format=in_schema(schema))
    assert caught.value.param == "response_format"


def test_a_deep_or_huge_schema_is_refused_quickly(script: Any) -> None:
    deep: Any = {"type": "string"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    huge = {"enum": ["x" * 1000 + str(i) for i in range(1000)]}
    for schema in (deep, huge):
        reply = script.post("/v1/chat/completions", {"messages": HELLO, "response_format": in_schema(schema)})
        assert reply.status_code == 400


class Forecast(pydantic.BaseModel):
    unit: Literal["celsius", "kelvin"]
    degrees: Literal[3, 30]
    is_certain: bool


def test_the_clients_own_helpers_read_answers(caller: Running) -> None:
    """openai's parse() makes the schema and reads the answer; its stream() puts calls together."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 200}
    parsed = caller.client.chat.completions.parse(response_format=Forecast, **asked).choices[0].message.parsed
    assert isinstance(parsed, Forecast) and parsed.degrees in (3, 30)
    asked |= {"parallel_tool_calls": False}
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS[:1]]
    with caller.client.chat.completions.stream(tools=strict, tool_choice="required", **asked) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "weather" and set(call.function.parsed_arguments) == {"unit", "exact"}
    assert "tool_calls.function.arguments.done" in kinds
