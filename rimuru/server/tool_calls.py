"""Tool calls in the text of an answer, while it streams. How families write them: tool_formats.py.

A parser takes text in any pieces and gives Content, CallStart and CallArguments. What it gives does not depend on how
the text was cut, so that a streamed answer and a whole one are equal: decisions are made on prefixes only.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rimuru.server.answer_parts import CallArguments, CallStart, Content, Part, first_of, held_length
from rimuru.server.tool_blocks import Block, HeadedBlock, JsonBlock, MistralBlock
from rimuru.server.tool_formats import ToolFormat, json_types
from rimuru.server.tool_python import PythonBlock
from rimuru.server.tool_tags import TaggedBlock

_ID_CHARACTERS = string.ascii_letters + string.digits
_BETWEEN_CALLS = " \n\r\t;,"
_BLOCKS: Mapping[str, type[Block]] = {
    "json": JsonBlock,
    "mistral": MistralBlock,
    "headed": HeadedBlock,
    "python": PythonBlock,
    "tagged": TaggedBlock,
}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function object of an OpenAI tool (also where it is given without its wrapper)."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


class CallCounter:
    """Numbers the calls of one answer, names them, and leaves out all but the first where one is wanted."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], parallel: bool, ids: str = "random") -> None:
        self.parallel, self.ids = parallel, ids
        self.parameters = {str(f["name"]): _properties(f) for f in map(function_of, tools)}
        self.n_calls = 0
        self._used: set[str] = set()

    def start(self, name: str, own_id: str = "") -> tuple[int, list[Part]]:
        """Number of the next call and its first part; no parts (and -1) where only one call is wanted."""
        index = self.n_calls
        self.n_calls += 1
        if index and not self.parallel:
            return -1, []
        return index, [CallStart(index, self._id(own_id), name)]

    def arguments(self, index: int, text: str) -> list[Part]:
        return [CallArguments(index, text)] if index >= 0 and text else []

    def _id(self, own_id: str) -> str:
        """The model's own id where its template shows it again (Kimi), else a new one."""
        if self.ids == "own" and own_id and own_id not in self._used:
            self._used.add(own_id)
            return own_id
        if self.ids == "nine":
            number, characters = uuid.uuid4().int, []
            for _ in range(9):
                number, at = divmod(number, len(_ID_CHARACTERS))
                characters.append(_ID_CHARACTERS[at])
            return "".join(characters)
        return "call_" + uuid.uuid4().hex[:24]


class ToolCallParser:
    """Splits an answer into text and calls, for all formats but harmony."""

    def __init__(self, fmt: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool = True) -> None:
        self.fmt = fmt
        self.calls = CallCounter(tools, parallel, fmt.ids)
        # A model may leave out the mark of the block before a call that has one of its own.
        self._opens = (*fmt.opens, fmt.call_open) if fmt.name == "coder" else fmt.opens
        self._held = ""
        self._block: Block | None = None
        self._after_call = False
        self._any_content = False

    @property
    def n_calls(self) -> int:
        return self.calls.n_calls

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
        if self._block is not None:
            self._run_block(lambda block: block.finish(), parts)
            self._block = None
        self._give_content(self._held, parts)
        self._held = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Use up some of the held text; False when more is needed."""
        if self._block is not None:
            text, self._held = self._held, ""
            self._run_block(lambda block: block.push(text), parts)
            if self._block.rest is None:
                return False
            self._held, self._block = self._block.rest, None
            return bool(self._held)
        if not self.fmt.opens:
            return self._advance_bare(parts)
        found = first_of(self._held, self._opens)
        if found is None:
            cut = len(self._held) - held_length(self._held, self._opens)
            cut = len(self._held[:cut].rstrip())  # white space before a call is no text
            self._give_content(self._held[:cut], parts)
            self._held = self._held[cut:]
            return False
        at, tag = found
        before = self._held[:at].rstrip()
        self._give_content(before, parts)
        end = at if tag == self.fmt.call_open else at + len(tag)
        self._block = _BLOCKS[self.fmt.kind](self.fmt, self.calls, self._held[len(before) : end])
        self._held = self._held[end:]
        return True

    def _advance_bare(self, parts: list[Part]) -> bool:
        """Bare JSON counts as a call only where the answer (or what is between calls) begins with a bracket."""
        stripped = self._held.lstrip(_BETWEEN_CALLS if self.n_calls else " \n\r\t")
        for stray in self.fmt.strays:
            if stray.startswith(stripped) and len(stripped) < len(stray) and not self._any_content:
                return False
            stripped = stripped.removeprefix(stray).lstrip()
        if self._any_content or (stripped and stripped[0] not in "{["):
            self._give_content(self._held if self._any_content else self._without_strays(), parts)
            self._held = ""
            return False
        if not stripped:
            return False
        lead = len(self._held) - len(stripped)
        self._block = JsonBlock(self.fmt, self.calls, self._held[:lead] if not self.fmt.strays else "", known_only=True)
        self._held = stripped
        return True

    def _without_strays(self) -> str:
        text = self._held
        for stray in self.fmt.strays:
            head = len(text) - len(text.lstrip())
            text = text[:head] + text[head:].removeprefix(stray)
        return text

    def _run_block(self, run: Callable[[Block], list[Part]], parts: list[Part]) -> None:
        assert self._block is not None
        for part in run(self._block):
            if isinstance(part, Content):
                self._give_content(part.text, parts)
            else:
                parts.append(part)
        self._after_call = self._after_call or self._block.has_begun

    def _give_content(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip()  # line feeds between calls are no text, however the answer is cut
        if text:
            self._after_call = False
            self._any_content = True
            parts.append(Content(text))


def _properties(function: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Name -> the JSON types that a parameter may have (none known: empty), in the schema's order."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(key): json_types(value) for key, value in properties.items()}
