"""What is kept of generated stories: normalised, filtered, no two alike."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable

import numpy as np

MIN_CHARS, MAX_CHARS = 240, 1600
MAX_SENTENCE_WORDS = 32
SHINGLE_WORDS, N_HASHES, N_BANDS = 5, 16, 4
"""Stories that share a band of N_HASHES / N_BANDS minimal hashes of their shingles count as alike (similarity ~0.7)."""

_CHARACTERS = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": " - ", "\u2013": "-"}
)
_BANNED = re.compile(
    r"\b(as an ai|language model|sorry, but|i cannot|this story|the story (?:teaches|ends|is)|moral of|chapter|http|"
    r"www|kill\w*|murder\w*|blood\w*|flesh|corpse|dead bod\w+|suicide|gun|guns|knife|stab\w*|weapon\w*|war|soldiers?|"
    r"bomb\w*|sex\w*|naked|kiss\w*|pregnant|drunk|beer|wine|alcohol|vodka|drugs?|cigar\w*|smok(?:e|ed|ing) a|hell|"
    r"damn|devil|jesus|christ|bible|allah|muslim|jew\w*|nazi|slave\w*|rape\w*|torture\w*|hanged|poison\w*|prison\w*|"
    r"police|dollars?|euros?|bitcoin|smollm|hugging)\b",
    re.I,
)
_ODD = re.compile(r"[^\x20-\x7e\n]|[#*_{}\[\]<>|\\=@~^/]|\d{2,}|\.{4,}|(\b\w+\b)( \1\b){2,}|[A-Z]{4,}|\w-\w+-\w+-")
_ENDING = re.compile(r"[.!?]\"?(?=\s|$)")
_NAME = re.compile(r"[a-z,] [A-Z][a-z]+")
_LAST = re.compile(
    r"\b(home|happy|happily|friends?|together|learn\w*|smil\w+|laugh\w*|thank\w*|proud|ever|always|again|hug\w*|love\w*|"
    r"sleep|asleep|night|never|day|safe|glad|joy|end)\b"
)
PRONOUNS = frozenset(("he", "she", "it", "they", "his", "her", "their", "its"))
COMMON = frozenset(
    ("that", "with", "they", "this", "have", "were", "when", "what", "your", "there", "their", "then", "said", "them")
)
"""Words that a story may repeat."""
_WORD = re.compile(r"[a-z']+")


def normalise(text: str) -> str:
    """Plain quotes and dashes, single spaces, paragraphs on lines of their own."""
    lines = (" ".join(line.split()) for line in text.translate(_CHARACTERS).split("\n"))
    return "\n".join(line for line in lines if line)


def cut(text: str) -> str:
    """The story up to the end of its last whole sentence, within MAX_CHARS; quotes that stay open are cut off too."""
    ends = [m.end() for m in _ENDING.finditer(text) if m.end() <= MAX_CHARS]
    for end in reversed(ends):
        if text[:end].count('"') % 2 == 0:
            return text[:end]
    return ""


def is_good(text: str) -> bool:
    """Length, characters, sentences that end, words that do not repeat, nothing unfit for children."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS or _BANNED.search(text) or _ODD.search(text):
        return False
    words = _WORD.findall(text.lower())
    if len(set(words)) < 0.38 * len(words):
        return False
    longest = max(len(part.split()) for part in re.split(r"[.!?]", text))
    if longest > MAX_SENTENCE_WORDS or text.count("\n") > 6:
        return False
    threes = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(threes)) > 0.86 * len(threes)


def wandering(text: str) -> float:
    """How much a story repeats itself and how little its sentences have to do with each other; 0 is best, infinite is a
    story to leave out.

    Left out: a sentence twice; four in a row with the same first word; one word as often as every other sentence;
    mostly pronouns; nobody who is named; an end that is none. Counted: sentences that begin like the one before, with
    a pronoun, or that share no word with the three before; repeated runs of three words.
    """
    sentences = [_WORD.findall(part.lower()) for part in re.split(r"[.!?]+\"?", text)]
    sentences = [part for part in sentences if part]
    n = len(sentences)
    words = [word for part in sentences for word in part]
    counts: dict[str, int] = {}
    for word in words:
        if len(word) > 3 and word not in COMMON:
            counts[word] = counts.get(word, 0) + 1
    begins = [tuple(part[:2]) for part in sentences]
    threes = list(zip(words, words[1:], words[2:], strict=False))
    pronouns = sum(part[0] in PRONOUNS for part in sentences)
    if (
        n < 8
        or len({tuple(part) for part in sentences}) < n
        or any(len({one[0] for one in begins[i : i + 4]}) == 1 for i in range(n - 3))
        or max(counts.values(), default=99) > max(4, n // 2)
        or pronouns > 0.6 * n
        or not _NAME.search(text)
        or not _LAST.search(text[-160:])
    ):
        return float("inf")
    alike = sum(a == b for a, b in itertools.pairwise(begins)) / n
    content = [{word for word in part if word in counts} for part in sentences]
    loose = sum(
        not part & set().union(*content[max(0, i - 3) : i]) and sentences[i][0] not in PRONOUNS
        for i, part in enumerate(content)
        if i
    )
    return 4 * alike + pronouns / n + loose / n + 8 * (1 - len(set(threes)) / len(threes))


def simplicity(texts: list[str]) -> np.ndarray:
    """float [n]: mean logarithm of how often a story's words occur in all of them; higher is simpler."""
    counts: dict[str, int] = {}
    words = [_WORD.findall(text.lower()) for text in texts]
    for story in words:
        for word in story:
            counts[word] = counts.get(word, 0) + 1
    logs = {word: float(np.log(n)) for word, n in counts.items()}
    return np.array([np.mean([logs[word] for word in story]) for story in words])


def signature(text: str) -> np.ndarray:
    """uint64 [N_HASHES]: minimal hashes of the story's shingles."""
    words = _WORD.findall(text.lower())
    shingles = {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))}
    hashes = np.array([zlib.crc32(shingle.encode()) for shingle in shingles], np.uint64)
    factors = np.random.default_rng(5).integers(1, 1 << 61, (N_HASHES, 2), np.uint64) | np.uint64(1)
    return ((hashes * factors[:, :1] + factors[:, 1:]) >> np.uint64(16)).min(axis=1)


def distinct(texts: Iterable[str]) -> list[int]:
    """Indices of the stories that are not like an earlier one."""
    seen: set[bytes] = set()
    kept = []
    per_band = N_HASHES // N_BANDS
    for index, text in enumerate(texts):
        found = signature(text)
        bands = [bytes([i]) + found[i * per_band : (i + 1) * per_band].tobytes() for i in range(N_BANDS)]
        if seen.isdisjoint(bands):
            kept.append(index)
        seen.update(bands)
    return kept
