"""Parameters of tools that refer to definitions of their own, as Pydantic writes nested models, in every syntax."""

from __future__ import annotations

import json
from typing import Any

import pytest

llguidance = pytest.importorskip("llguidance")

from rimuru.server import tool_formats  # noqa: E402
from rimuru.server.tool_formats import ToolFormat  # noqa: E402
from rimuru.server.tool_grammars import check_parameters, tool_rules  # noqa: E402

FORMATS = [value for value in vars(tool_formats).values() if isinstance(value, ToolFormat)]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
PARAMETERS = {
    "$defs": {"Point": POINT, "Alias": {"$ref": "#/$defs/Point"}, "a/b": {"type": "integer"}},
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/Alias"},
        "way": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        "n": {"$ref": "#/$defs/a~1b"},
        "kind": {"const": {"$ref": "#/$defs/none"}},
    },
    "required": ["at", "way"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"name": "other", "parameters": {"type": "object", "properties": {}}},
    {"name": "f", "parameters": PARAMETERS},
]


def rules(fmt: ToolFormat) -> str:
    check_parameters(FUNCTIONS)
    return tool_rules(fmt, FUNCTIONS, lambda text: json.dumps(text, ensure_ascii=False), True)


class Bytes:
    """A tokenizer of single bytes, as the library asks for one."""

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = 256, None, [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def matcher(grammar: str) -> Any:
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    return llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.name} {fmt.variant}".strip())
def test_grammars_know_what_references_mean(fmt: ToolFormat) -> None:
    grammar = "start: answer\n" + rules(fmt)
    made = matcher(grammar)
    assert not made.is_error(), made.get_error()


@pytest.mark.parametrize("value", ['{"x": 5}', '{"x": "a"}'])
def test_what_is_referred_to_holds(value: str) -> None:
    for fmt, text in (
        (
            tool_formats.HERMES,
            f'<tool_call>\n{{"name": "f", "arguments": {{"at": {value}, "way": [{value}]}}}}\n</tool_call>',
        ),
        (
            tool_formats.CODER,
            f"<tool_call>\n<function=f>\n<parameter=at>\n{value}\n</parameter>\n<parameter=way>\n[{value}]\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ):
        made = matcher("start: answer\n" + rules(fmt))
        taken = made.try_consume_tokens(list(text.encode()))
        assert (taken == len(text)) == ('"a"' not in value), (fmt.name, text[:taken], made.get_error())
