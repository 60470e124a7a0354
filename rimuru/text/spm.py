"""SentencePiece's BPE by score (`tokenizer.ggml.model` = `llama`).

From single characters on, the adjacent pair whose text is the token with the highest score is merged, leftmost first
among equals, until no pair is a token. What is no token in the end is written as byte tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache

from rimuru.text.byte_bpe import SPACE_MARK

_MAX_CACHED_CHARACTERS = 48


class SentencePieceBpe:
    """Encodes text without special tokens. Thread-safe."""

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Sequence[float],
        hidden: AbstractSet[int],
        byte_ids: Sequence[int | None],
        unknown_id: int | None,
        add_space_prefix: bool,
    ) -> None:
        """ids: token text -> id; scores by id; `hidden` ids are never merged to (control, byte and unknown tokens).

        byte_ids: the id that stands for each of the 256 bytes, or None.
        """
        self._ids = {text: token_id for text, token_id in ids.items() if token_id not in hidden}
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._add_space_prefix = add_space_prefix
        # A merge can cross the border "character, space mark" only where some token does. Everywhere else the text
        # may be cut there without changing a result, which makes the work linear and words cacheable.
        self._joined_to_space = {
            text[i - 1]
            for text in self._ids
            if SPACE_MARK in text[1:]
            for i in range(1, len(text))
            if text[i] == SPACE_MARK
        }
        self._cached_word = lru_cache(maxsize=1 << 15)(self._merge_word)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Ids of a text piece; one at the start or right after a special token gets the prefix space."""
        if not text:
            return []
        if self._add_space_prefix and after_special:
            text = " " + text
        out: list[int] = []
        for word in self._words(text.replace(" ", SPACE_MARK)):
            out += self._cached_word(word) if len(word) <= _MAX_CACHED_CHARACTERS else self._merge_word(word)
        return out

    def _words(self, text: str) -> list[str]:
        words: list[str] = []
        start = 0
        at = text.find(SPACE_MARK, 1)
        while at >= 0:
            before = text[at - 1]
            if before != SPACE_MARK and before not in self._joined_to_space:
                words.append(text[start:at])
                start = at
            at = text.find(SPACE_MARK, at + 1)
        words.append(text[start:])
        return words

    def _merge_word(self, word: str) -> tuple[int, ...]:
        whole = self._ids
        n = len(word)
        # Symbol i covers word[i : end[i]]; end[i] == 0 marks a symbol that was merged into the one on its left.
        end = list(range(1, n + 1))
        before = list(range(-1, n - 1))
        heap: list[tuple[float, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            token_id = whole.get(word[left : end[right]])
            if token_id is not None:
                heapq.heappush(heap, (-self._scores[token_id], left, right, end[right]))

        for i in range(n - 1):
            consider(i, i + 1)
        while heap:
            _, left, right, stop = heapq.heappop(heap)
            if end[left] != right or end[right] != stop:  # one of the two has changed since
                continue
            end[left], end[right] = stop, 0
            if stop < n:
                before[stop] = left
                consider(left, stop)
            if before[left] >= 0:
                consider(before[left], left)
        return tuple(token_id for i in range(n) if end[i] for token_id in self._piece_ids(word[i : end[i]]))

    def _piece_ids(self, piece: str) -> list[int]:
        token_id = self._ids.get(piece)
        if token_id is not None:
            return [token_id]
        found: list[int] = []
        for byte in piece.encode("utf-8"):
            byte_id = self._byte_ids[byte]
            if byte_id is None:
                byte_id = self._unknown_id
            if byte_id is not None:
                found.append(byte_id)
        return found
