"""What stands between the marks of a block of tool calls: JSON, or headers with JSON (tags and Python have files of
their own)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rimuru.server.answer_parts import Content, Part
from rimuru.server.tool_formats import ToolFormat

SPACE = " \n\r\t"
NAME = r"[A-Za-z0-9_.:/\-]+"
_JSON_START = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class Calls(Protocol):
    """Where blocks report their calls: tool_calls.CallCounter."""

    @property
    def parameters(self) -> Mapping[str, Mapping[str, frozenset[str]]]: ...
    def start(self, name: str, own_id: str = "") -> tuple[int, list[Part]]: ...
    def arguments(self, index: int, text: str) -> list[Part]: ...


class JsonScan:
    """Finds the end of a value in brackets; goes on where the last call stopped."""

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._depth, self._quotes = depth, quotes
        self._quote = ""
        self._escaped = False

    def end_of(self, text: str) -> int | None:
        """Position after the bracket that closes the first one; None where it is not in this text."""
        for at, c in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == self._quote:
                    self._quote = ""
            elif c in self._quotes:
                self._quote = c
            elif c in "{[(":
                self._depth += 1
            elif c in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class Block:
    """One block of calls, from behind its opening mark. `rest` is what follows it, once its end was seen.

    A block that turns out to hold no call is text: its opening mark and all that was read of it.
    """

    def __init__(self, fmt: ToolFormat, calls: Calls, opening: str) -> None:
        """opening: the text of the mark, with the white space before it."""
        self.fmt, self.calls = fmt, calls
        self.rest: str | None = None
        self.has_begun = False
        self._text = ""
        self._read = opening
        self._step: Callable[[list[Part]], bool] = self._begin
        self._index = -1
        self._scan = JsonScan()

    def _begin(self, parts: list[Part]) -> bool:
        """The first step: what stands right behind the opening mark."""
        raise AssertionError("every kind of block says how it begins")

    def push(self, text: str) -> list[Part]:
        """The parts that this piece completes. A step uses up some text and says whether to go on."""
        self._text += text
        parts: list[Part] = []
        while self.rest is None and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End of the answer inside the block: what broke off before a call had its name is text."""
        text, self._text = self._text, ""
        read, self._read = self._read, ""
        if self.has_begun and (not self._is_nameless() or not text.strip(SPACE + ",]")):
            return []
        return [Content(read + text)] if read + text else []

    # ---- for the steps
    def _is_nameless(self) -> bool:
        """Whether the text that is held may become a call whose name is not known yet."""
        return self._step == self._begin

    def _take(self, n: int) -> str:
        taken, self._text = self._text[:n], self._text[n:]
        if not self.has_begun:
            self._read += taken
        return taken

    def _skip(self, characters: str) -> None:
        self._take(len(self._text) - len(self._text.lstrip(characters)))

    def _fail(self, parts: list[Part]) -> bool:
        """No call, or no further one: what was read is text, and so is what follows."""
        if not self.has_begun:
            if not self._read:
                self._take(1)
            parts.append(Content(self._read))
            self._read = ""
        self.rest = self._text
        return False

    def _starts(self, *marks: str) -> str | None:
        """The mark that comes next; "" where more text may make it one; None where there is none."""
        for mark in sorted(filter(None, marks), key=len, reverse=True):
            if self._text.startswith(mark):
                return mark
        return "" if any(mark.startswith(self._text) for mark in marks if mark) else None

    def _start(self, parts: list[Part], name: str, own_id: str = "") -> None:
        self.has_begun = True
        self._read = ""
        self._index, started = self.calls.start(name, own_id)
        self._scan = JsonScan()
        parts += started

    def _stream_arguments(self, parts: list[Part]) -> bool:
        """Pass on the object of arguments as it comes; True when it has ended."""
        end = self._scan.end_of(self._text)
        parts += self.calls.arguments(self._index, self._take(len(self._text) if end is None else end))
        return end is not None

    def _end(self, parts: list[Part]) -> bool:
        """Behind the last call: the closing mark, which may be missing."""
        if not self.has_begun:
            return self._fail(parts)
        if self.fmt.close:
            self._skip(SPACE + "}]")
            mark = self._starts(self.fmt.close)
            if mark == "":
                return False
            self._take(len(mark or ""))
        self.rest = self._text
        return False


