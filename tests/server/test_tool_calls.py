"""Parsers of reasoning and tool calls: what they give, and that it does not depend on how the text is cut (H13)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.server.answer_parser import AnswerParser, Reasoning, ReasoningSplitter
from rimuru.server.tool_calls import CallArguments, CallStart, Content, ToolCallParser, ToolFormat, tool_format

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "flags": {"type": "array"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
Call = tuple[str, Any]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\"is}", "days": 3}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nSão\nPaulo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=flags>\n["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>'
)
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"  # noqa: E501
CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    ("hermes", "Hello there", "Hello there", []),
    ("hermes", HERMES, "", [("weather", {"city": 'Par"is}', "days": 3})]),
    ("hermes", f"I look.\n\n{HERMES}", "I look.", [("weather", {"city": 'Par"is}', "days": 3})]),
    (
        "hermes",
        f'{HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
        "",
        [("weather", {"city": 'Par"is}', "days": 3}), ("now", {})],
    ),
    ("hermes", '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "", [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
    ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("coder", CODER, "", [("weather", {"city": "São\nPaulo", "days": 3, "flags": ["a", {"b": None}]})]),
    ("coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    ("coder", "<tool_call>nothing</tool_call>!", "<tool_call>nothing</tool_call>!", []),
    ("glm", f"Let me see.{GLM}", "Let me see.", [("weather", {"city": "12", "days": 3})]),
    ("json", '{"name": "weather", "parameters": {"city": "x"}}', "", [("weather", {"city": "x"})]),
    (
        "json",
        '\n{"name": "now", "arguments": {}}; {"name": "now", "parameters": {"z": []}}',
        "",
        [("now", {}), ("now", {"z": []})],
    ),
    ("json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("json", '{"answer": [1, 2]} done', '{"answer": [1, 2]} done', []),
    ("json", "Text {\"name\": \"now\"}", "Text {\"name\": \"now\"}", []),
]  # fmt: skip


def run(parser: Any, pieces: list[str]) -> list[Any]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.finish()]


def read(parts: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls with their arguments' text); checks the order of a call's parts."""
    thought = "".join(p.text for p in parts if isinstance(p, Reasoning))
    content = "".join(p.text for p in parts if isinstance(p, Content))
    starts = [p for p in parts if isinstance(p, CallStart)]
    assert [s.index for s in starts] == list(range(len(starts))) and len({s.call_id for s in starts}) == len(starts)
    begun, arguments = -1, [""] * len(starts)
    for part in parts:
        if isinstance(part, CallStart):
            begun = part.index
        elif isinstance(part, CallArguments):
            assert part.index == begun and part.text
            arguments[begun] += part.text
    return thought, content, [(s.name, a) for s, a in zip(starts, arguments, strict=True)]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), CASES)
def test_calls_and_text(fmt: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    whole = read(run(ToolCallParser(fmt, TOOLS), [text]))
    assert whole[1].strip() == content and [(n, json.loads(a)) for n, a in whole[2]] == calls
    assert read(run(ToolCallParser(fmt, TOOLS), list(text))) == whole
    for seed in range(20):
        assert read(run(ToolCallParser(fmt, TOOLS), cut(text, random.Random(seed)))) == whole


def test_arguments_stream_before_the_call_ends() -> None:
    parser = ToolCallParser("hermes", TOOLS)
    parts = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "a long')
    assert isinstance(parts[0], CallStart) and parts[0].name == "weather"
    assert isinstance(parts[1], CallArguments) and parts[1].text == '{"city": "a long'


def test_only_one_call_where_calls_may_not_be_parallel() -> None:
    _, _, calls = read(run(ToolCallParser("hermes", TOOLS, parallel=False), [HERMES + HERMES]))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("text", "begun", "thought", "answer"),
    [
        ("plain", False, "", "plain"),
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n <think>a</think>b", False, "a", "b"),
        ("hm, <b>\n</think>\n\nyes</think>", True, "hm, <b>", "yes</think>"),
        ("<think></think>", False, "", ""),
        ("<think>cut off ", False, "cut off", ""),
        ("<thin", False, "", "<thin"),
        ("a<think>b</think>", False, "", "a<think>b</think>"),
    ],
)
def test_reasoning_is_split_off(text: str, begun: bool, thought: str, answer: str) -> None:
    def parse(pieces: list[str]) -> tuple[str, str, Any]:
        return read(run(AnswerParser(ReasoningSplitter(begun), None), pieces))

    assert parse([text])[:2] == (thought, answer)
    assert parse(list(text)) == parse([text])


def test_reasoning_before_a_call() -> None:
    parser = AnswerParser(ReasoningSplitter(False), ToolCallParser("hermes", TOOLS))
    thought, content, calls = read(run(parser, list(f"<think>need {{</think>\n{HERMES}")))
    assert (thought, content, len(calls), parser.n_calls) == ("need {", "", 1, 1)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["hermes", "coder", "glm", "json"]),
    st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', '"a": "}"', "}", "}}", "x", "\n", " ", "{",
            "<function=now>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
            "<arg_value>", "</arg_value>", '"', "<think>", "</think>", "é",
        ]),
        max_size=14,
    ),
)  # fmt: skip
def test_any_text_parses_alike_however_it_is_cut(fmt: ToolFormat, pieces: list[str]) -> None:
    def parser() -> AnswerParser:
        return AnswerParser(ReasoningSplitter(False), ToolCallParser(fmt, TOOLS))

    text = "".join(pieces)
    whole = read(run(parser(), [text]))
    assert read(run(parser(), pieces)) == whole
    assert read(run(parser(), list(text))) == whole


def test_formats_are_known_by_their_templates() -> None:
    assert tool_format("... <tool_call>\n{'name'") == "hermes"
    assert tool_format("<tool_call>\n<function=example>") == "coder"
    assert tool_format("<tool_call>{n}\n<arg_key>") == "glm"
    assert tool_format("plain") == "json"
