"""How families of models write tool calls, found by their chat template or, where that is silent, by their tokens.

    hermes    <tool_call>{"name": N, "arguments": {..}}</tool_call>     Qwen, Granite 4, Ling, ERNIE 4.5, ...
    coder     <tool_call><function=N><parameter=K>V</parameter></function></tool_call>   Qwen3-Coder, 3.5, Nemotron 3
    glm       <tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>       GLM-4.5 and later
    minimax   <minimax:tool_call><invoke name="N"><parameter name="K">V</parameter></invoke></minimax:tool_call>
    deepseek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>N<｜tool▁sep｜>{..}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
              (V3 and R1: "function", the separator, N, {..} in a JSON fence)
    kimi      <|tool_calls_section_begin|><|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>{..}...
    mistral   [TOOL_CALLS][{"name": N, "arguments": {..}}], later [TOOL_CALLS]N[ARGS]{..}
    list      [{"name": N, "arguments": {..}}] after a mark: Granite 3, Phi-4, Jamba, Hunyuan, Nemotron-H
    python    <|tool_call_start|>[N(K=V)]<|tool_call_end|>              LFM2
    harmony   <|channel|>commentary to=functions.N <|constrain|>json<|message|>{..}<|call|>        gpt-oss
    json      the answer is the object itself, {"name": N, "parameters": {..}}                     Llama 3, all others

Between marks, the name of an unknown tool is a call like any other, as with OpenAI: the client decides. A bare object
counts as a call only if it names a tool of the request. What is no call, or breaks off before its name, is text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rimuru.text.plain_tools import knows_tools

Kind = Literal["json", "tagged", "headed", "mistral", "python", "harmony"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    opens      marks that begin a block of calls, the one that the grammar writes first; none: a bare object is a call
    close      mark that ends a block; models may leave it out
    call_open, call_close  marks around each call of a block ("" where there are none)
    strays     marks that mean nothing by themselves and are dropped
    ids        random, nine characters (Mistral), or the model's own (Kimi)
    ends_reasoning  the opening mark ends reasoning that was not closed: it cannot be ordinary text
    """

    name: str
    kind: Kind
    opens: tuple[str, ...]
    close: str = ""
    call_open: str = ""
    call_close: str = ""
    strays: tuple[str, ...] = ()
    ids: Literal["random", "nine", "own"] = "random"
    ends_reasoning: bool = False
    variant: str = ""


HERMES = ToolFormat("hermes", "json", ("<tool_call>",), "</tool_call>")
CODER = ToolFormat("coder", "tagged", ("<tool_call>",), "</tool_call>", "<function=", "</function>")
GLM = ToolFormat("glm", "tagged", ("<tool_call>",), "</tool_call>")
MINIMAX = ToolFormat(
    "minimax", "tagged", ("<minimax:tool_call>",), "</minimax:tool_call>", '<invoke name="', "</invoke>"
)
DEEPSEEK = ToolFormat(
    "deepseek", "headed", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", ends_reasoning=True,
)  # fmt: skip
DEEPSEEK_FENCED = ToolFormat(
    "deepseek", "headed", DEEPSEEK.opens, DEEPSEEK.close, DEEPSEEK.call_open, DEEPSEEK.call_close,
    ends_reasoning=True, variant="fenced",
)  # fmt: skip
KIMI = ToolFormat(
    "kimi", "headed", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", ids="own", ends_reasoning=True,
)  # fmt: skip
MISTRAL = ToolFormat("mistral", "mistral", ("[TOOL_CALLS]",), ids="nine", ends_reasoning=True)
MISTRAL_NAMED = ToolFormat("mistral", "mistral", MISTRAL.opens, ids="nine", ends_reasoning=True, variant="named")
TOOL_CALLS_LIST = ToolFormat("list", "json", ("<tool_calls>",), "</tool_calls>")
NEMOTRON_LIST = ToolFormat("list", "json", ("<TOOLCALL>",), "</TOOLCALL>")
GRANITE_LIST = ToolFormat("list", "json", ("<|tool_call|>",), variant="open")
PHI_LIST = ToolFormat("list", "json", ("<|tool_call|>", "functools"), "<|/tool_call|>")
PYTHON = ToolFormat("python", "python", ("<|tool_call_start|>",), "<|tool_call_end|>")
HARMONY = ToolFormat("harmony", "harmony", ("<|channel|>",))
LLAMA = ToolFormat("json", "json", (), strays=("<|python_tag|>",))
BARE = ToolFormat("json", "json", ())

_TEMPLATE_MARKS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<minimax:tool_call>",), MINIMAX),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call_start|>",), PYTHON),
    (("<TOOLCALL>",), NEMOTRON_LIST),
    (("<arg_key>",), GLM),
    (("<function=", "<parameter="), CODER),
    (("<tool_calls>",), TOOL_CALLS_LIST),
    (("<tool_call>",), HERMES),
    (("<|/tool",), PHI_LIST),
    (("<|tool_call|>",), GRANITE_LIST),
    (("<|python_tag|>",), LLAMA),
)
_TOKEN_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("[TOOL_CALLS]", MISTRAL), ("<|/tool_call|>", PHI_LIST), ("<|tool_call|>", GRANITE_LIST),
    ("<|tool_call_start|>", PYTHON), ("<|python_tag|>", LLAMA),
)  # fmt: skip
"""Marks that no model has in its vocabulary for anything else."""


def tool_format(template_source: str, has_token: Callable[[str], bool] = lambda text: False) -> ToolFormat:
    """The format that a chat template teaches its model; where it speaks of tools but teaches none, the one of the
    vocabulary's marks. A template without a word of tools gets them in plain words (text/plain_tools.py)."""
    for marks, fmt in _TEMPLATE_MARKS:
        if all(mark in template_source for mark in marks):
            return fmt
    if not knows_tools(template_source):
        return BARE
    return next((fmt for mark, fmt in _TOKEN_MARKS if has_token(mark)), BARE)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks around the reasoning that begins an answer, and pairs of marks that may wrap what follows it."""

    begin: str = "<think>"
    end: str = "</think>"
    wraps: tuple[tuple[str, str], ...] = ()


_HARMONY_REASONING = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>")
_WRAPS = (("<answer>", "</answer>"), ("<response>", "</response>"))


def reasoning_format(template_source: str) -> ReasoningFormat | None:
    """How a template's model writes its reasoning; None where the template knows of none."""
    if tool_format(template_source) is HARMONY:
        return _HARMONY_REASONING
    wraps = tuple(pair for pair in _WRAPS if pair[0] in template_source)  # Hunyuan, Granite 3, ERNIE 4.5
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if begin in template_source or end in template_source:
            return ReasoningFormat(begin, end, wraps)
    return None


def json_types(schema: Any) -> frozenset[str]:
    """The types that a JSON schema lets a value have, as far as it says so in plain words."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(item for item in kind if isinstance(item, str))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            found = [json_types(option) for option in options]
            return frozenset().union(*found) if all(found) else frozenset()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return frozenset(names.get(type(value), "object") for value in values)
