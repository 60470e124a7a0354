"""Tool calls written as a name and parameters between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rimuru.server.answer_parts import Part, held_length
from rimuru.server.tool_blocks import NAME, SPACE, Block, Calls, loads
from rimuru.server.tool_formats import ToolFormat


class TaggedBlock(Block):
    """A name and parameters between tags. Parameters that are strings stream, others are given when they have ended."""

    def __init__(self, fmt: ToolFormat, calls: Calls, opening: str) -> None:
        super().__init__(fmt, calls, opening)
        self._name_pattern, self._name_so_far, self._key_open, self._key_pattern, self._value_close = _TAGS[fmt.name]
        self._line_feeds = fmt.name == "coder"
        self._name = self._key = ""
        self._n_parameters = 0
        self._at_start = False
        self._known_only = not opening.strip()

    def _begin(self, parts: list[Part]) -> bool:
        match = self._name_pattern.match(self._text)
        if match is None:
            return False if self._name_so_far.fullmatch(self._text) else self._fail(parts)
        if self._known_only and match.group(1) not in self.calls.parameters:
            return self._fail(parts)
        self._name = match.group(1).strip("\"' ")
        self._n_parameters = 0
        self._start(parts, self._name)
        self._take(match.end())
        self._step = self._parameter
        return True

    def _parameter(self, parts: list[Part]) -> bool:
        """Between parameters: the next one, or the end of the call."""
        self._skip(SPACE)
        mark = self._starts(self._key_open, self.fmt.call_close, self.fmt.close)
        if mark == "":
            return False
        if mark == self._key_open:
            match = self._key_pattern.match(self._text)
            if match is None:
                return False
            self._key = match.group(1).strip("\"' ")
            self._take(match.end())
            self._step, self._at_start = self._value, True
            return True
        if mark is None and self._text[0] != "<":  # words between parameters mean nothing
            self._take(len(self._text) if (at := self._text.find("<")) < 0 else at)
            return True
        parts += self._close_call()
        self._take(len(mark) if mark == self.fmt.call_close else 0)
        self._step = self._behind_call
        return True

    def _behind_call(self, parts: list[Part]) -> bool:
        self._skip(SPACE)
        mark = self._starts(self.fmt.call_open, self.fmt.close)
        if mark == "":
            return False
        if self.fmt.call_open and mark == self.fmt.call_open:
            self._step = self._begin
            return True
        self._take(len(mark or ""))
        self.rest = self._text
        return False

    def _value(self, parts: list[Part]) -> bool:
        types = self.calls.parameters.get(self._name, {}).get(self._key, frozenset())
        end = self._text.find(self._value_close)
        if types == {"string"}:
            return self._stream_string(end, parts)
        if end < 0:
            return False
        value = self._take(end)
        if self._line_feeds:
            value = value.removeprefix("\n").removesuffix("\n")
        parts += self.calls.arguments(self._index, self._lead() + json.dumps(typed(value, types), ensure_ascii=False))
        return self._end_value()

    def _stream_string(self, end: int, parts: list[Part]) -> bool:
        if self._at_start:
            if not self._text:
                return False
            parts += self.calls.arguments(self._index, self._lead() + '"')
            self._at_start = False
            if self._line_feeds and self._text[0] == "\n":
                self._take(1)
                end = end - 1 if end >= 0 else end
        ends = ("\n" + self._value_close, self._value_close) if self._line_feeds else (self._value_close,)
        cut = end if end >= 0 else len(self._text) - held_length(self._text, ends)
        text = self._take(cut)
        if end >= 0 and self._line_feeds:
            text = text.removesuffix("\n")
        parts += self.calls.arguments(self._index, json.dumps(text, ensure_ascii=False)[1:-1])
        if end < 0:
            return False
        parts += self.calls.arguments(self._index, '"')
        return self._end_value()

    def _end_value(self) -> bool:
        self._take(len(self._value_close))
        self._step = self._parameter
        return True

    def _lead(self) -> str:
        self._n_parameters += 1
        return ("{" if self._n_parameters == 1 else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _close_call(self) -> list[Part]:
        return self.calls.arguments(self._index, "}" if self._n_parameters else "{}")

    def finish(self) -> list[Part]:
        """A call that ended without its mark is whole; one whose value breaks off stays open, so that nobody takes
        half a value for a whole one."""
        if self._step == self._parameter:
            return self._close_call()
        if self._step == self._value and not self._at_start:
            return self.calls.arguments(self._index, json.dumps(self._text, ensure_ascii=False)[1:-1])
        return super().finish()


_TAGS: Mapping[str, tuple[re.Pattern[str], re.Pattern[str], str, re.Pattern[str], str]] = {
    "coder": (
        re.compile(r"\s*<function=([^<>\n]+)>"),
        re.compile(r"\s*(?:<|<f|<fu|<fun|<func|<funct|<functi|<functio|<function|<function=[^<>\n]*)?"),
        "<parameter=",
        re.compile(r"<parameter=([^<>\n]+)>"),
        "</parameter>",
    ),
    "minimax": (
        re.compile(r'\s*<invoke name="?([^"<>\n]+)"?>'),
        re.compile(r'\s*(?:<|<i|<in|<inv|<invo|<invok|<invoke|<invoke (?:n|na|nam|name|name="?[^"<>\n]*"?)?)?'),
        "<parameter name=",
        re.compile(r'<parameter name="?([^"<>\n]+)"?>'),
        "</parameter>",
    ),
    "glm": (
        re.compile(rf"\s*({NAME})\s*(?=<)"),
        re.compile(rf"\s*(?:{NAME}\s*)?"),
        "<arg_key>",
        re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
        "</arg_value>",
    ),
}
"""Per syntax: a call's name, what may still become one, where a parameter begins, its key, the end of its value."""


def typed(text: str, types: frozenset[str]) -> Any:
    """The value of a parameter's text: JSON where it is some and the parameter may be that, else the text itself."""
    stripped = text.strip()
    if (stripped == "null" or (stripped == "None" and types)) and ("null" in types or "string" not in types):
        return None
    if "string" in types:
        return text
    if "boolean" in types and stripped in ("True", "False"):
        return stripped == "True"
    value = loads(stripped)
    return text if value is None else value
