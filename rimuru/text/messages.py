"""Chat messages as clients send them, brought into the one shape that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rimuru.base.errors import BadInputError
from rimuru.text.arguments import JsonArguments
from rimuru.text.call_ids import rename_call_ids

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_TEXT_PARTS = ("text", "input_text", "output_text")  # no set: a client may send what has no hash
_READS_THINKING = re.compile(r"""\.thinking\b|['"]thinking['"]""")
_ONE_OF_BOTH = re.compile(r"message\.content and message\.thinking")


def normalise_messages(messages: object, template_source: str) -> list[dict[str, object]]:
    """Copies of OpenAI-style messages for a template. Raises BadInputError that says which message is wrong.

    Content that is null or absent becomes "", text parts are joined with line feeds. Empty `tool_calls` and keys that
    are null go away; tool-call arguments are the object and its text at once (JsonArguments). The role `developer`
    becomes `system` unless the template knows it; a role outside OpenAI's must occur in the template. An earlier
    answer's reasoning is its `reasoning_content` (or `reasoning`), and `thinking` for templates that call it so.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise BadInputError("messages must be a list with at least one message")
    out = [_normalise(message, f"messages[{i}]", template_source) for i, message in enumerate(messages)]
    rename_call_ids(out, template_source)
    return out


def _normalise(message: object, where: str, template_source: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise BadInputError(f"{where} must be an object with role and content")
    out: dict[str, object] = {str(key): value for key, value in message.items() if value is not None}
    out["role"] = _role(out.get("role"), where, template_source)
    out["content"] = _content(out.get("content"), where)
    if "tool_calls" in out:
        calls = _tool_calls(out["tool_calls"], where)
        if calls:
            out["tool_calls"] = calls
        else:
            del out["tool_calls"]
    if out["role"] == "assistant":
        _fit_answer(out, template_source)
    return out


def _fit_answer(message: dict[str, object], template_source: str) -> None:
    """Reasoning of an earlier answer as the template looks for it."""
    if isinstance(message.get("reasoning"), str):
        message.setdefault("reasoning_content", message["reasoning"])
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and _READS_THINKING.search(template_source):
        message.setdefault("thinking", reasoning)
    if not message.get("tool_calls"):
        return
    if message.get("thinking") and message["content"] and _ONE_OF_BOTH.search(template_source):
        # gpt-oss shows either before a call, on the same channel, and refuses both.
        message["thinking"], message["content"] = f"{message['thinking']}\n\n{message['content']}", ""


def _role(role: object, where: str, template_source: str) -> str:
    if not isinstance(role, str) or not role:
        raise BadInputError(f"{where}.role must be a text such as 'user'")
    if role == "developer" and "developer" not in template_source:
        return "system"
    # Templates print roles inside their markup, so a role is never free text.
    if role not in _ROLES and f"'{role}'" not in template_source and f'"{role}"' not in template_source:
        raise BadInputError(f"{where}.role {role!r} is unknown; use one of {', '.join(sorted(_ROLES))}")
    return role


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadInputError(f"{where}.content must be a text or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part
        if isinstance(part, Mapping):
            if part.get("type", "text") not in _TEXT_PARTS:
                raise BadInputError(
                    f"{where}.content[{i}] has type {part.get('type')!r}; only text parts are supported"
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise BadInputError(f"{where}.content[{i}] must have a text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[object]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise BadInputError(f"{where}.tool_calls must be a list")
    out: list[object] = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise BadInputError(f"{where}.tool_calls[{i}] must be an object")
        copy = {"type": "function", **call} if "function" in call else dict(call)
        function = copy.get("function")
        if isinstance(function, Mapping):
            copy["function"] = {**function, "arguments": _arguments(function.get("arguments"))}
        elif "arguments" in copy:
            copy["arguments"] = _arguments(copy["arguments"])
        out.append(copy)
    return out


def _arguments(arguments: object) -> object:
    if arguments is None or arguments == "":
        return JsonArguments({})
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments  # a model may have written broken JSON; the template shows it as it was
        return JsonArguments(value, arguments) if isinstance(value, dict) else value
    return JsonArguments(arguments) if isinstance(arguments, Mapping) else arguments
