"""Tools for templates that know nothing of them (Gemma 3, OLMoE, the first Mixtral, ...): told in the conversation's
first message, and calls and results of earlier turns as plain messages. Other templates do all that themselves.

A call is the JSON object {"name": ..., "parameters": {...}} and nothing else, as for models without a syntax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_TOLD = (
    "You can use these tools, one JSON object a line:\n{tools}\n\nTo use one, answer with nothing but a JSON object of "
    'this form: {{"name": "the tool\'s name", "parameters": {{"its parameters": "and their values"}}}}. '
    "What it returns comes with the next message. Where no tool helps, answer in plain words.\n\n"
)


def knows_tools(template_source: str) -> bool:
    """Whether a template says anything of tools."""
    return "tool" in template_source.lower()


def with_plain_tools(
    messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None
) -> list[dict[str, object]]:
    """Normalised messages in which tools, calls and results are text. Neighbours of one role become one message where
    results are among them: such templates often want user and assistant to take turns."""
    out: list[dict[str, object]] = []
    for message in messages:
        plain = dict(message)
        if plain.get("tool_calls"):
            calls = plain.pop("tool_calls")
            written = [_call_text(call) for call in calls if isinstance(call, Mapping)]  # type: ignore[attr-defined]
            plain["content"] = "\n".join(filter(None, [str(plain.get("content") or ""), *written]))
        is_result = plain["role"] in ("tool", "function")
        if is_result:
            plain = {"role": "user", "content": f"Result of the tool: {plain['content']}"}
        if out and out[-1]["role"] == plain["role"] == "user" and (is_result or out[-1].get("is_result")):
            out[-1]["content"] = f"{out[-1]['content']}\n{plain['content']}"
            continue
        out.append(plain | {"is_result": True} if is_result else plain)
    for message in out:
        message.pop("is_result", None)
    if tools and out:
        told = _TOLD.format(tools="\n".join(map(function_json, tools)))
        out[0]["content"] = told + str(out[0]["content"])
    return out


def whole_tools(tools: Sequence[object]) -> list[object]:
    """OpenAI tools with the fields that a client may leave out."""
    out: list[object] = []
    for tool in tools:
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            function = tool["function"]
            given = {key: value for key, value in function.items() if value is not None}
            parameters = {"type": "object", "properties": {}, **(given.pop("parameters", None) or {})}
            function = {"name": given.pop("name", ""), "description": given.pop("description", ""),
                        "parameters": parameters, **given}  # fmt: skip
            tool = {"type": "function", **tool, "function": function}
        out.append(tool)
    return out


def function_json(tool: object) -> str:
    """The function of an OpenAI tool as JSON."""
    return json.dumps(tool.get("function", tool) if isinstance(tool, Mapping) else tool, ensure_ascii=False)


def _call_text(call: Mapping[str, object]) -> str:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return ""
    return f'{{"name": {json.dumps(function.get("name"))}, "parameters": {function.get("arguments")}}}'