class JsonBlock(Block):
    """{"name": ..., "arguments": {...}}, or a list of such. In that order the arguments stream as they are written; in
    any other the whole object is awaited. known_only: other names than those of the tools are text."""

    def __init__(self, fmt: ToolFormat, calls: Calls, opening: str, known_only: bool = False) -> None:
        super().__init__(fmt, calls, opening)
        self._known_only = known_only
        self._in_list = False
        self._n_scanned = 0

    def _begin(self, parts: list[Part]) -> bool:
        self._skip(SPACE)
        if not self._text:
            return False
        if self._text[0] not in "[{":
            return self._fail(parts)
        self._in_list = self._text[0] == "["
        self._take(int(self._in_list))
        self._step = self._item
        return True

    def _item(self, parts: list[Part]) -> bool:
        if not self._n_scanned:
            self._skip(SPACE + ",")
        if not self._text:
            return False
        if self._text[0] == "]" and self._in_list:
            self._take(1)
            self._step = self._end
            return True
        if self._text[0] != "{":
            return self._fail(parts)
        match = _JSON_START.match(self._text)
        if match is not None and self._accepts(match.group(1)):
            self._start(parts, match.group(1))
            self._take(match.end())
            self._step, self._n_scanned = self._arguments, 0
            return True
        return self._whole(parts)

    def _whole(self, parts: list[Part]) -> bool:
        """An object that does not begin as expected is a call if it has a name."""
        if not self._n_scanned:
            self._scan = JsonScan()
        end = self._scan.end_of(self._text[self._n_scanned :])
        if end is None:
            self._n_scanned = len(self._text)
            return False
        end += self._n_scanned
        self._n_scanned = 0
        found = named_call(loads(self._text[:end]))
        if found is None or not self._accepts(found[0]):
            self._take(0 if self.has_begun else end)
            return self._fail(parts)
        self._start(parts, found[0])
        self._take(end)
        parts += self.calls.arguments(self._index, json.dumps(found[1], ensure_ascii=False))
        self._step = self._item if self._in_list else self._next
        return True

    def _arguments(self, parts: list[Part]) -> bool:
        if not self._stream_arguments(parts):
            return False
        self._scan = JsonScan(depth=1)
        self._step = self._tail
        return True

    def _tail(self, parts: list[Part]) -> bool:
        """What the object holds behind its arguments."""
        end = self._scan.end_of(self._text)
        self._take(len(self._text) if end is None else end)
        if end is None:
            return False
        self._step = self._item if self._in_list else self._next
        return True

    def _next(self, parts: list[Part]) -> bool:
        """Some models write several objects into one pair of marks."""
        if self.fmt.close:
            self._skip(SPACE)
            if self._text[:1] == "{":
                self._step = self._item
                return True
            if not self._text:
                return False
        self._step = self._end
        return True

    def _accepts(self, name: str) -> bool:
        return not self._known_only or name in self.calls.parameters

    def _is_nameless(self) -> bool:
        return self._step in (self._begin, self._item)


class MistralBlock(JsonBlock):
    """A list of objects, or a name and its arguments."""

    _header = re.compile(rf"({NAME})(?:\[CALL_ID\]([A-Za-z0-9]+))?(?:\[ARGS\])?\s*(?=\{{)")
    _header_so_far = re.compile(rf"{NAME}(?:\[[A-Z_]*\]?[A-Za-z0-9]*){{0,2}}\s*")

    def _begin(self, parts: list[Part]) -> bool:
        self._skip(SPACE)
        if not self._text or self._text[0] in "[{":
            return super()._begin(parts)
        match = self._header.match(self._text)
        if match is None:
            return False if self._header_so_far.fullmatch(self._text) else self._fail(parts)
        self._start(parts, match.group(1), match.group(2) or "")
        self._take(match.end())
        self._step = self._named_arguments
        return True

    def _named_arguments(self, parts: list[Part]) -> bool:
        if not self._stream_arguments(parts):
            return False
        self._step = self._end
        return True


class HeadedBlock(Block):
    """Calls between marks of their own: a header with the name, and the object of arguments."""

    _headers: Mapping[str, re.Pattern[str]] = {
        "deepseek": re.compile(
            rf"\s*(?P<id>)(?:function<｜tool▁sep｜>(?P<name>{NAME})|(?P<name2>{NAME})\s*<｜tool▁sep｜>)"
            r"\s*(?:```(?:json)?\s*)?(?=\{)"
        ),
        "kimi": re.compile(
            rf"\s*(?P<id>(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?)(?P<name2>)\s*<\|tool_call_argument_begin\|>"
            r"\s*(?=\{)"
        ),
    }

    def _begin(self, parts: list[Part]) -> bool:
        self._skip(SPACE)
        mark = self._starts(self.fmt.call_open, self.fmt.close)
        if mark == "":
            return False
        if mark is None or (mark == self.fmt.close and not self.has_begun):
            return self._fail(parts)
        self._take(len(mark))
        if mark == self.fmt.close:
            self.rest = self._text
            return False
        self._step = self._header
        return True

    def _header(self, parts: list[Part]) -> bool:
        pattern = self._headers[self.fmt.name]
        match = pattern.match(self._text)
        if match is not None:
            self._start_headed(parts, match)
            self._take(match.end())
            self._step = self._arguments
            return True
        end = self._text.find(self.fmt.call_close)
        if end < 0:
            return self._fail(parts) if "{" in self._text or self.fmt.close in self._text else False
        without = pattern.match(self._text[:end].rstrip(SPACE + "`") + "{")
        if without is None:
            return self._fail(parts)
        self._start_headed(parts, without)
        parts += self.calls.arguments(self._index, "{}")
        self._take(end)
        self._step = self._tail
        return True

    def _is_nameless(self) -> bool:
        return self._step in (self._begin, self._header)

    def _start_headed(self, parts: list[Part], match: re.Match[str]) -> None:
        self._start(parts, match["name"] or match["name2"], match["id"])

    def _arguments(self, parts: list[Part]) -> bool:
        if not self._stream_arguments(parts):
            return False
        self._step = self._tail
        return True

    def _tail(self, parts: list[Part]) -> bool:
        """The end of a call, behind a fence that may be there."""
        self._skip(SPACE + "`")
        mark = self._starts(self.fmt.call_close, self.fmt.call_open, self.fmt.close)
        if mark == "":
            return False
        if mark == self.fmt.call_close:
            self._take(len(mark))
        self._step = self._begin
        return True


def named_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of an object that is a call in one of the usual shapes."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    parsed = loads(arguments) if isinstance(arguments, str) else arguments
    return name, parsed if isinstance(parsed, dict) else {}


def loads(text: str) -> Any:
    """JSON value, or None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
