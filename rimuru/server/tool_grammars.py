"""Grammars of tool calls in the syntax of each format, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from rimuru.server.errors import FieldError
from rimuru.server.schema_checks import inexact_number, is_endless
from rimuru.server.tool_formats import ToolFormat, json_types

MAX_SCHEMA_CHARACTERS = 1 << 18
_DATA = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose values are no schemas."""
_MAX_STEPS = 32
"""References that lead to references."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write white space: a model cannot fill its budget with blanks, and sees the spacing it was trained on."""

Functions = Sequence[Mapping[str, Any]]
Literal = Callable[[str], str]
"""A text as the grammar spells it: marks that are tokens of their own by their ids."""


def tool_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    """Rules that define `answer` as a call of one of the functions, or several where parallel."""
    return _RULES[fmt.kind](fmt, functions, literal, parallel)


def schema_text(schema: Any, param: str = "response_format") -> str:
    """A JSON schema as it stands in a grammar. Raises FieldError for one that cannot be used."""
    if not isinstance(schema, (dict, bool)):
        raise FieldError("the JSON schema must be an object", param)
    try:
        text = json.dumps({"x-guidance": _COMPACT, **schema} if isinstance(schema, dict) else schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise FieldError(f"the JSON schema has more than {MAX_SCHEMA_CHARACTERS} characters", param)
        json.dumps(schema, ensure_ascii=False).encode()
        endless, inexact = is_endless(schema), inexact_number(schema)
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        told = f"the JSON schema has half of a surrogate pair ({half}), which is no character"
        raise FieldError(told, param) from None
    except (ValueError, RecursionError):
        raise FieldError("the JSON schema is nested too deeply", param) from None
    if endless:
        raise FieldError("no finite value fits the JSON schema: its $ref lead back to themselves", param)
    if inexact is not None:
        raise FieldError(f"in the JSON schema, {inexact}", param)
    return text


def check_parameters(functions: Functions) -> None:
    """Raises FieldError for parameters whose schema cannot be used, before parts of it are put into a grammar."""
    for function in functions:
        schema_text(_parameters(function), "tools")


def regex_text(text: str) -> str:
    """A literal text inside /.../ of a grammar."""
    escaped = "".join("\\" + c if c in "\\/.^$*+?()[]{}|" else c for c in text)
    return escaped.replace("\n", "\\n")


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    return dict(schema) if isinstance(schema, Mapping) and schema else {"type": "object"}


def _properties(function: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """(schemas of the parameters, the names that are required)."""
    schema = _parameters(function)
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, Mapping) else {},
        [name for name in required if isinstance(name, str)] if isinstance(required, list) else [],
    )


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself as they must be where it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is a reference into `root` refers to, in the end; other schemas as they are."""
    for _ in range(_MAX_STEPS):
        pointer = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            break
        schema = root
        for name in unquote(pointer[1:]).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return schema


def _call_object(functions: Functions, key: str) -> str:
    options = []
    for i, function in enumerate(functions):
        arguments = _moved(_parameters(function), f"#/anyOf/{i}/properties/{key}")
        properties = {"name": {"const": str(function["name"])}, key: arguments}
        closed = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        options.append(closed)
    return f"object: %json {schema_text({'anyOf': options}, 'tools')}"


def _json_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    if not fmt.opens:
        return f"answer: object\n{_call_object(functions, 'parameters')}"
    objects = _call_object(functions, "arguments")
    opening, close = literal(fmt.opens[0]), literal(fmt.close)
    if fmt.name == "hermes":
        return f"answer: call{'+' * parallel}\ncall: {opening} /\\n/ object /\\n/ {close} /\\n?/\n{objects}"
    more = ' (", " object)*' if parallel else ""
    return f'answer: {opening} / ?/ "[" object{more} "]" {close}\n{objects}'


def _mistral_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    if fmt.variant != "named":
        return _json_rules(fmt, functions, literal, parallel)
    return _headed(functions, parallel, lambda name: f"{literal(fmt.opens[0])} {literal(name + '[ARGS]')}", "", "", "")


def _headed_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    def header(name: str) -> str:
        if fmt.name == "kimi":
            number = literal("<|tool_call_argument_begin|>")
            return f"{literal(fmt.call_open)} {literal(f'functions.{name}:')} /[0-9]{{1,2}}/ {number}"
        if fmt.variant == "fenced":
            return literal(f"{fmt.call_open}function<｜tool▁sep｜>{name}\n```json\n")
        return literal(f"{fmt.call_open}{name}<｜tool▁sep｜>")

    fence = "\n```" if fmt.variant == "fenced" else ""
    end = literal(fence + fmt.call_close)
    return _headed(functions, parallel, header, end, literal(fmt.opens[0]), literal(fmt.close), bool(fence))


def _harmony_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    """The token that ends the call ends the answer; one call an answer."""

    def header(name: str) -> str:
        return literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")

    return _headed(functions, False, header, "", "", "")


def _headed(
    functions: Functions,
    parallel: bool,
    header: Callable[[str], str],
    end: str,
    opening: str,
    close: str,
    line_feeds: bool = False,
) -> str:
    """Calls that are a header and the object of arguments."""
    lines = [
        f"c{i}: {header(str(function['name']))} a{i} {end}\na{i}: %json {schema_text(_parameters(function), 'tools')}"
        for i, function in enumerate(functions)
    ]
    names = " | ".join(f"c{i}" for i in range(len(functions)))
    between = " /\\n/" if line_feeds else ""
    more = f" ({between} call)*" if parallel else ""
    return "\n".join([f"answer: {opening} call{more} {close}", f"call: {names}", *lines])


def _tagged_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    """Calls whose parameters stand between tags: one rule a function, one a parameter, in the schema's order."""
    spelling = _SPELLINGS[fmt.name]
    lines, calls = [], []
    for i, function in enumerate(functions):
        properties, required = _properties(function)
        root, rules = _parameters(function), []
        for j, (name, written) in enumerate(properties.items()):
            schema = _resolved(written, root)
            rules.append(f"p{i}_{j}" + ("" if name in required else "?"))
            lead, end = literal(spelling.key.format(name)), spelling.value_end
            if (choices := _string_choices(schema)) is not None:
                texts = " | ".join(literal(choice + end) for choice in choices)
                lines.append(f"p{i}_{j}: {lead} ({texts})")
            elif json_types(schema) - {"string"}:
                lines.append(f"p{i}_{j}: {lead} v{i}_{j} {literal(end)}\nv{i}_{j}: %json {_value_schema(schema, root)}")
            else:
                lines.append(f"p{i}_{j}: {lead} s{i}_{j}\ns{i}_{j}[lazy]: /(?s:.*){regex_text(end)}/")
        calls.append(f"c{i}")
        lines.append(f"c{i}: {literal(spelling.name.format(function['name']))} {' '.join(rules)}")
    one = f"({' | '.join(calls)}) {literal(spelling.call_end) if spelling.call_end else ''}"
    opening, close = literal(fmt.opens[0] + spelling.behind_open), literal(fmt.close)
    if fmt.name == "minimax":  # one block holds all calls
        return "\n".join([f"answer: {opening} call{'+' * parallel} {close}", f"call: {one}", *lines])
    return "\n".join([f"answer: call{'+' * parallel}", f"call: {opening} {one} {close} /\\n?/", *lines])


