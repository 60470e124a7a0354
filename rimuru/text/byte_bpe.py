"""BPE by merge rank over the `tokenizers` library: the byte-level kind (`gpt2`) and the character kind (`gemma4`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from rimuru.text.pretokenize import GEMMA4_PATTERN, PreTokenizer

MOST_LOCKED_CHARACTERS = 4096
"""A millisecond's work."""
SPACE_MARK = "\u2581"
"""Stands for a space in the tokens of SentencePiece and gemma4 vocabularies."""


def _byte_characters() -> list[str]:
    """GPT-2's table: the printable character that stands for each byte 0 to 255 in token texts."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_TO_CHARACTER = _byte_characters()
CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(BYTE_TO_CHARACTER)}


def byte_level_bytes(text: str) -> bytes:
    """The bytes that a byte-level token text stands for; characters outside GPT-2's table stand for themselves."""
    try:
        return bytes([CHARACTER_TO_BYTE[character] for character in text])
    except KeyError:
        return b"".join(
            bytes([CHARACTER_TO_BYTE[c]]) if c in CHARACTER_TO_BYTE else c.encode("utf-8", "surrogateescape")
            for c in text
        )


def parse_merges(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Merge lines "left right", cut at the first space from index 1 on. Repeated lines keep their first rank."""
    merges: dict[tuple[str, str], None] = {}
    for line in lines:
        left, space, right = line[1:].partition(" ")
        if space and right:
            merges.setdefault((line[0] + left, right))
    return list(merges)


def _producible(ids: Mapping[str, int], hidden: AbstractSet[int]) -> dict[str, int]:
    """The tokens that encoding may give. Those whose bytes are no UTF-8 (surrogate escapes here) stand for no text: a
    model may answer with them, and nothing is encoded to them."""
    return {text: i for text, i in ids.items() if i not in hidden and (text.isascii() or _is_utf8(text))}


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


class ByteLevelBpe:
    """Encodes text without special tokens. Thread-safe."""

    def __init__(
        self,
        ids: Mapping[str, int],
        n_vocab: int,
        hidden: AbstractSet[int],
        merge_lines: Iterable[str],
        kind: PreTokenizer,
    ) -> None:
        """ids: token text -> id below n_vocab; `hidden` ids are never produced from text (control tokens)."""
        vocab = _producible(ids, hidden)
        # The library wants every byte and every merge result to be a token. What the file lacks gets an id from
        # n_vocab on, and is written out byte by byte afterwards, as the format's rules say.
        self._n_vocab = n_vocab
        self._spelled: list[list[int]] = []
        real = dict(vocab)

        def add(text: str) -> None:
            vocab[text] = n_vocab + len(self._spelled)
            self._spelled.append([real[character] for character in text if character in real])

        for character in BYTE_TO_CHARACTER:
            if character not in vocab:
                add(character)
        merges = parse_merges(merge_lines)
        for left, right in merges:
            for text in (left, right, left + right):
                if text not in vocab:
                    add(text)
        self._library = LibraryTokenizer(models.BPE(vocab, merges, ignore_merges=kind.ignore_merges))
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        self._library.pre_tokenizer = pre_tokenizers.Sequence(steps)

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Ids of a text piece; for this kind it makes no difference what stands before it."""
        del after_special
        ids = _library_ids(self._library, text)
        if self._spelled and ids and max(ids) >= self._n_vocab:
            return [part for i in ids for part in (self._spelled[i - self._n_vocab] if i >= self._n_vocab else (i,))]
        return ids


def _library_ids(library: LibraryTokenizer, text: str) -> list[int]:
    """The library's ids of a text. Its `encode` holds the interpreter's lock until it is done, seconds for megabytes;
    for a batch, here of one, it lets other threads run."""
    if len(text) <= MOST_LOCKED_CHARACTERS:
        return library.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]
    encode_batch = getattr(library, "encode_batch_fast", library.encode_batch)  # which leaves out offsets, where it is
    return encode_batch([text], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]


class CharacterBpe:
    """The `gemma4` kind: BPE on characters, spaces as U+2581, unknown characters as byte tokens `<0xXX>`."""

    def __init__(self, ids: Mapping[str, int], hidden: AbstractSet[int], merge_lines: Iterable[str]) -> None:
        vocab = _producible(ids, hidden)
        merges = [(a, b) for a, b in parse_merges(merge_lines) if a in vocab and b in vocab and a + b in vocab]
        self._library = LibraryTokenizer(models.BPE(vocab, merges, byte_fallback=True))
        self._library.normalizer = normalizers.Replace(" ", SPACE_MARK)
        self._library.pre_tokenizer = pre_tokenizers.Split(Regex(GEMMA4_PATTERN), "isolated")

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Ids of a text piece; for this kind it makes no difference what stands before it."""
        del after_special
        ids = _library_ids(self._library, text)
        return ids
