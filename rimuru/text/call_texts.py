"""Tool calls as a model writes them, for templates that leave that to others.

Some templates know of tools and yet show no calls of earlier answers (LFM2, Granite 3, Phi-4): these become the text
of the answer. Others show calls and never the tools (DeepSeek R1, V3.1): these are told, with the form of a call.
The forms are those that server/tool_formats.py reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rimuru.text.arguments import JsonArguments

Call = tuple[str, object]
"""Name and arguments."""


def write_calls(calls: Sequence[Call], source: str, has_token: Callable[[str], bool]) -> str:
    """The calls as the text of an answer, between the marks that the template or the vocabulary knows."""
    for marks, write in _FORMS:
        if all(mark in source for mark in marks):
            return write(calls)
    return next((write(calls) for mark, write in _TOKEN_FORMS if has_token(mark)), _objects(calls, "parameters", "\n"))


def calls_of(message: Mapping[str, object]) -> list[Call]:
    """Name and arguments of the calls of a normalised message."""
    found: list[Call] = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            found.append((str(function.get("name")), function.get("arguments", JsonArguments({}))))
    return found


def _objects(calls: Sequence[Call], key: str, separator: str) -> str:
    return separator.join(f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}' for name, arguments in calls)


def _list(calls: Sequence[Call]) -> str:
    return f"[{_objects(calls, 'arguments', ', ')}]"


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_objects([call], 'arguments', '')}\n</tool_call>" for call in calls)


def _deepseek(calls: Sequence[Call]) -> str:
    written = (f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def _fenced(calls: Sequence[Call]) -> str:
    written = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}<｜tool▁calls▁end｜>"


def _python(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        pairs = arguments.items() if isinstance(arguments, Mapping) else ()
        written.append(f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in pairs)})")
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _literal(value: Any) -> str:
    """A JSON value in Python, with texts in double quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


_Form = Callable[[Sequence[Call]], str]
_FORMS: tuple[tuple[tuple[str, ...], _Form], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), _fenced),
    (("<｜tool▁calls▁begin｜>",), _deepseek),
    (("[TOOL_CALLS]",), lambda calls: f"[TOOL_CALLS]{_list(calls)}"),
    (("<|tool_call_start|>",), _python),
    (("<TOOLCALL>",), lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>"),
    (("<tool_calls>",), lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>"),
    (("<tool_call>",), _hermes),
    (("<|/tool",), lambda calls: f"<|tool_call|>{_list(calls)}<|/tool_call|>"),
    (("<|tool_call|>",), lambda calls: f"<|tool_call|>{_list(calls)}"),
)
_TOKEN_FORMS: tuple[tuple[str, _Form], ...] = (
    ("[TOOL_CALLS]", _FORMS[2][1]), ("<|/tool_call|>", _FORMS[7][1]), ("<|tool_call|>", _FORMS[8][1]),
    ("<|tool_call_start|>", _python),
)  # fmt: skip
"""In the order of tool_formats."""
