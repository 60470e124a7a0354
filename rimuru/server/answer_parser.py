"""An answer's text, while it comes, as reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rimuru.server.answer_parts import AnswerPart, Content, Reasoning, first_of, held_length
from rimuru.server.tool_calls import ToolCallParser
from rimuru.server.tool_formats import ReasoningFormat


class AnswerReader(Protocol):
    """Takes an answer's text in pieces and tells its parts."""

    @property
    def n_calls(self) -> int: ...
    def push(self, text: str) -> list[AnswerPart]: ...
    def finish(self) -> list[AnswerPart]: ...


class ReasoningSplitter:
    """Splits off the reasoning at the start of an answer, and takes away the marks that wrap what follows it."""

    def __init__(self, begun: bool, fmt: ReasoningFormat | None = None, also_ends: Sequence[str] = ()) -> None:
        """begun: the prompt's end has opened it already; also_ends: marks of tool calls that end it unclosed."""
        self.fmt = fmt or ReasoningFormat()
        self._ends = (self.fmt.end, *also_ends)
        self._state = "thinking" if begun else "start"
        self._held = ""
        self._stripping = begun
        self._wrap_end = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this piece settles."""
        self._held += text
        reasoning = content = ""
        if self._state == "start":
            self._look_for_start()
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "after":
            self._held = self._held.lstrip()
            self._look_for_wrap()
        if self._state == "content":
            content = self._content()
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """End of the answer: what was held back."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return held.rstrip(), ""
        if self._wrap_end and held.strip() and self._wrap_end.startswith(held.strip()):
            return "", ""  # a closing mark that was cut off
        return "", held.rstrip() if self._wrap_end else held

    def _look_for_start(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(self.fmt.begin):
            self._state, self._held, self._stripping = "thinking", stripped[len(self.fmt.begin) :], True
        elif not self.fmt.begin.startswith(stripped):
            held = self._held
            self._held = stripped
            self._look_for_wrap()
            if not self._wrap_end:
                self._held = held

    def _look_for_wrap(self) -> None:
        """Content begins, maybe behind a mark that wraps it."""
        if not self._held:
            return
        for begin, end in self.fmt.wraps:
            if self._held.startswith(begin):
                self._state, self._wrap_end, self._stripping = "content", end, True
                self._held = self._held[len(begin) :]
                return
        if not any(begin.startswith(self._held) for begin, _ in self.fmt.wraps):
            self._state = "content"

    def _think(self) -> str:
        if self._stripping:
            self._held = self._held.lstrip()
            self._stripping = not self._held
        found = first_of(self._held, self._ends)
        if found is not None:
            at, mark = found
            text, self._held = self._held[:at].rstrip(), self._held[at + len(mark) * (mark == self.fmt.end) :]
            self._state = "after"
            return text
        cut = len(self._held) - held_length(self._held, self._ends)
        cut = len(self._held[:cut].rstrip())  # white space may turn out to be the end
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _content(self) -> str:
        if not self._wrap_end:
            text, self._held = self._held, ""
            return text
        if self._stripping:
            self._held = self._held.lstrip()
            self._stripping = not self._held
        at = self._held.find(self._wrap_end)
        if at >= 0:
            text, self._held = self._held[:at].rstrip() + self._held[at + len(self._wrap_end) :], ""
            self._wrap_end = ""
            return text
        cut = len(self._held) - held_length(self._held, (self._wrap_end,))
        cut = len(self._held[:cut].rstrip())
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class AnswerParser:
    """Reasoning first, then tool calls in what is left. Either may be absent."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolCallParser | None) -> None:
        self.reasoning, self.tools = reasoning, tools

    @property
    def n_calls(self) -> int:
        return 0 if self.tools is None else self.tools.n_calls

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this piece of text settles."""
        thought, content = ("", text) if self.reasoning is None else self.reasoning.push(text)
        return self._parts(thought, content)

    def finish(self) -> list[AnswerPart]:
        """End of the answer: what was held back."""
        thought, content = ("", "") if self.reasoning is None else self.reasoning.finish()
        parts = self._parts(thought, content)
        return parts if self.tools is None else [*parts, *self.tools.finish()]

    def _parts(self, thought: str, content: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = [Reasoning(thought)] if thought else []
        if content:
            parts += [Content(content)] if self.tools is None else self.tools.push(content)
        return parts
