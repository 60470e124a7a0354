"""Ids of tool calls in a conversation's history, in the form that some templates insist on.

Clients send back the ids that they got, but a conversation may have begun elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

_NINE = re.compile(r"\|\s*length\s*(?:!=|<)\s*9")
_NINE_CHARACTERS = re.compile(r"[A-Za-z0-9]{9}")
_KIMI = re.compile(r"functions\.\S+:\d+")


def rename_call_ids(messages: list[dict[str, object]], template_source: str) -> None:
    """Give the calls of normalised messages, and the results that refer to them, ids that the template accepts.

    Mistral's want nine letters and digits; Kimi's print the id as the name of the call, functions.NAME:NUMBER.
    """
    new_id: Callable[[str, str, int], str]
    if _NINE.search(template_source):
        new_id = _nine
    elif "<|tool_call_begin|>" in template_source and "tool_call_id" in template_source:
        new_id = _kimi
    else:
        return
    names: dict[str, str] = {}
    unanswered: list[str] = []
    n_calls = 0
    for message in messages:
        for call in _calls_of(message):
            old, name = str(call.get("id") or ""), _name_of(call)
            call["id"] = names[old] = new_id(old, name, n_calls)
            unanswered.append(names[old])
            n_calls += 1
        if message["role"] == "tool":
            given = str(message.get("tool_call_id") or "")
            known = names.get(given) if given else None
            answered = known or (unanswered[0] if unanswered and not given else new_id(given, "", n_calls))
            message["tool_call_id"] = answered
            if answered in unanswered:
                unanswered.remove(answered)


def _calls_of(message: dict[str, object]) -> list[dict[str, object]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _name_of(call: dict[str, object]) -> str:
    function = call.get("function")
    return str(function.get("name")) if isinstance(function, dict) else str(call.get("name"))


def _nine(old: str, name: str, number: int) -> str:
    """An id of nine characters: the same for the same id in every turn, so that the prompt's beginning stays."""
    if _NINE_CHARACTERS.fullmatch(old):
        return old
    return hashlib.sha256((old or f"{number} {name}").encode("utf-8", "replace")).hexdigest()[:9]


def _kimi(old: str, name: str, number: int) -> str:
    return old if _KIMI.fullmatch(old) or not name else f"functions.{name}:{number}"
