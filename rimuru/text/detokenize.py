"""Token ids to text while they are generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from rimuru.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text one by one. The pieces joined, with flush() at the end, are exactly decode() of all ids.

    continues: the ids go on a text (the answer to a prompt), so SentencePiece's prefix space is a real space and stays;
    False: they are a whole sequence, and the space goes away, as in Tokenizer.decode.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool = False, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strip_space = tokenizer.add_space_prefix and not continues
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this id completes; often all of its own, "" inside a character."""
        data = self._tokenizer.piece_bytes(token_id, self._special)
        if data and self._strip_space:
            self._strip_space = False
            data = data[1:] if data[:1] == b" " else data
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End of the ids: U+FFFD for a character that was cut off, else ""."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds stop strings in a stream of text and lets nothing of them through.

    The stop that is complete first ends the text; of several that end at the same character, the longest. How the text
    is cut into pieces makes no difference.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was found). After a find nothing is shown any more."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self._stopped = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown, True
        n_shown = len(self._held) - self._n_possible()
        shown, self._held = self._held[:n_shown], self._held[n_shown:]
        return shown, False

    def flush(self) -> str:
        """End of the text: what was held back because it could have become a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _n_possible(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for n in range(min(len(self._held), len(self._stops[0]) - 1), 0, -1):
            tail = self._held[-n:]
            if any(stop.startswith(tail) for stop in self._stops):
                return n
        return 0
