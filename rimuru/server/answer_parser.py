"""An answer's text, while it comes, as reasoning, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from rimuru.server.tool_calls import Content, Part, ToolCallParser, held_length

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


AnswerPart = Reasoning | Part


class ReasoningSplitter:
    """Splits off the text between <think> and </think> at the start of an answer.

    begun: the prompt's end has opened it already (the template wrote <think>).
    """

    def __init__(self, begun: bool) -> None:
        self._state = "thinking" if begun else "start"
        self._held = ""
        self._stripping = begun

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
            if self._held:
                self._state = "content"
        if self._state == "content":
            content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """End of the answer: what was held back."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return held.rstrip(), ""
        return ("", "") if self._state == "after" else ("", held)

    def _look_for_start(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(THINK):
            self._state, self._held, self._stripping = "thinking", stripped[len(THINK) :], True
        elif not THINK.startswith(stripped):
            self._state = "content"

    def _think(self) -> str:
        if self._stripping:
            self._held = self._held.lstrip()
            self._stripping = not self._held
        at = self._held.find(END_THINK)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(END_THINK) :]
            self._state = "after"
            return text
        cut = len(self._held) - held_length(self._held, (END_THINK,))
        cut = len(self._held[:cut].rstrip())  # white space may turn out to be the end
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
