"""What an answer consists of, in the order in which it is written: reasoning, text, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | CallStart | CallArguments
AnswerPart = Reasoning | Part


def held_length(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of text with which one of the tags begins (but which is not all of it)."""
    for n in range(min(len(text), max(map(len, tags), default=1) - 1), 0, -1):
        if any(tag.startswith(text[-n:]) for tag in tags):
            return n
    return 0


def first_of(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the tags stands and which one it is (the longest of those that begin there)."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if not found:
        return None
    at, _, tag = min(found)
    return at, tag
