"""What a chat template does with roles, tools and the calls of earlier answers, found by reading it and by trying it,
and conversations put into the shape in which it loses nothing of them.

Templates of one family differ between releases and between those who repair them, so trying is better than a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from rimuru.text.call_texts import calls_of, write_calls
from rimuru.text.messages import normalise_messages
from rimuru.text.plain_tools import function_json, knows_tools

Message = dict[str, object]
_ASKS_FOR_NULL = re.compile(r"""content(?:['"]\])?\s+is\s+(?:not\s+)?none""", re.IGNORECASE)
_TOLD = (
    "You can use these tools, one JSON object a line:\n{tools}\n\nTo use one, answer with its name and its parameters "
    "in exactly this form: {form}\nWhat it returns comes with the next message. Where no tool helps, answer in plain "
    "words."
)
_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class Habits:
    """tools      how it gets to know the request's tools: itself, in a message (Phi-4), or not at all (DeepSeek R1)
    shows_calls   it shows earlier calls; where not, they become the answer's text
    null          a call without text is known by null content
    apart         a call is shown only in an answer without text (DeepSeek V3): text and call become two messages
    single        one call of an answer is shown (gpt-oss) or allowed (Llama 3): further ones become messages
    system        it shows a system message (not Gemma 2); where not, its text begins the first message of the user
    late_system   also behind the first message (not Qwen3.5, MiniMax-M2); where not, it is text of the user
    neighbours    two messages of one role may follow each other (not Mistral, Gemma); where not, they become one
    """

    tools: str = "itself"
    shows_calls: bool = True
    null: bool = False
    apart: bool = False
    single: bool = False
    system: bool = True
    late_system: bool = True
    neighbours: bool = True


def find_habits(source: str, tree: nodes.Template, run: Callable[[list[Message]], str | None]) -> Habits:
    """tree: the parsed source; run: a conversation as the template shows it, None where it cannot."""
    return replace(_tool_habits(source, tree, run) if knows_tools(source) else Habits(), **_role_habits(run))


def _role_habits(run: Callable[[list[Message]], str | None]) -> dict[str, Any]:
    def lost(*roles: str) -> bool:
        """Whether the messages that are no answers cannot all be shown, though the last one of the user can."""
        texts = [f"probed-{i}" for i in range(len(roles))]
        shown = run([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
        return shown is None or (texts[-1] in shown and not all(text in shown for text in texts))

    if lost("user"):
        return {}
    return {
        "system": not lost("system", "user"),
        "late_system": lost("user", "assistant", "user") or not lost("user", "assistant", "system", "user"),
        "neighbours": not lost("user", "user"),
    }


def _tool_habits(source: str, tree: nodes.Template, run: Callable[[list[Message]], str | None]) -> Habits:
    tools = "itself"
    if not any(name.name == "tools" for name in tree.find_all(nodes.Name)):
        tools = "message" if _reads(tree, "tools") else "untold"
    asks_for_null = _ASKS_FOR_NULL.search(source) is not None
    if "tool_calls" not in source:
        return Habits(tools, shows_calls=False)

    def shows(habits: Habits, text: str = "", n_calls: int = 1) -> bool | None:
        """Whether all calls of an answer appear; None where the template fails."""
        shown = run(fit_history(normalise_messages(_probe(text, n_calls), source), habits))
        return None if shown is None else all(f"probed-{i}" in shown for i in range(n_calls))

    null = asks_for_null and not (shows(Habits(null=True)) is None and shows(Habits()) is not None)
    if not shows(Habits(null=null)):
        return Habits(tools, null=null)
    apart = not shows(Habits(null=null), "text") and shows(Habits(null=null, apart=True), "text") is True
    single = not shows(Habits(null=null), n_calls=2) and shows(Habits(null=null, single=True), n_calls=2) is True
    return Habits(tools, True, null, apart, single)


def fit_roles(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """Normalised messages in roles and an order that the template shows, with all their text."""
    out: list[Message] = []
    was_system = False
    for message in messages:
        is_system = message["role"] == "system"
        leads = is_system and (not out or out[-1]["role"] == "system")
        if is_system and not (habits.system if leads else habits.late_system and habits.system):
            message = {**message, "role": "user"}
        if out and _joins(out[-1], message, habits, was_system):
            texts = [str(m["content"]) for m in (out[-1], message) if m["content"]]
            out[-1] = {**out[-1], **message, "content": "\n\n".join(texts)}
        else:
            out.append(message)
        was_system = is_system
    return out


def _joins(last: Message, message: Message, habits: Habits, was_system: bool) -> bool:
    """Whether two neighbours become one message. was_system: the first one was sent as a system message."""
    if last["role"] != message["role"] or last.get("tool_calls") or message.get("tool_calls"):
        return False
    if message["role"] == "system":
        return not (habits.neighbours and habits.late_system)
    return message["role"] in ("user", "assistant") and (not habits.neighbours or was_system)


def _reads(tree: nodes.Template, key: str) -> bool:
    return any(node.attr == key for node in tree.find_all(nodes.Getattr)) or any(
        isinstance(node.arg, nodes.Const) and node.arg.value == key for node in tree.find_all(nodes.Getitem)
    )


def _probe(text: str, n_calls: int) -> list[Message]:
    ids = [f"probeCal{i}" for i in range(n_calls)]
    calls = [
        {"id": ids[i], "type": "function", "function": {"name": f"tool_{i}", "arguments": f'{{"x": "probed-{i}"}}'}}
        for i in range(n_calls)
    ]
    results: list[Message] = [
        {"role": "tool", "tool_call_id": ids[i], "name": f"tool_{i}", "content": "1"} for i in range(n_calls)
    ]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, "tool_calls": calls}, *results]


def fit_history(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """Normalised messages, with answers in pieces where the template would lose calls of them."""
    out: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            out.append(message)
            continue
        if habits.apart and message.get("content"):
            out.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = _without_words(message)
        if habits.single and len(calls) > 1:
            n_results = next((i for i, m in enumerate(rest) if m["role"] != "tool"), len(rest))
            out += _one_by_one(message, calls, rest[:n_results])
            del rest[:n_results]
        else:
            out.append(message)
    if habits.null:
        out = [{**m, "content": None} if m.get("tool_calls") and m.get("content") == "" else m for m in out]
    return out


def _without_words(message: Message) -> Message:
    return {key: value for key, value in message.items() if key not in _REASONING_KEYS} | {"content": ""}


def _one_by_one(message: Message, calls: list[Message], results: list[Message]) -> list[Message]:
    """Each call as a message of its own, followed by its results."""
    out: list[Message] = []
    left = list(results)
    for i, call in enumerate(calls):
        out.append({**(message if i == 0 else _without_words(message)), "tool_calls": [call]})
        own = [m for m in left if m.get("tool_call_id") is not None and m.get("tool_call_id") == call.get("id")]
        if not own and left and left[0].get("tool_call_id") is None:
            own = left[:1]
        out += own
        left = [m for m in left if not any(m is taken for taken in own)]
    return out + left


def with_tools_in_message(messages: Sequence[Message], tools: Sequence[object] | None) -> list[Message]:
    """The system message with the tools' JSON as its `tools`, for templates that look there."""
    out = list(messages)
    if not tools:
        return out
    if out[0]["role"] != "system":
        out.insert(0, {"role": "system", "content": ""})
    out[0] = {**out[0], "tools": f"[{', '.join(map(function_json, tools))}]"}
    return out


def with_told_tools(
    messages: Sequence[Message], tools: Sequence[object] | None, source: str, has_token: Callable[[str], bool]
) -> list[Message]:
    """The tools, and how to call them, told in the system message. Marked values come in; the form's marks stay."""
    out = list(messages)
    if not tools:
        return out
    form = write_calls([("NAME", '{"PARAMETER": "VALUE"}')], source, has_token)
    told = _TOLD.format(tools="\n".join(map(function_json, tools)), form=form)
    last_system = max((i for i, m in enumerate(out) if m["role"] == "system"), default=None)
    if last_system is not None:  # some templates show the last one only
        content = out[last_system]["content"]
        out[last_system] = {**out[last_system], "content": f"{content}\n\n{told}" if content else told}
    elif "system" in source:
        out.insert(0, {"role": "system", "content": told})
    else:
        out[0] = {**out[0], "content": f"{told}\n\n{out[0]['content']}"}
    return out


def with_written_calls(messages: Sequence[Message], source: str, has_token: Callable[[str], bool]) -> list[Message]:
    """Earlier calls as text of their answers. Marked values come in; the marks of calls stay."""
    out = []
    for message in messages:
        calls = calls_of(message)
        if calls:
            content, written = str(message.get("content") or ""), write_calls(calls, source, has_token)
            line_feed = "\n" if content and written.startswith("{") else ""
            message = {**message, "content": content + line_feed + written}
        out.append(message)
    return out
