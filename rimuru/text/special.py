"""Cuts text at special tokens: literal matches, the longest token text first, before any other rule."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

_ASCII_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    stop: int
    token_id: int


class SpecialTokens:
    """Finds the tokens of one set in text. Thread-safe.

    Where two matches overlap, the longer token wins; among equally long ones the leftmost. A token of `strip_left`
    (`strip_right`) swallows the ASCII white space before (after) it.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        strip_left: AbstractSet[int] = frozenset(),
        strip_right: AbstractSet[int] = frozenset(),
    ) -> None:
        """ids: literal text -> token id."""
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        self._strip_left = strip_left
        self._strip_right = strip_right
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self._ids:
            lengths[text[:2]].add(len(text))
        self._lengths = {head: frozenset(found) for head, found in lengths.items()}
        firsts = "".join(sorted({re.escape(head[0]) for head in lengths}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text as plain pieces (never empty) and token ids, in order."""
        at = 0
        for match in self._matches(text):
            stop = match.start
            if match.token_id in self._strip_left:
                while stop > at and text[stop - 1] in _ASCII_SPACE:
                    stop -= 1
            if stop > at:
                yield text[at:stop]
            yield match.token_id
            at = match.stop
            if match.token_id in self._strip_right:
                while at < len(text) and text[at] in _ASCII_SPACE:
                    at += 1
        if at < len(text):
            yield text[at:]

    def _matches(self, text: str) -> list[_Match]:
        if self._first is None:
            return []
        found: list[_Match] = []
        nothing: frozenset[int] = frozenset()
        for first in self._first.finditer(text):
            start = first.start()
            one, two = self._lengths.get(text[start], nothing), self._lengths.get(text[start : start + 2], nothing)
            for n in one | two:
                token_id = self._ids.get(text[start : start + n])
                if token_id is not None:
                    found.append(_Match(start, start + n, token_id))
        found.sort(key=lambda match: (match.start - match.stop, match.start))
        # Cells of 1 where a longer token already lies; a later match must not touch them.
        taken = bytearray(len(text)) if len(found) > 1 else bytearray()
        kept: list[_Match] = []
        for match in found:
            if len(found) > 1:
                if taken.find(1, match.start, match.stop) >= 0:
                    continue
                taken[match.start : match.stop] = b"\x01" * (match.stop - match.start)
            kept.append(match)
        kept.sort(key=lambda match: match.start)
        return kept
