"""Tool calls in the text of an answer, for the families of models that write them, while it streams.

A parser takes text in any pieces and gives Content, CallStart and CallArguments. What it gives does not depend on how
the text was cut, so that a streamed answer and a whole one are equal: decisions are made on prefixes only.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

ToolFormat = Literal["hermes", "coder", "glm", "json"]
"""hermes: <tool_call>{"name", "arguments"}</tool_call> (Qwen, Granite, ...); coder: <function=..><parameter=..> inside
it (Qwen3-Coder); glm: name, <arg_key>, <arg_value> inside it; json: the answer is the object itself (Llama 3, ...)."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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


def tool_format(template_source: str) -> ToolFormat:
    """The format that a chat template teaches its model."""
    if "<arg_key>" in template_source:
        return "glm"
    if "<function=" in template_source:
        return "coder"
    return "hermes" if OPEN in template_source else "json"


def held_length(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of text with which one of the tags begins (but which is not all of it)."""
    for n in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-n:]) for tag in tags):
            return n
    return 0


class _Body(Protocol):
    """Parses what stands inside one call. `push` gives parts; `rest` is not None once the call's end was seen."""

    rest: str | None

    def push(self, text: str) -> list[Part]: ...
    def finish(self) -> list[Part]: ...


class ToolCallParser:
    """Splits an answer into text and calls."""

    def __init__(self, fmt: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool = True) -> None:
        self.fmt, self.parallel = fmt, parallel
        self.parameters = {str(f["name"]): _properties(f) for f in map(function_of, tools)}
        self.n_calls = 0
        self._held = ""
        self._body: _Body | None = None
        self._after_call = False
        self._any_content = False

    def push(self, text: str) -> list[Part]:
        """The parts that this piece of text completes."""
        parts: list[Part] = []
        self._held += text
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """End of the answer: what was held back, and what an unfinished call still gives."""
        parts: list[Part] = []
        if self._body is not None:
            parts += self._body.finish()
            self._body = None
        self._give_content(self._held, parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Use up some of the held text; False when more is needed."""
        if self._body is not None:
            text, self._held = self._held, ""
            parts += self._body.push(text)
            if self._body.rest is None:
                return False
            self._held, self._body = self._body.rest, None
            return bool(self._held)
        if self.fmt == "json":
            return self._advance_plain(parts)
        at = self._held.find(OPEN)
        if at < 0:
            cut = len(self._held) - held_length(self._held, (OPEN,))
            cut = len(self._held[:cut].rstrip())  # white space before a call is no text
            self._give_content(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        self._give_content(self._held[:at].rstrip(), parts)
        self._held = self._held[at + len(OPEN) :]
        self._body = self._new_body()
        return True

    def _advance_plain(self, parts: list[Part]) -> bool:
        """Bare JSON counts as a call only where the answer (or what is between calls) begins with `{`."""
        stripped = self._held.lstrip(" \n\r\t;" if self.n_calls else " \n\r\t")
        if self._any_content or (stripped and not stripped.startswith("{")):
            self._give_content(self._held, parts)
            self._held = ""
            return False
        if not stripped:
            return False
        self._held, self._body = stripped, _JsonBody(self, "")
        return True

    def _new_body(self) -> _Body:
        if self.fmt == "coder":
            return _TaggedBody(self, _CODER_NAME, _CODER_PARAMETER, strip_line_feeds=True)
        if self.fmt == "glm":
            return _TaggedBody(self, _GLM_NAME, _GLM_PARAMETER, strip_line_feeds=False)
        return _JsonBody(self, CLOSE)

    def _give_content(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip()  # line feeds between calls are no text, however the answer is cut
        if text:
            self._after_call = False
            self._any_content = True
            parts.append(Content(text))

    def start(self, name: str) -> tuple[int, list[Part]]:
        """Number of the next call and its first part; no parts where only one call is wanted."""
        index = self.n_calls
        self.n_calls += 1
        self._after_call = True
        if index and not self.parallel:
            return -1, []
        return index, [CallStart(index, "call_" + uuid.uuid4().hex[:24], name)]

    def arguments(self, index: int, text: str) -> list[Part]:
        return [CallArguments(index, text)] if index >= 0 and text else []


_JSON_START = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class _JsonBody:
    """{"name": ..., "arguments": {...}}. In that order the arguments stream as they are written; in any other the
    whole object is awaited. `close`: the tag that ends the call, "" where the object itself does."""

    def __init__(self, parser: ToolCallParser, close: str) -> None:
        self.parser, self.close = parser, close
        self.rest: str | None = None
        self._text = ""
        self._index: int | None = None
        self._scan = _JsonScan()
        self._done = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._index is None and not self._done:
            return self._begin()
        return self._go_on()

    def _begin(self) -> list[Part]:
        match = _JSON_START.match(self._text)
        if match is not None and (self.close or match.group(1) in self.parser.parameters):
            self._index, parts = self.parser.start(match.group(1))
            self._text = self._text[match.end() :]
            return parts + self._go_on()
        end = self._find_close()
        if end is None:
            return []
        body, self.rest = self._text[: end[0]], self._text[end[1] :]
        return self._whole(body)

    def _find_close(self) -> tuple[int, int] | None:
        """(end of the body, start of what follows), or None while it is open."""
        if not self.close:
            end = _JsonScan().end_of(self._text)
            return None if end is None else (end, end)
        at = self._text.find(self.close)
        return None if at < 0 else (at, at + len(self.close))

    def _go_on(self) -> list[Part]:
        parts: list[Part] = []
        assert self._index is not None
        if not self._done:
            end = self._scan.end_of(self._text)
            taken = len(self._text) if end is None else end
            parts += self.parser.arguments(self._index, self._text[:taken])
            self._text = self._text[taken:]
            self._done = end is not None
        if self._done:
            self._find_rest()
        return parts

    def _find_rest(self) -> None:
        if self.close:
            at = self._text.find(self.close)
            self.rest = None if at < 0 else self._text[at + len(self.close) :]
        elif "}" in self._text:
            self.rest = self._text[self._text.index("}") + 1 :]

    def _whole(self, body: str) -> list[Part]:
        """A body that did not begin as expected: any JSON with a name, or it is no call but text."""
        call = _loads(body)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or (not self.close and name not in self.parser.parameters):
            return self._as_content(body)
        arguments = call.get("arguments", call.get("parameters", {}))
        parsed = _loads(arguments) if isinstance(arguments, str) else arguments
        self._index, parts = self.parser.start(name)
        text = json.dumps(parsed if isinstance(parsed, dict) else {}, ensure_ascii=False)
        return parts + self.parser.arguments(self._index, text)

    def _as_content(self, body: str) -> list[Part]:
        self.parser._any_content = True
        return [Content(f"{OPEN}{body}{self.close}" if self.close else body)]

    def finish(self) -> list[Part]:
        if self._index is not None:
            return []
        body, self._text = self._text, ""
        if not body.strip():
            return []
        return self._whole(body) if _loads(body) is not None else self._unfinished(body)

    def _unfinished(self, body: str) -> list[Part]:
        self.parser._any_content = True
        return [Content((OPEN if self.close else "") + body)]


class _JsonScan:
    """Finds the end of a JSON object or array; goes on where the last call stopped."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_of(self, text: str) -> int | None:
        """Position after the bracket that closes the first one; None where it is not in this text."""
        for at, c in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


_CODER_NAME = re.compile(r"\s*<function=([^>\n]+)>")
_CODER_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*(?=<)")
_GLM_PARAMETER = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class _TaggedBody:
    """A name and parameters between tags; each parameter is given as soon as its end has come."""

    def __init__(
        self, parser: ToolCallParser, name: re.Pattern[str], parameter: re.Pattern[str], strip_line_feeds: bool
    ) -> None:
        self.parser, self._name_pattern, self._parameter_pattern = parser, name, parameter
        self.strip_line_feeds = strip_line_feeds
        self.rest: str | None = None
        self._text = ""
        self._name: str | None = None
        self._index = -1
        self._n_parameters = 0

    def push(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        if self._name is None:
            match = self._name_pattern.match(self._text)
            if match is None:
                return self._no_call()
            self._name = match.group(1).strip()
            self._text = self._text[match.end() :]
            self._index, parts = self.parser.start(self._name)
        while (match := self._parameter_pattern.match(self._text)) is not None:
            parts += self._parameter(match.group(1).strip(), match.group(2))
            self._text = self._text[match.end() :]
        at = self._text.find(CLOSE)
        if at >= 0 and not self._text.lstrip().startswith(("<parameter=", "<arg_key>")):
            self.rest = self._text[at + len(CLOSE) :]
            parts += self._end()
        return parts

    def _parameter(self, key: str, value: str) -> list[Part]:
        if self.strip_line_feeds:
            value = value.removeprefix("\n").removesuffix("\n")
        schema_type = self.parser.parameters.get(self._name or "", {}).get(key)
        known = None if schema_type == "string" else _loads(value.strip())
        is_value = known is not None or (schema_type != "string" and value.strip() == "null")
        text = json.dumps(known if is_value else value, ensure_ascii=False)
        lead = "{" if self._n_parameters == 0 else ", "
        self._n_parameters += 1
        return self.parser.arguments(self._index, f"{lead}{json.dumps(key, ensure_ascii=False)}: {text}")

    def _end(self) -> list[Part]:
        return self.parser.arguments(self._index, "}" if self._n_parameters else "{}")

    def _no_call(self) -> list[Part]:
        at = self._text.find(CLOSE)
        if at < 0:
            return []
        body, self.rest = self._text[:at], self._text[at + len(CLOSE) :]
        return [Content(f"{OPEN}{body}{CLOSE}")]

    def finish(self) -> list[Part]:
        if self._name is None:
            return [Content(OPEN + self._text)] if self._text.strip() else []
        return self._end()


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function object of an OpenAI tool (also where it is given without its wrapper)."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _properties(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}


def _loads(text: str) -> Any:
    """JSON value, or None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
