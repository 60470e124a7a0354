"""Reasoning and tool calls of every family through the API: as its model writes them, and as a grammar makes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from script_model import CHATML, HELLO, write_script_model
from server_fixtures import Running, running

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"enum": ["celsius", "kelvin"]},
                    "exact": {"type": "boolean"},
                    "deep": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "additionalProperties": False},
                },
                "required": ["unit", "exact"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
ARGUMENTS = {"unit": "kälvin", "exact": True}


@dataclass(frozen=True)
class Family:
    """marks: what its template says; words: the answer, one token each; control: which tokens are control tokens."""

    marks: str
    words: tuple[str, ...]
    control: tuple[str, ...] = ()
    reasoning: str = "hm, {"
    content: str = "Look."
    calls: tuple[tuple[str, Any], ...] = (("weather", ARGUMENTS), ("now", {}))


OPEN_THINK = ("<think>", "\nhm, ", "{\n", "</think>", "\n\nLook.")
CONTENT = ("Lo", "ok.")
FAMILIES = {
    "qwen3": Family(
        "<think> <tool_call>",
        (*OPEN_THINK, "\n<tool_call>\n", '{"name": "weather", "arg', 'uments": {"unit": "käl',
         'vin", "exact": true}}\n', "</tool_call>", "\n<tool_call>", '{"name": "now", ', '"arguments": {}}',
         "</tool_call> "),
    ),
    "qwen3-coder": Family(
        "<tool_call><function=example><parameter=x>",
        (*CONTENT, "\n<tool_call>\n<func", "tion=weather>\n<parameter=unit>\nkäl", "vin\n</para", "meter>\n",
         "<parameter=exact>\ntrue\n", "</parameter>\n</function>\n", "</tool_call>", "\n<tool_call>\n",
         "<function=now>\n</function>", "\n</tool_call>"),
        reasoning="",
    ),
    "glm": Family(
        "<think></think> <tool_call>{name}\n<arg_key>",
        (*OPEN_THINK, "\n<tool_call>", "weather\n<arg_key>", "unit</arg_key>\n", "<arg_value>kälvin</arg_", "value>\n",
         "<arg_key>exact</arg_key>\n<arg_value>", "true", "</arg_value>\n</tool_call>", "<tool_call>now</tool_call>"),
    ),
    "minimax": Family(
        "<think> <minimax:tool_call>",
        (*OPEN_THINK, "\n<minimax:tool_call>\n", '<invoke name="wea', 'ther">\n<parameter name="unit">', "kälvin",
         '</parameter>\n<parameter name="exact">true', "</parameter>\n</invoke>\n", '<invoke name="now">\n',
         "</invoke>\n</minimax:tool_call>"),
    ),
    "deepseek-v3": Family(
        "<｜tool▁calls▁begin｜> ```json </think>",
        (*OPEN_THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>",
         "weather\n```json\n", '{"unit": "kälvin"', ', "exact": true}', "\n```<｜tool▁call▁end｜>",
         "\n<｜tool▁call▁begin｜>function",
         "<｜tool▁sep｜>now\n```json\n{}\n", "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ),
    "deepseek-v3.1": Family(
        "<｜tool▁calls▁begin｜> </think>",
        (*OPEN_THINK, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>weather", "<｜tool▁sep｜>", '{"unit": "kälvin"',
         ', "exact": true}', "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>", "{}",
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        control=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                 "<｜tool▁calls▁end｜>"),
    ),
    "kimi": Family(
        "<think></think> <|tool_calls_section_begin|>",
        (*OPEN_THINK, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.weather:0",
         "<|tool_call_argument_begin|>", '{"unit": "kälvin", "exact"', ": true}", "<|tool_call_end|>",
         "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}", "<|tool_call_end|>\n",
         "<|tool_calls_section_end|>"),
        control=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
                 "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "mistral": Family(
        "[TOOL_CALLS]",
        (*CONTENT, "[TOOL_CALLS]", ' [{"name": "weather", ', '"arguments": {"unit": "kälvin", ', '"exact": true}, "id"',
         ': "abcdefghi"}', ', {"name": "now", "arguments": {}}]'),
        control=("[TOOL_CALLS]",),
        reasoning="",
    ),
    "magistral": Family(
        "[TOOL_CALLS] [ARGS] [THINK][/THINK]",
        ("[THINK]", "hm, {", "[/THINK]", "Look.", "[TOOL_CALLS]", "weather", "[ARGS]", '{"unit": "kälvin", ',
         '"exact": true}', "[TOOL_CALLS]now[ARGS]{}"),
        control=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    ),
    "granite3": Family(
        "<|tool_call|> <think> <response>",
        ("<think>", "hm, {", "</think>", "<response>", "Look.", "</response>", "<|tool_call|>", '[{"name": "weather"',
         ', "arguments": {"unit": "kälvin", "exact": true}}', ', {"name": "now", "arguments": {}}]'),
        control=("<|tool_call|>",),
    ),
    "hunyuan": Family(
        "<think> <answer> <tool_calls>",
        ("<think>\n", "hm, {", "\n</think>\n", "<answer>\n", "Look.", '\n<tool_calls>[{"name": "weather"',
         ', "arguments": ', '{"unit": "kälvin", "exact": true}}', ', {"name": "now", "arguments": {}}',
         "]</tool_calls>", "\n</answer>"),
    ),
    "nemotron-h": Family(
        "<think></think> <TOOLCALL>",
        (*OPEN_THINK, '\n<TOOLCALL>[{"name": "weather"', ', "arguments": {"unit": "kälvin", ', '"exact": true}}',
         ', {"name": "now", "arguments": {}}', "]</TOOLCALL>"),
    ),
    "phi4": Family(
        "<|tool|> <|/tool|>",
        (*CONTENT, "<|tool_call|>", '[{"name": "weather", "arguments": ', '{"unit": "kälvin", "exact": true}},',
         ' {"name": "now", "arguments": {}}]', "<|/tool_call|>"),
        control=("<|tool_call|>", "<|/tool_call|>"),
        reasoning="",
    ),
    "lfm2": Family(
        "<|tool_call_start|>",
        (*CONTENT, "<|tool_call_start|>", "[weather(unit='käl", "vin', exact=True)", ", now()]", "<|tool_call_end|>"),
        control=("<|tool_call_start|>", "<|tool_call_end|>"),
        reasoning="",
    ),
    "llama3": Family(
        "<|python_tag|> tools",
        ("<|python_tag|>", '{"name": "weather", ', '"parameters": {"unit": "kälvin", "exact"', ": true}}"),
        control=("<|python_tag|>",),
        reasoning="", content="", calls=(("weather", ARGUMENTS),),
    ),
    "gpt-oss": Family(
        "<|channel|> <|message|> tools",
        ("<|channel|>", "analysis", "<|message|>", "hm, {", "<|end|>", "<|start|>", "assistant",
         "<|channel|>commentary", "<|message|>Look.<|end|>", "<|start|>assistant",
         "<|channel|>commentary to=functions.weather ", "<|constrain|>", "json<|message|>", '{"unit": "kälvin", ',
         '"exact": true}', "<|call|>"),
        control=("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
        calls=(("weather", ARGUMENTS),),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Family, Running]]:
    found = FAMILIES[request.param]
    path: Path = tmp_path_factory.mktemp("family") / "family.gguf"
    template = CHATML + "{{ closed }}{% if tools %}{# " + found.marks + " #}{% endif %}"
    write_script_model(path, found.words, template, control=found.control, n_layers=1)
    with running(path) as server:
        yield found, server


def ask(server: Running, **options: Any) -> Any:
    options = {"messages": HELLO, "temperature": 0, "max_tokens": 300, **options}
    return server.client.chat.completions.create(model="m", **options)


def streamed(chunks: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """(reasoning, content, calls, finish reason), with the order of deltas that H13 asks for."""
    reasoning, content, reason, calls = "", "", "", []
    for chunk in chunks:
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and (call.type, call.function.arguments) == ("function", "")
                calls.append([call.function.name, ""])
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return reasoning, content, [(name, arguments) for name, arguments in calls], reason


def whole(answer: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    choice = answer.choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert len({call.id for call in message.tool_calls or []}) == len(calls)
    return getattr(message, "reasoning_content", None) or "", message.content or "", calls, choice.finish_reason


def test_what_the_model_writes(family: tuple[Family, Running]) -> None:
    expected, server = family
    told = whole(ask(server, tools=TOOLS))
    reasoning, content, calls, reason = told
    assert (reasoning, content.strip(), reason) == (expected.reasoning, expected.content, "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(expected.calls)
    assert streamed(ask(server, tools=TOOLS, stream=True)) == told


def test_calls_are_text_without_tools(family: tuple[Family, Running]) -> None:
    expected, server = family
    reasoning, content, calls, reason = whole(ask(server))
    assert (reasoning, calls, reason) == (expected.reasoning, [], "stop")
    assert "weather" in content or expected.marks.startswith("<|channel|>")
    assert "kälvin" in content and expected.content in content


def test_a_grammar_makes_the_call(family: tuple[Family, Running]) -> None:
    """Sampled at a high temperature, so that nothing but the grammar could make it."""
    expected, server = family
    end = server.llm.tokenizer.token_id("<|end|>")
    for seed, choice in enumerate(("required", {"type": "function", "function": {"name": "weather"}})):
        options: dict[str, Any] = {
            "tools": TOOLS, "tool_choice": choice, "temperature": 2, "seed": seed, "parallel_tool_calls": False,
            "logit_bias": {} if end is None else {str(end): 50},
        }  # fmt: skip
        if end is None:  # thoughts have no end at this temperature: the prompt has ended them
            ended = "[/THINK]" if "[/THINK]" in expected.marks else "</think>"
            options["extra_body"] = {"chat_template_kwargs": {"closed": ended}}
        _, content, calls, reason = whole(ask(server, **options))
        assert (content.strip(), reason, len(calls)) == ("", "tool_calls", 1), (content, calls)
        arguments = json.loads(calls[0][1])
        if calls[0][0] == "weather":
            assert arguments["unit"] in ("celsius", "kelvin") and isinstance(arguments["exact"], bool)
        else:
            assert (calls[0][0], arguments, choice) == ("now", {}, "required")
