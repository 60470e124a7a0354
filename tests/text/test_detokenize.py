"""Streaming: whole characters only, the same text as decoding at once, and nothing of a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocab import spm

from rimuru.text.detokenize import StopMatcher, StreamDecoder
from rimuru.text.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int], **more: bool) -> list[str]:
    decoder = StreamDecoder(tokenizer, **more)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("鬱", [99439, 109]), ("🫠", [9284, 104, 254]), ("𠮷", [150152]), ("a🫠b", [64, 9284, 104, 254, 65])],
)
def test_characters_over_several_tokens(qwen2: Tokenizer, text: str, ids: list[int]) -> None:
    pieces = stream(qwen2, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_off_is_one_replacement(small_bpe: Tokenizer) -> None:
    first = small_bpe.token_id("é¬")  # bytes E9 AC: two thirds of U+9B31
    assert stream(small_bpe, [first]) == ["", "\ufffd"]
    assert stream(small_bpe, [first, small_bpe.token_id("±")]) == ["", "鬱", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 269), max_size=30), st.booleans())
def test_stream_is_decode_for_any_ids(small_bpe: Tokenizer, ids: list[int], special: bool) -> None:
    assert "".join(stream(small_bpe, ids, special=special)) == small_bpe.decode(ids, special=special)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 276), max_size=30))
def test_stream_is_decode_for_sentencepiece(small_spm: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(small_spm, ids)) == small_spm.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_stream_is_decode_for_real_vocabularies(qwen2: Tokenizer, llama_spm: Tokenizer, text: str) -> None:
    for tokenizer in (qwen2, llama_spm):
        ids = tokenizer.encode(text, add_bos=True)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_prefix_space_goes_once_and_only_at_the_start(tmp_path: Path, small_spm: Tokenizer) -> None:
    ids = [1, *(small_spm.token_id(piece) for piece in ("▁abc", "▁", "▁abc"))]
    assert "".join(stream(small_spm, ids)) == small_spm.decode(ids) == "abc  abc"
    # An answer goes on the prompt's text, where the first space is a real one.
    assert "".join(stream(small_spm, ids, continues=True)) == " abc  abc"
    prompt, answer = small_spm.encode("abc"), small_spm.encode("ab")
    joined = small_spm.decode(prompt) + "".join(stream(small_spm, answer, continues=True))
    assert joined == small_spm.decode(prompt + answer)
    plain = spm(tmp_path, add_space_prefix=False)
    assert "".join(stream(plain, [plain.token_id("▁abc")])) == plain.decode([plain.token_id("▁abc")]) == " abc"


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def naive_stop(stops: list[str], text: str) -> tuple[str, bool]:
    """Letter by letter: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["DEFGHIJ"], "ABC"), (["CD", "BCX"], "AB"), (["ZZ"], None), (["Z"], "ABCDEFGHIJKLMNOPQRSTUVWXY"), (["A"], "")],
)
def test_stops_in_the_alphabet(stops: list[str], shown: str | None) -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for n in (1, 2, 3, 5, 26):
        pieces = [alphabet[i : i + n] for i in range(0, 26, n)]
        found, stopped = run_matcher(stops, pieces)
        assert "".join(found) == (alphabet if shown is None else shown)
        assert stopped == (shown is not None)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text(alphabet="ab鬱", max_size=4), max_size=4),
    st.lists(st.text(alphabet="ab鬱c", max_size=5), max_size=12),
)
def test_matcher_against_letter_by_letter(stops: list[str], pieces: list[str]) -> None:
    shown, stopped = run_matcher(stops, pieces)
    assert ("".join(shown), stopped) == naive_stop(stops, "".join(pieces))


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("hello <") == ("hello ", False)
    assert matcher.push("en") == ("", False)
    assert matcher.push("t") == ("<ent", False)
    assert matcher.push("<end>more") == ("", True)
    assert matcher.push("after") == ("", True)
    assert matcher.flush() == ""
    assert StopMatcher([]).push("x") == ("x", False)
