"""A call as a template shows it in the history, as the grammar makes it, and as it is read again: the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family_templates import FAMILY_TEMPLATES, FamilyTemplate
from script_model import write_script_model

from rimuru.server.answer_parts import CallArguments, CallStart
from rimuru.server.grammar import GrammarCompiler, ReasoningState
from rimuru.server.harmony import HarmonyParser
from rimuru.server.tool_calls import CallCounter, ToolCallParser
from rimuru.server.tool_formats import HARMONY, ReasoningFormat, tool_format
from rimuru.text.arguments import JsonArguments
from rimuru.text.call_texts import write_calls
from rimuru.text.chat_template import ChatTemplate
from rimuru.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
ARGUMENTS = {"city": 'São "x"', "unit": "kelvin", "exact": True, "deep": {"n": [1, 2.5]}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["celsius", "kelvin"]},
                    "exact": {"type": "boolean"},
                    "deep": {"type": "object", "properties": {"n": {"type": "array"}}},
                },
                "required": ["city", "exact"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(params=sorted(FAMILY_TEMPLATES))
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FamilyTemplate, Tokenizer]:
    found = FAMILY_TEMPLATES[request.param]
    path = write_script_model(tmp_path / "m.gguf", (), found.source, control=found.control, n_layers=1)
    return found, Tokenizer.from_gguf(path)


def history(calls: list[tuple[str, Any]], content: str | None = None) -> list[dict[str, Any]]:
    made = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(a, ensure_ascii=False)},
        }
        for i, (name, a) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "3"} for i in range(len(calls))]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": made}, *results]


@pytest.mark.parametrize("content", [None, ""])
def test_history_grammar_and_parser_agree(family: tuple[FamilyTemplate, Tokenizer], content: str | None) -> None:
    template, tokenizer = family
    calls = [("weather", ARGUMENTS), ("now", {})][: 2 if template.parallel else 1]
    shown = ChatTemplate(tokenizer).render(history(calls, content), TOOLS).text
    text = shown.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    fmt = tool_format(template.source)

    parser: Any = HarmonyParser(CallCounter(TOOLS, True)) if fmt is HARMONY else ToolCallParser(fmt, TOOLS)
    parts = [*parser.push(text), *parser.finish()]
    names = [p.name for p in parts if isinstance(p, CallStart)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    assert list(zip(names, map(json.loads, arguments), strict=True)) == calls
    assert all(isinstance(p, (CallStart, CallArguments)) for p in parts)

    grammar = GrammarCompiler(tokenizer, tokenizer.n_vocab).tool_call(TOOLS, fmt, ReasoningState(), True)()
    for token_id in tokenizer.encode(text, special=True):
        allowed = grammar.allowed()
        assert allowed is not None and allowed[token_id], (text, tokenizer.token_text(token_id))
        grammar.advance(token_id)
    allowed = grammar.allowed()
    assert allowed is not None and allowed[tokenizer.eos_id]


@pytest.mark.parametrize("control", [False, True])
def test_reasoning_stands_before_a_call(tmp_path: Path, control: bool) -> None:
    marks = ("<think>", "</think>")
    path = write_script_model(tmp_path / "m.gguf", marks, control=marks if control else ())
    tokenizer = Tokenizer.from_gguf(path)
    compiler = GrammarCompiler(tokenizer, tokenizer.n_vocab)
    fmt = tool_format("<tool_call>")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for begun, text in ((True, f"a < b</think>\n\n{call}"), (False, f"<think>x\n</think>{call}"), (False, call)):
        for make in (
            compiler.tool_call(TOOLS, fmt, ReasoningState(ReasoningFormat(), begun), False),
            compiler.tool_call(TOOLS[1:], fmt, ReasoningState(ReasoningFormat(), begun), True),
        ):
            grammar = make()
            for token_id in tokenizer.encode(text, special=True):
                allowed = grammar.allowed()
                assert allowed is not None and allowed[token_id], (text, tokenizer.token_text(token_id))
                grammar.advance(token_id)
            assert grammar.error is None


@pytest.mark.parametrize(
    "source",
    [
        "<｜tool▁calls▁begin｜> ```json", "<｜tool▁calls▁begin｜>", "[TOOL_CALLS]", "<|tool_call_start|>", "<TOOLCALL>",
        "<tool_calls>", "<tool_call>", "<|/tool|>", "<|tool_call|>", "no mark",
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_vocabulary", [False, True])
def test_written_calls_are_read_again(source: str, in_vocabulary: bool) -> None:
    """Calls that the engine writes for a template (text/call_texts.py) have the form that the parser expects."""
    fitting = {"<|/tool|>": "<|/tool_call|>"}.get(source, source)
    given, tokens = ("tools", {fitting}) if in_vocabulary else (f"tools {source}", set())
    calls: list[tuple[str, Any]] = [("weather", {**ARGUMENTS, "none": None}), ("now", {})]
    text = write_calls([(name, JsonArguments(values)) for name, values in calls], given, tokens.__contains__)
    parser = ToolCallParser(tool_format(given, tokens.__contains__), TOOLS)
    parts = [part for character in text for part in parser.push(character)] + parser.finish()
    assert [p.name for p in parts if isinstance(p, CallStart)] == [name for name, _ in calls], text
    arguments = ["", ""]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text
    assert [json.loads(a) for a in arguments] == [values for _, values in calls]
    assert all(isinstance(p, (CallStart, CallArguments)) for p in parts)
