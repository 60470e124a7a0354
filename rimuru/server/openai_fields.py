"""Fields of requests that hold many values: their checks, and what the OpenAPI description says of them.

They are checked by hand: pydantic tries each alternative of a list in turn and notes every wrong item, which takes
seconds for a million of them, and nobody else is served meanwhile.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from rimuru.request import MAX_ANSWERS

MAX_STOPS = 32


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(part) is kind for part in value)


def _checked_objects(value: Any) -> Any:
    if not _is_list_of(dict, value):
        raise ValueError("expected a list of objects")
    return value


def _checked_messages(value: Any) -> Any:
    if not value:
        raise ValueError("expected at least one message")
    return _checked_objects(value)


def _checked_ids(value: Any) -> Any:
    if not _is_list_of(int, value):
        raise ValueError("expected a list of token ids")
    return value


def _checked_prompt(value: Any) -> Any:
    """A text, ids, or several of either."""
    if isinstance(value, str) or _is_list_of(int, value):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a text, a list of token ids, or a list of either")
    if len(value) > MAX_ANSWERS:
        raise ValueError(f"at most {MAX_ANSWERS} prompts may come in one request, not {len(value)}")
    if not _is_list_of(str, value) and not all(_is_list_of(int, prompt) for prompt in value):
        raise ValueError("expected texts only, or lists of token ids only")
    return value


def _checked_stops(value: Any) -> Any:
    """A text or several."""
    if isinstance(value, str):
        return value
    if not _is_list_of(str, value):
        raise ValueError("expected a text or a list of texts")
    if len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} texts may be given, not {len(value)}")
    return value


_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_TEXT_PART, _STRING]}}, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
    "required": ["role"],
}
Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(_checked_messages),
    WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE}),
]
"""Checked by text/messages.py, which knows the template too; here it is only described."""
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
Tools = Annotated[
    list[dict[str, Any]], PlainValidator(_checked_objects), WithJsonSchema({"type": "array", "items": _TOOL})
]
"""Checked by prepare.py."""
Documents = Annotated[list[dict[str, Any]], PlainValidator(_checked_objects), WithJsonSchema(_OBJECTS)]
_FORMATS = [
    {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
    {
        "type": "object",
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
        },
        "required": ["type", "json_schema"],
    },
]
ResponseFormat = Annotated[dict[str, Any], WithJsonSchema({"anyOf": _FORMATS})]
"""Checked by grammar.py."""
Stops = Annotated[
    str | list[str],
    PlainValidator(_checked_stops),
    WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOPS}]}),
]
TokenIds = Annotated[list[int], PlainValidator(_checked_ids), WithJsonSchema(_IDS)]
_PROMPTS = [
    _STRING,
    _IDS,
    {"type": "array", "items": _STRING, "maxItems": MAX_ANSWERS},
    {"type": "array", "items": _IDS, "maxItems": MAX_ANSWERS},
]
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_checked_prompt),
    WithJsonSchema({"anyOf": _PROMPTS}),
]


def _checked_biases(value: Any) -> Any:
    """Numbers by token id."""
    if not isinstance(value, dict):
        raise ValueError("expected an object of numbers by token id")
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise ValueError(f"{key[:40]!r} is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
Biases = Annotated[
    dict[int, float],
    PlainValidator(_checked_biases),
    WithJsonSchema({"type": "object", "patternProperties": {"^[0-9]{1,9}$": _BIAS}, "additionalProperties": False}),
]
