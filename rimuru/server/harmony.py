"""The answers of gpt-oss: messages with headers, on channels.

    <|channel|>analysis<|message|> reasoning <|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|> {arguments} <|call|>
    <|start|>assistant<|channel|>final<|message|> content <|return|>

The prompt has written the first message's <|start|>assistant. A recipient may stand before the channel or behind it.
"""

from __future__ import annotations

import re

from rimuru.server.answer_parts import AnswerPart, Content, Reasoning, first_of, held_length
from rimuru.server.tool_calls import CallCounter

_BEGINNINGS = ("<|channel|>", "<|start|>", "to=")
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER = 300


class HarmonyParser:
    """An answer on channels, as reasoning, content and calls. Same methods as AnswerParser."""

    def __init__(self, calls: CallCounter | None, keeps_reasoning: bool = False) -> None:
        """calls: None where the request has no tools, and nothing is a call; keeps_reasoning: it stays in the
        content, between the marks that the model wrote."""
        self.calls, self._keeps_reasoning = calls, keeps_reasoning
        self._state = "between"
        self._kind = "content"
        self._held = ""
        self._index = -1
        self._n_argument_characters = 0
        self._n_content = self._n_reasoning = 0
        self._separator = ""

    @property
    def n_calls(self) -> int:
        return 0 if self.calls is None else self.calls.n_calls

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this piece of text settles."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._held and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """End of the answer: what was held back. A header that breaks off is no text."""
        parts: list[AnswerPart] = []
        if self._state == "message":
            self._give(self._held, parts)
            self._end_message(parts)
        elif self._state == "between":
            self._kind = "content"
            self._give(self._held.strip(), parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[AnswerPart]) -> bool:
        if self._state == "between":
            return self._find_beginning()
        if self._state == "header":
            return self._read_header(parts)
        found = first_of(self._held, _ENDS)
        if found is None:
            cut = len(self._held) - held_length(self._held, _ENDS)
            self._give(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        at, mark = found
        self._give(self._held[:at], parts)
        self._end_message(parts)
        self._held = self._held[at + len(mark) * (mark not in _BEGINNINGS) :]
        self._state = "between"
        return True

    def _find_beginning(self) -> bool:
        """A message begins with a mark; without one the text is content."""
        self._held = self._held.lstrip()
        if self._held.startswith(_BEGINNINGS):
            self._state = "header"
            return True
        if any(mark.startswith(self._held) for mark in _BEGINNINGS):
            return False
        self._begin("content")
        return True

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        at = self._held.find(_MESSAGE)
        header = self._held[: at if at >= 0 else len(self._held) - held_length(self._held, (_MESSAGE,))]
        if "\n" in header or len(header) > _MAX_HEADER:  # text that only looks like a header
            mark = next(mark for mark in _BEGINNINGS if self._held.startswith(mark))
            self._begin("content")
            self._give(mark, parts)
            self._held = self._held[len(mark) :]
            return True
        if at < 0:
            return False
        self._held = self._held[at + len(_MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else ""
        if self.calls is not None and (name.startswith("functions.") or name in self.calls.parameters):
            self._begin("call")
            self._index, started = self.calls.start(name.removeprefix("functions."))
            self._n_argument_characters = 0
            parts += started
        else:
            self._begin("reasoning" if channel is not None and channel.group(1) == "analysis" else "content")
        return True

    def _begin(self, kind: str) -> None:
        self._state, self._kind = "message", kind
        before = self._n_content if kind == "content" or self._keeps_reasoning else self._n_reasoning
        self._separator = "\n\n" if before else ""

    def _give(self, text: str, parts: list[AnswerPart]) -> None:
        if not text:
            return
        if self._kind == "call":
            assert self.calls is not None
            self._n_argument_characters += len(text.strip())
            parts += self.calls.arguments(self._index, text)
            return
        lead, self._separator = self._separator, ""
        if self._kind == "reasoning" and not self._keeps_reasoning:
            self._n_reasoning += len(text)
            parts.append(Reasoning(lead + text))
            return
        if self._kind == "reasoning" and self._state == "message":
            lead, self._kind = "<|channel|>analysis<|message|>", "kept"
        self._n_content += len(text)
        parts.append(Content(lead + text))

    def _end_message(self, parts: list[AnswerPart]) -> None:
        if self._kind == "call" and not self._n_argument_characters:
            assert self.calls is not None
            parts += self.calls.arguments(self._index, "{}")
        elif self._kind == "kept":
            parts.append(Content("<|end|>"))
