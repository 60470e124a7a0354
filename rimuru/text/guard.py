"""Keeps control tokens that people type into messages from acting as control tokens.

A template mixes its own markup with message text, and afterwards nobody can tell which is which. So, before the
template runs, the first character of every control-token text inside the messages is replaced by a stand-in: one
private-use character per replaced character. Lengths stay, so templates may slice, strip, join and test as they like.
After rendering, a control token that is still spelled out was written by the template; the stand-ins are put back when
the text between such tokens is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rimuru.text.arguments import JsonArguments

_FIRST_STAND_IN = 0x10F000
_LAST_STAND_IN = 0x10FFFD


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat. `marked` has stand-ins for characters where a control token must not begin."""

    marked: str
    stand_ins: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What the model is asked, as people read it."""
        return self.unmark(self.marked)

    def unmark(self, piece: str) -> str:
        """Put the replaced characters of a piece of `marked` back."""
        for stand_in, character in self.stand_ins.items():
            piece = piece.replace(stand_in, character)
        return piece

    def segments(self) -> list[tuple[str, bool]]:
        """The text in pieces of (text, trusted); a control token may begin at characters of trusted pieces only."""
        if not self.stand_ins:
            return [(self.marked, True)] if self.marked else []
        pieces = re.split("([" + "".join(map(re.escape, self.stand_ins)) + "])", self.marked)
        return [(self.stand_ins.get(piece, piece), piece not in self.stand_ins) for piece in pieces if piece]


class Guard:
    """Marks the strings of one request. `values`: everything that goes into the template from outside."""

    def __init__(self, control_texts: Iterable[str], values: object) -> None:
        self._texts = sorted(filter(None, control_texts), key=len, reverse=True)
        used = {character for text in _strings(values) if not text.isascii() for character in text}
        free = (c for c in map(chr, range(_FIRST_STAND_IN, _LAST_STAND_IN)) if c not in used)
        firsts = sorted({text[0] for text in self._texts})
        self._stand_in_of = dict(zip(firsts, free, strict=False))
        # Stand-ins may not run out, even for a request that holds every private-use character there is.
        self._texts = [text for text in self._texts if text[0] in self._stand_in_of]
        self._pattern = _starts_pattern(self._texts)

    @property
    def stand_ins(self) -> dict[str, str]:
        """Stand-in -> the character it was put for."""
        return {stand_in: character for character, stand_in in self._stand_in_of.items()}

    def mark(self, value: object, keep: frozenset[str] = frozenset()) -> object:
        """A copy of strings, lists and mappings in which no control token of `value` is spelled out.

        Keys of mappings are marked like values. keep: token texts that stay as they are.
        """
        if isinstance(value, str):
            return self._mark_text(value, keep)
        if isinstance(value, JsonArguments):
            marked = {str(self.mark(key, keep)): self.mark(item, keep) for key, item in value.items()}
            return JsonArguments(marked, self._mark_text(value.text, keep))
        if isinstance(value, Mapping):
            return {self.mark(key, keep): self.mark(item, keep) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item, keep) for item in value]
        return value

    def _mark_text(self, text: str, keep: frozenset[str]) -> str:
        texts = [t for t in self._texts if t not in keep] if keep else self._texts
        pattern = _starts_pattern(texts) if keep else self._pattern
        if pattern is None:
            return text
        marked = pattern.sub(lambda match: self._stand_in_of[match.group()], text)
        # A token that begins at the end of this string could be completed by what the template puts after it.
        for at in range(max(0, len(text) - len(texts[0]) + 1), len(text)):
            if text[at] in self._stand_in_of and any(token.startswith(text[at:]) for token in texts):
                marked = marked[:at] + self._stand_in_of[text[at]] + marked[at + 1 :]
        return marked


def _starts_pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Matches the first character of every token text, also of texts that lie inside or across another."""
    if not texts:
        return None
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[0], []).append(re.escape(text[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in tails.items()))


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value, JsonArguments):
            yield value.text
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