def _string_choices(schema: Any) -> list[str] | None:
    """The texts of which a parameter must be one, where its schema lists them."""
    values = schema.get("enum") if isinstance(schema, Mapping) else None
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        return None
    return values


def _value_schema(schema: Any, root: Mapping[str, Any]) -> str:
    """A parameter's schema, with the schema that it is a part of for its references to go to."""
    if not isinstance(schema, Mapping):
        return schema_text(schema, "tools")
    whole = _moved(schema, "#/$defs/whole")
    if whole == schema:
        return schema_text(dict(schema), "tools")
    return schema_text({**whole, "$defs": {"whole": _moved(root, "#/$defs/whole")}}, "tools")


class _Spelling:
    """The texts around a call and its parameters; {} is the name."""

    def __init__(self, behind_open: str, name: str, key: str, value_end: str, call_end: str) -> None:
        self.behind_open, self.name, self.key = behind_open, name, key
        self.value_end, self.call_end = value_end, call_end


_SPELLINGS = {
    "coder": _Spelling("\n", "<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    "minimax": _Spelling("\n", '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n"),
    "glm": _Spelling("", "{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
}


def _python_rules(fmt: ToolFormat, functions: Functions, literal: Literal, parallel: bool) -> str:
    lines = []
    for i, function in enumerate(functions):
        properties, required = _properties(function)
        root = _parameters(function)
        for j, (name, schema) in enumerate(properties.items()):
            lines.append(f"k{i}_{j}: {literal(name + '=')} v{i}_{j}\nv{i}_{j}: %json {_value_schema(schema, root)}")
        keys = [(f"k{i}_{j}", name in required) for j, name in enumerate(properties)]
        lines.append(f"c{i}: {literal(str(function['name']) + '(')} {_comma_list(keys)} {literal(')')}")
    names = " | ".join(f"c{i}" for i in range(len(functions)))
    more = ' (", " call)*' if parallel else ""
    head = f'answer: {literal(fmt.opens[0])} "[" call{more} "]" {literal(fmt.close)}'
    return "\n".join([head, f"call: {names}", *lines])


def _comma_list(rules: Sequence[tuple[str, bool]]) -> str:
    """Rules with commas between, in their order; those that are not needed (False) may be left out."""
    rest = [f'(", " {rule})' + "?" * (not needed) for rule, needed in rules]
    firsts = []
    for i, (rule, needed) in enumerate(rules):
        firsts.append(" ".join([rule, *rest[i + 1 :]]))
        if needed:
            return f"({' | '.join(firsts)})"
    return f"({' | '.join(firsts)})?" if firsts else ""


_RULES: Mapping[str, Callable[[ToolFormat, Functions, Literal, bool], str]] = {
    "json": _json_rules,
    "mistral": _mistral_rules,
    "headed": _headed_rules,
    "harmony": _harmony_rules,
    "tagged": _tagged_rules,
    "python": _python_rules,
}
