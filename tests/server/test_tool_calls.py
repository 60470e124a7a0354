"""Parsers of reasoning and tool calls: what they give, and that it does not depend on how the text is cut (H13)."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rimuru.server import tool_formats as formats
from rimuru.server.answer_parser import AnswerParser, ReasoningSplitter
from rimuru.server.answer_parts import CallArguments, CallStart, Content, Reasoning
from rimuru.server.harmony import HarmonyParser
from rimuru.server.tool_calls import CallCounter, ToolCallParser
from rimuru.server.tool_formats import ReasoningFormat, ToolFormat, json_types, reasoning_format, tool_format
from rimuru.server.tool_tags import typed

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
    (formats.HERMES, "Hello there", "Hello there", []),
    (formats.HERMES, HERMES, "", [("weather", {"city": 'Par"is}', "days": 3})]),
    (formats.HERMES, f"I look.\n\n{HERMES}", "I look.", [("weather", {"city": 'Par"is}', "days": 3})]),
    (formats.HERMES,
        f'{HERMES}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n',
        "",
        [("weather", {"city": 'Par"is}', "days": 3}), ("now", {})],
    ),
    (formats.HERMES, '<tool_call>{"arguments": {"days": 1}, "name": "weather"}</tool_call>', "",
     [("weather", {"days": 1})]),
    (formats.HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (formats.HERMES, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
    (formats.HERMES, "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    (formats.HERMES, "a < b <tool", "a < b <tool", []),
    (formats.HERMES, '<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})]),
    (formats.HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (formats.CODER, CODER, "", [("weather", {"city": "São\nPaulo", "days": 3, "flags": ["a", {"b": None}]})]),
    (formats.CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    (formats.CODER, "<tool_call>nothing</tool_call>!", "<tool_call>nothing</tool_call>!", []),
    (formats.GLM, f"Let me see.{GLM}", "Let me see.", [("weather", {"city": "12", "days": 3})]),
    (formats.BARE, '{"name": "weather", "parameters": {"city": "x"}}', "", [("weather", {"city": "x"})]),
    (formats.BARE,
        '\n{"name": "now", "arguments": {}}; {"name": "now", "parameters": {"z": []}}',
        "",
        [("now", {}), ("now", {"z": []})],
    ),
    (formats.BARE, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    (formats.BARE, '{"answer": [1, 2]} done', '{"answer": [1, 2]} done', []),
    (formats.BARE, "Text {\"name\": \"now\"}", "Text {\"name\": \"now\"}", []),
]  # fmt: skip
A = '{"city": "São}", "days": 3}'
BOTH: list[Call] = [("weather", {"city": "São}", "days": 3}), ("now", {})]
ONE = BOTH[:1]
MORE_CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (formats.HERMES, '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>\nok', "ok", [("now", {})]),
    (formats.HERMES, 'hey \n <tool_call>\n{"nome": 1}</tool_call>', 'hey \n <tool_call>\n{"nome": 1}</tool_call>', []),
    (formats.HERMES, '<tool_call>[{"name": "now", "arguments": {}}, {"x": 1}]</tool_call>', '{"x": 1}]</tool_call>',
     [("now", {})]),
    (formats.HERMES, '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>', "",
     [("now", {})]),
    (formats.HERMES, '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now"}</tool_call>', "", [("now", {})] * 2),
    (formats.HERMES, '<tool_call>{"name": "no such", "arguments": {}}</tool_call>', "", [("no such", {})]),
    (formats.CODER, "hi <function=weather>\n<parameter=city>\n\n</parameter>\n</function>", "hi",
     [("weather", {"city": ""})]),
    (formats.CODER, "call <function=foo> so", "call <function=foo> so", []),
    (formats.CODER, "<tool_call><function=weather><parameter=city> a\n\nb </parameter></function></tool_call>", "",
     [("weather", {"city": " a\n\nb "})]),
    (formats.CODER, "<tool_call><function=now></function><function=now></function></tool_call>", "", [("now", {})] * 2),
    (formats.GLM, "<tool_call>now</tool_call><tool_call>weather<arg_key>flags</arg_key><arg_value>[1]</arg_value>"
     "</tool_call>", "", [("now", {}), ("weather", {"flags": [1]})]),
    (formats.GLM, "<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>", []),
    (formats.MINIMAX, '\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">São}</parameter>\n'
     '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "", BOTH),
    (formats.MINIMAX, "<minimax:tool_call>no</minimax:tool_call>", "<minimax:tool_call>no</minimax:tool_call>", []),
    (formats.DEEPSEEK, f"x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "x", BOTH),
    (formats.DEEPSEEK, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{A}\n```"
     "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
     "<｜tool▁calls▁end｜>", "", BOTH),
    (formats.DEEPSEEK, "<｜tool▁calls▁begin｜>oops", "<｜tool▁calls▁begin｜>oops", []),
    (formats.DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", "",
     [("now", {})]),
    (formats.KIMI, f"ok <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     f"{A}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "ok", BOTH),
    (formats.MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}, "id": "abcdefghi"}}, '
     '{"arguments": {}, "name": "now"}]', "", BOTH),
    (formats.MISTRAL, f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]now[ARGS]{{}}", "", BOTH),
    (formats.MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{A}", "", ONE),
    (formats.MISTRAL, f"[TOOL_CALLS]weather{A}", "", ONE),
    (formats.MISTRAL, "the [TOOL_CALLS] mark", "the [TOOL_CALLS] mark", []),
    (formats.TOOL_CALLS_LIST, f'<tool_calls>[\n  {{"name": "weather", "arguments": {A}}},\n  {{"name": "now"}}\n]'
     "</tool_calls>", "", BOTH),
    (formats.NEMOTRON_LIST, f'<TOOLCALL>[{{"name": "weather", "arguments": {A}}}]</TOOLCALL>', "", ONE),
    (formats.GRANITE_LIST, f'<|tool_call|>[{{"name": "weather", "arguments": {A}}}]', "", ONE),
    (formats.GRANITE_LIST, "<|tool_call|>[]", "<|tool_call|>[]", []),
    (formats.PHI_LIST, f'functools[{{"name": "weather", "arguments": {A}}}]', "", ONE),
    (formats.PHI_LIST, f'<|tool_call|>{{"name": "weather", "arguments": {A}}}<|/tool_call|>', "", ONE),
    (formats.PHI_LIST, "import functools\n", "import functools", []),
    (formats.PYTHON, "<|tool_call_start|>[weather(city='São}', days=3), now()]<|tool_call_end|>Done", "Done", BOTH),
    (formats.PYTHON, '<|tool_call_start|>[weather("São}", 3)]<|tool_call_end|>', "", ONE),
    (formats.PYTHON, '<|tool_call_start|>[weather(flags=[true, None, {"a": -1.5}])]<|tool_call_end|>', "",
     [("weather", {"flags": [True, None, {"a": -1.5}]})]),
    (formats.PYTHON, f'<|tool_call_start|>[{{"name": "weather", "arguments": {A}}}]<|tool_call_end|>', "", ONE),
    *((formats.PYTHON, f"<|tool_call_start|>{body}<|tool_call_end|>", f"<|tool_call_start|>{body}<|tool_call_end|>", [])
      for body in ("[now(x=open('x'))]", "[now(**{})]", "[weather(1, 2, 3, 4)]", "[1, 2]", "[now(b'x')]",
                   "[now(", "x")),
    (formats.LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {A}}}', "", ONE),
    (formats.LLAMA, "<|python_tag|>print(1)", "print(1)", []),
    (formats.LLAMA, "<|python", "<|python", []),
    (formats.BARE, "[1] says", "[1] says", []),
    (formats.BARE, '[{"name": "now", "arguments": {}}]', "", [("now", {})]),
]  # fmt: skip
HARMONY_CASES: list[tuple[str, str, str, list[Call]]] = [
    ("<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
     "hm {", "Hello", []),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{A}<|call|>", "hm", "", ONE),
    ("<|channel|>commentary<|message|>Look.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
     f"<|message|>{A}", "", "Look.", ONE),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>", "a\n\nb",
     "", []),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", "", "", [("now", {})]),
    ("<|channel|>commentary to=python<|message|>1+1<|end|>", "", "1+1", []),
    ("plain <b>text", "", "plain <b>text", []),
    ("<|chan", "", "<|chan", []),
    ("<|channel|>no header\nat all", "", "<|channel|>no header\nat all", []),
    ("<|channel|>final<|message|>cut <|e", "", "cut <|e", []),
    ("<|channel|>anal", "", "", []),
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


@pytest.mark.parametrize(("fmt", "text", "content", "calls"), CASES + MORE_CASES)
def test_calls_and_text(fmt: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    whole = read(run(ToolCallParser(fmt, TOOLS), [text]))
    assert whole[1].strip() == content and [(n, json.loads(a)) for n, a in whole[2]] == calls
    assert read(run(ToolCallParser(fmt, TOOLS), list(text))) == whole
    for seed in range(20):
        assert read(run(ToolCallParser(fmt, TOOLS), cut(text, random.Random(seed)))) == whole


@pytest.mark.parametrize(("text", "thought", "content", "calls"), HARMONY_CASES)
@pytest.mark.parametrize("keeps", [False, True])
def test_channels(keeps: bool, text: str, thought: str, content: str, calls: list[Call]) -> None:
    def parse(pieces: list[str]) -> tuple[str, str, Any]:
        return read(run(HarmonyParser(CallCounter(TOOLS, True), keeps), pieces))

    whole = parse([text])
    assert [(n, json.loads(a)) for n, a in whole[2]] == calls
    if keeps and thought:
        assert whole[0] == "" and "<|channel|>analysis<|message|>" in whole[1] and content in whole[1]
    else:
        assert whole[:2] == (thought, content)
    assert parse(list(text)) == whole
    for seed in range(20):
        assert parse(cut(text, random.Random(seed))) == whole


def test_no_call_on_a_channel_without_tools() -> None:
    text = '<|channel|>commentary to=functions.now<|message|>{"a": 1}<|call|>'
    assert read(run(HarmonyParser(None), [text])) == ("", '{"a": 1}', [])


def test_ids_as_each_family_wants_them() -> None:
    kimi = (
        "<|tool_calls_section_begin|>"
        + "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2
    )
    starts = [p for p in run(ToolCallParser(formats.KIMI, TOOLS), [kimi]) if isinstance(p, CallStart)]
    assert starts[0].call_id == "functions.now:7" and starts[1].call_id.startswith("call_")
    mistral = [
        p for p in run(ToolCallParser(formats.MISTRAL, TOOLS), ["[TOOL_CALLS]now{}" * 2]) if isinstance(p, CallStart)
    ]
    assert (
        all(len(p.call_id) == 9 and p.call_id.isalnum() for p in mistral) and mistral[0].call_id != mistral[1].call_id
    )


def test_long_texts_between_tags_stream() -> None:
    parser = ToolCallParser(formats.CODER, TOOLS)
    parts = parser.push('<tool_call>\n<function=weather>\n<parameter=city>\nline "one"\nline tw')
    assert read(parts)[2] == [("weather", '{"city": "line \\"one\\"\\nline tw')]


def test_an_argument_that_breaks_off_stays_open() -> None:
    for text in ("<parameter=city>\nPar", "<parameter=days>\n1"):
        arguments = read(run(ToolCallParser(formats.CODER, TOOLS), ["<tool_call><function=weather>" + text]))[2][0][1]
        assert not arguments.endswith("}")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", [], 12), ("12", ["string"], "12"), ("null", ["string", "null"], None), ("null", ["string"], "null"),
        ("True", ["boolean"], True), ("None", ["integer"], None), ("None", [], "None"), (" x ", [], " x "),
        ('{"a": [1]}', ["object"], {"a": [1]}), ("1.5e3", ["number"], 1500.0), ("x", ["integer"], "x"),
    ],
)  # fmt: skip
def test_values_between_tags(text: str, types: list[str], value: Any) -> None:
    assert typed(text, frozenset(types)) == value


def test_types_of_schemas() -> None:
    assert json_types({"type": ["string", "null"]}) == {"string", "null"}
    assert json_types({"anyOf": [{"type": "integer"}, {"const": True}]}) == {"integer", "boolean"}
    assert json_types({"enum": ["a", 1, None, 0.5]}) == {"string", "integer", "null", "number"}
    assert json_types({"anyOf": [{"type": "integer"}, {}]}) == json_types(3) == json_types({}) == frozenset()


def test_arguments_stream_before_the_call_ends() -> None:
    parser = ToolCallParser(formats.HERMES, TOOLS)
    parts = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "a long')
    assert isinstance(parts[0], CallStart) and parts[0].name == "weather"
    assert isinstance(parts[1], CallArguments) and parts[1].text == '{"city": "a long'


def test_only_one_call_where_calls_may_not_be_parallel() -> None:
    _, _, calls = read(run(ToolCallParser(formats.HERMES, TOOLS, parallel=False), [HERMES + HERMES]))
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
        ("<think>a</think>\n<answer>\nb <c>\n</answer>", False, "a", "b <c>"),
        ("<answer>b</answer>", False, "", "b"),
        ("<think>a</think><answ", False, "a", "<answ"),
        ("<think>a</think><answer>b</ans", False, "a", "b"),
        ("hm<MARK>b", True, "hm", "<MARK>b"),
    ],
)
def test_reasoning_is_split_off(text: str, begun: bool, thought: str, answer: str) -> None:
    def parse(pieces: list[str]) -> tuple[str, str, Any]:
        fmt = ReasoningFormat(wraps=(("<answer>", "</answer>"),))
        return read(run(AnswerParser(ReasoningSplitter(begun, fmt, ("<MARK>",)), None), pieces))

    assert parse([text])[:2] == (thought, answer)
    assert parse(list(text)) == parse([text])


def test_reasoning_before_a_call() -> None:
    parser = AnswerParser(ReasoningSplitter(False), ToolCallParser(formats.HERMES, TOOLS))
    thought, content, calls = read(run(parser, list(f"<think>need {{</think>\n{HERMES}")))
    assert (thought, content, len(calls), parser.n_calls) == ("need {", "", 1, 1)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([f for f in vars(formats).values() if isinstance(f, ToolFormat)]),
    st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {', '"a": "}"', "}", "}}", "x", "\n", " ", "{",
            "<function=now>", "<parameter=city>", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
            "<arg_value>", "</arg_value>", '"', "<think>", "</think>", "é", "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>", "now<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "{}",
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.now:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>", "[TOOL_CALLS]", "now[ARGS]", "[", "]", ", ", '{"name": "now"}', "<tool_calls>",
            "</tool_calls>", "<|tool_call|>", "<|/tool_call|>", "<|tool_call_start|>[", "now()", "]<|tool_call_end|>",
            "'", "<|python_tag|>", "<minimax:tool_call>", '<invoke name="now">', '<parameter name="a">', "</invoke>",
            "</minimax:tool_call>", "<|channel|>analysis", "<|channel|>commentary to=functions.now", "<|message|>",
            "<|end|>", "<|start|>assistant", "<|call|>", "<answer>", "</answer>",
        ]),
        max_size=16,
    ),
)  # fmt: skip
def test_any_text_parses_alike_however_it_is_cut(fmt: ToolFormat, pieces: list[str]) -> None:
    def parser() -> Any:
        if fmt is formats.HARMONY:
            return HarmonyParser(CallCounter(TOOLS, True))
        reasoning = ReasoningSplitter(False, ReasoningFormat(wraps=(("<answer>", "</answer>"),)), fmt.opens[:1])
        return AnswerParser(reasoning, ToolCallParser(fmt, TOOLS))

    text = "".join(pieces)
    whole = read(run(parser(), [text]))
    assert read(run(parser(), pieces)) == whole
    assert read(run(parser(), list(text))) == whole


def test_formats_are_known_by_their_templates() -> None:
    for text, fmt in (
        ("... <tool_call>\n{'name'", formats.HERMES),
        ("<tool_call>\n<function=example>\n<parameter=a>", formats.CODER),
        ("<tool_call>{n}\n<arg_key>", formats.GLM),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>", formats.DEEPSEEK),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>\n```json", formats.DEEPSEEK_FENCED),
        ("[TOOL_CALLS] [", formats.MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", formats.MISTRAL_NAMED),
        ("<|tool|><|/tool|>", formats.PHI_LIST),
        ("respond with <|tool_call|> followed by", formats.GRANITE_LIST),
        ("<|start|><|channel|><|message|>", formats.HARMONY),
        ("plain", formats.BARE),
    ):
        assert tool_format(text) is fmt
    assert tool_format("{{ tools }}", lambda text: text == "[TOOL_CALLS]") is formats.MISTRAL
    assert tool_format("plain", lambda text: True) is formats.BARE
    assert tool_format("<tool_call>", lambda text: True) is formats.HERMES


def test_reasoning_marks_are_known_by_templates() -> None:
    assert reasoning_format("plain") is None
    assert reasoning_format("{% if x %}</think>") == ReasoningFormat()
    assert reasoning_format("[THINK]") == ReasoningFormat("[THINK]", "[/THINK]")
    assert reasoning_format("<think> <answer>") == ReasoningFormat(wraps=(("<answer>", "</answer>"),))
