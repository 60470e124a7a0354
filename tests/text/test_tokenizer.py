"""Rules of the tokenizer kinds, on small vocabularies built here, against slow and obvious twins."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocab import CHATML, MERGES, SPM_PIECES, SPM_SCORES, byte_level, spm, write_vocab

from rimuru.base.errors import BadInputError, FileFormatError, UnsupportedModelError
from rimuru.formats.gguf import open_gguf
from rimuru.text import byte_bpe
from rimuru.text.byte_bpe import BYTE_TO_CHARACTER, parse_merges
from rimuru.text.tokenizer import Tokenizer


def merge_by_rank(word: str) -> list[str]:
    """Byte-level BPE as the rule says it, one merge at a time."""
    parts = [BYTE_TO_CHARACTER[byte] for byte in word.encode()]
    ranks = {pair: rank for rank, pair in enumerate(parse_merges(MERGES))}
    while True:
        candidates = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def merge_by_score(text: str) -> list[str]:
    """SentencePiece as the rule says it, one merge at a time."""
    scores = dict(zip(SPM_PIECES, SPM_SCORES, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        candidates = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="helowrd", max_size=20))
def test_byte_level_merges_in_rank_order(small_bpe: Tokenizer, word: str) -> None:
    assert [small_bpe.token_id(part) for part in merge_by_rank(word)] == small_bpe.encode(word)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcé. <>s", max_size=40))
def test_sentencepiece_merges_in_score_order(small_spm: Tokenizer, text: str) -> None:
    # Cutting the text into words before merging must not change anything.
    expected = merge_by_score(" " + text) if text else []
    assert small_spm.encode(text) == [small_spm.token_id(part) for part in expected]


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(small_bpe: Tokenizer, small_spm: Tokenizer, text: str) -> None:
    assert small_bpe.decode(small_bpe.encode(text)) == text
    text = text.replace("▁", "")
    assert small_spm.decode(small_spm.encode(text)) == text


def test_words_without_a_token_are_spelled_in_bytes(tmp_path: Path) -> None:
    # "hell" and "hello" are merge results that the vocabulary lacks; "!" has no token at all and disappears.
    tokenizer = byte_level(tmp_path, drop=("hell", "hello", "!"))
    assert tokenizer.encode("hello") == [tokenizer.token_id(c) for c in "hello"]
    assert tokenizer.encode("hello!12") == [tokenizer.token_id(c) for c in "hello12"]
    assert tokenizer.encode("he") == [tokenizer.token_id("he")]


def test_tokens_that_are_no_utf8_can_be_answered_and_are_never_encoded(tmp_path: Path) -> None:
    """Damaged or odd vocabularies hold them, next to tokens that a merge makes and to control tokens."""
    for specials, kind in ((("#one#", "#two#"), 3), (("#one#", "#two#"), 1)):
        byte_level(tmp_path, specials=specials, special_type=kind)
        damaged = tmp_path / "damaged.gguf"
        data = (tmp_path / "byte_level.gguf").read_bytes()
        assert data.count(b"#one#") == 1
        damaged.write_bytes(data.replace(b"#one#", b"\xff\xfeone"))
        tokenizer = Tokenizer.from_gguf(damaged)
        token_id = tokenizer.n_vocab - 2
        assert tokenizer.token_bytes(token_id) == b"\xff\xfeone"
        assert tokenizer.decode([token_id], special=True) == "\ufffd\ufffdone"
        for text in ("hello one", "\ufffd\ufffdone", "\udcff\udcfeone"):
            ids = tokenizer.encode(text, special=True)
            assert token_id not in ids and "one" in tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["x", "ab ", "  \n", "12345", "é ab\U0001f600's ", "<|im", "hello天"])
def test_long_texts_get_the_ids_of_the_short_way(
    small_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    text *= 6000 // len(text) + 1
    monkeypatch.setattr(byte_bpe, "MOST_LOCKED_CHARACTERS", len(text))
    short_way = small_bpe.encode(text)
    monkeypatch.setattr(byte_bpe, "MOST_LOCKED_CHARACTERS", 0)
    assert small_bpe.encode(text) == short_way and small_bpe.decode(short_way) == text
    assert [small_bpe.encode(word) for word in ("", "a", "hello")] == [
        [], [small_bpe.token_id("a")], [small_bpe.token_id("hello")]
    ]  # fmt: skip


def test_other_threads_run_while_a_long_text_is_encoded(small_bpe: Tokenizer) -> None:
    text, turns, is_over = "ab 12 hello " * 100_000, 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.is_set():
            time.sleep(0.001)
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    library = small_bpe._encoder._library  # type: ignore[attr-defined]
    before = turns
    ids = byte_bpe._library_ids(library, text)
    after = turns
    is_over.set()
    thread.join()
    assert len(ids) >= 500_000 and after - before >= 10


def test_ignore_merges_takes_whole_words(tmp_path: Path) -> None:
    merges = (*MERGES, "z z", "q u", "qu zz")  # "quzz" is a token whose merge cannot be reached: z z ranks below
    tokens = [*BYTE_TO_CHARACTER, "quux", "qu", "zz"]
    by_pre = {}
    for pre in ("llama-bpe", "dbrx"):
        path = write_vocab(tmp_path / f"{pre}.gguf", "gpt2", tokens, merges=list(merges), pre=pre)
        by_pre[pre] = Tokenizer.from_gguf(path)
    assert by_pre["llama-bpe"].encode("quux") == [256]
    assert by_pre["dbrx"].encode("quux") == [257, BYTE_TO_CHARACTER.index("u"), BYTE_TO_CHARACTER.index("x")]


def test_merge_lines_split_at_the_first_space_from_index_1() -> None:
    assert parse_merges(["a b", "  c", "x", "a b", "d ", "e f g"]) == [("a", "b"), (" ", "c"), ("e", "f g")]


def test_control_tokens_need_trust(small_bpe: Tokenizer) -> None:
    end = small_bpe.token_id("<|im_end|>")
    assert small_bpe.encode("hello<|im_end|>hello", special=True) == [
        small_bpe.token_id("hello"), end, small_bpe.token_id("hello"),
    ]  # fmt: skip
    plain = small_bpe.encode("hello<|im_end|>hello")
    assert end not in plain and small_bpe.decode(plain) == "hello<|im_end|>hello"


def test_control_tokens_are_silent_unless_asked_for(small_bpe: Tokenizer) -> None:
    ids = small_bpe.encode("<|im_start|>hello<|im_end|>", special=True)
    assert small_bpe.decode(ids) == "hello"
    assert small_bpe.decode(ids, special=True) == "<|im_start|>hello<|im_end|>"
    assert small_bpe.decode_bytes(ids) == b"hello"
    assert small_bpe.token_text(ids[0]) == "<|im_start|>"


def test_control_tokens_cannot_be_spelled_by_merges(tmp_path: Path) -> None:
    # The text of a control token that ordinary merges would reach stays plain text.
    tokenizer = byte_level(tmp_path, merges=("E N", "EN D"), drop=("END",), specials=("END",))
    assert tokenizer.encode("END") == [tokenizer.token_id(c) for c in "END"]
    assert tokenizer.encode("END", special=True) == [tokenizer.token_id("END")]
    tokenizer = spm(tmp_path, extra=("abcabc",), extra_type=3)
    assert tokenizer.token_id("abcabc") not in tokenizer.encode("abcabc")


def test_user_defined_tokens_are_found_in_every_text(tmp_path: Path) -> None:
    tokenizer = byte_level(
        tmp_path, specials=("<tool>", "\n\n", "  "), special_type=4, eos_token_id=None, bos_token_id=None
    )
    ids = tokenizer.encode("a<tool>b\n\n  c")
    assert [tokenizer.token_text(i) for i in ids] == ["a", "<tool>", "b", "\n\n", "  ", "c"]
    assert tokenizer.decode(ids) == "a<tool>b\n\n  c"


def test_bos_rules(tmp_path: Path) -> None:
    bos = byte_level(tmp_path).bos_id
    for add_bos in (False, True):
        tokenizer = byte_level(tmp_path, add_bos_token=add_bos)
        first = [bos] if add_bos else []
        rest = [tokenizer.token_id("hello")]
        assert tokenizer.encode_prompt("hello") == first + rest
        assert tokenizer.encode_prompt("<|endoftext|>hello") == [bos, *rest]  # never a second one
        assert tokenizer.encode("hello", add_bos=True) == [bos, *rest]
        assert tokenizer.encode("hello") == rest
        assert tokenizer.encode_prompt("") == first


def test_bos_defaults_by_kind(tmp_path: Path) -> None:
    assert not byte_level(tmp_path, pre="qwen2").add_bos
    assert byte_level(tmp_path, pre="llama-bpe").add_bos
    assert not byte_level(tmp_path, pre="llama-bpe", add_bos_token=False).add_bos
    assert spm(tmp_path).add_bos and spm(tmp_path).bos_id == 1 and spm(tmp_path).eos_id == 2
    assert not byte_level(tmp_path, pre="llama-bpe", bos_token_id=None).add_bos
    assert byte_level(tmp_path, add_eos_token=True).add_eos


def test_space_prefix(tmp_path: Path) -> None:
    with_prefix, without = spm(tmp_path), spm(tmp_path, add_space_prefix=False)
    assert with_prefix.encode("abc") == [with_prefix.token_id("▁abc")]
    assert without.encode("abc") == [without.token_id("abc")]
    # Text after a special token is tokenised as if it stood alone.
    assert with_prefix.encode("abc</s>abc", special=True) == [
        with_prefix.token_id("▁abc"), 2, with_prefix.token_id("▁abc"),
    ]  # fmt: skip
    assert with_prefix.encode("") == []
    for tokenizer, text in ((with_prefix, "abc"), (without, "abc"), (with_prefix, " abc"), (without, " abc")):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=True)) == text


def test_sentencepiece_without_byte_tokens_uses_unknown(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, with_bytes=False)
    assert tokenizer.encode("z") == [tokenizer.token_id("▁"), 0]


def test_lone_surrogates_become_replacement_characters(small_bpe: Tokenizer) -> None:
    assert small_bpe.decode(small_bpe.encode("a\ud800b")) == "a\ufffdb"
    assert small_bpe.decode(small_bpe.encode("\ud83d\ude80")) == "🚀"


def test_invalid_utf8_is_replaced(small_bpe: Tokenizer) -> None:
    first = small_bpe.token_id("é")  # byte E9 begins a character of three bytes
    assert small_bpe.decode_bytes([first]) == b"\xe9"
    assert small_bpe.decode([first, small_bpe.token_id("a")]) == "\ufffda"


def test_ids_outside_the_vocabulary_are_refused(small_bpe: Tokenizer) -> None:
    for bad in (-1, small_bpe.n_vocab):
        with pytest.raises(BadInputError, match="outside the vocabulary"):
            small_bpe.decode([bad])


def test_threads_share_a_tokenizer(small_bpe: Tokenizer, small_spm: Tokenizer) -> None:
    texts = [f"hello {'ab' * (i % 9)} world <|im_end|> {i}" for i in range(200)]
    for tokenizer in (small_bpe, small_spm):
        alone = [tokenizer.encode(text) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(tokenizer.encode, texts)) == alone


def test_end_of_generation_set(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, specials=("<s>", "<|eot_id|>", "<|fim_pad|>", "<|other|>", "</s>", "<|end|>"))
    texts = {tokenizer.token_text(i) for i in tokenizer.eog_ids}
    assert texts == {"<|eot_id|>", "<|fim_pad|>", "</s>", "<|end|>"}


@pytest.mark.parametrize(
    ("specials", "ends"),
    [
        (("[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
         {"<|user|>", "<|observation|>", "<|endoftext|>"}),
        (("<s>", "<|user|>", "<|assistant|>", "</s>"), {"</s>"}),
        (("<role>", "</role>", "<|role_end|>", "<|endoftext|>"), {"<|role_end|>", "<|endoftext|>"}),
        (("<|role_start|>", "<|role_end|>", "</s>"), {"</s>"}),
    ],
)  # fmt: skip
def test_ends_that_a_family_has_beside_its_eos(specials: tuple[str, ...], ends: set[str], tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, specials=specials)
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} == ends


def test_harmony_tokens(tmp_path: Path) -> None:
    names = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
    tokenizer = byte_level(tmp_path, specials=names)
    assert {tokenizer.token_text(i) for i in tokenizer.eog_ids} == {"<|return|>", "<|call|>"}
    # The answer's reader sees the channel marks; a user who types them does not make them.
    ids = tokenizer.encode("<|channel|>x<|end|>", special=True)
    assert len(ids) == 3 and tokenizer.decode(ids) == "<|channel|>x<|end|>"
    assert len(tokenizer.encode("<|channel|>")) > 1


def test_special_ids_outside_the_vocabulary_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = byte_level(tmp_path, bos_token_id=99999)
    assert tokenizer.bos_id is None
    assert "bos_token_id is 99999" in caplog.text


def test_empty_token_texts_get_a_name(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "v.gguf", "gpt2", ["", *BYTE_TO_CHARACTER, ""], merges=[], pre="qwen2")
    assert Tokenizer.from_gguf(path).token_id("[EMPTY_257]") == 257


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gpt2", {"tokens": ["a", "b", "a"], "merges": []}, "twice"),
        ("gpt2", {"types": [1], "merges": []}, "token_type has 1 entries"),
        ("gpt2", {"tokens": [], "merges": []}, "is empty"),
        ("llama", {"scores": [0.0]}, "scores has 1 entries"),
        ("llama", {}, "scores is missing"),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, model: str, changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"tokens": ["a", "b"], "pre": "qwen2", **changes}
    path = write_vocab(tmp_path / "v.gguf", model, **arguments)  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_gguf(path)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "something"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, model: str) -> None:
    path = write_vocab(tmp_path / "v.gguf", model, ["a"])
    with pytest.raises(UnsupportedModelError, match=f"'{model}'.*gpt2, llama"):
        Tokenizer.from_gguf(path)


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_a_file_without_tokenizer(tmp_path: Path, model: str) -> None:
    path = write_vocab(tmp_path / "v.gguf", model, ["a"])
    with open_gguf(path) as gguf:
        assert Tokenizer.from_kv(gguf.kv, str(path)) is None
    with pytest.raises(BadInputError, match="no tokenizer"):
        Tokenizer.from_gguf(path)


def test_byte_level_without_merges_is_refused(tmp_path: Path) -> None:
    path = write_vocab(tmp_path / "v.gguf", "gpt2", [*BYTE_TO_CHARACTER], pre="kimi-k2")
    with pytest.raises(UnsupportedModelError, match=r"merges is missing.*kimi-k2"):
        Tokenizer.from_gguf(path)


def test_gemma4_works_on_characters(tmp_path: Path) -> None:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<bos>", *bytes_, "▁", "a", "b", "▁a", "▁ab", "\n"]
    path = write_vocab(
        tmp_path / "v.gguf", "gemma4", tokens, [2, 3] + [6] * 256 + [1] * 6, ["▁ a", "▁a b"],
        keys={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": False},
    )  # fmt: skip
    tokenizer = Tokenizer.from_gguf(path)
    ids = tokenizer.encode(" ab\né b")
    names = ["▁ab", "\n", "<0xC3>", "<0xA9>", "▁", "b"]
    assert ids == [tokenizer.token_id(name) for name in names]
    assert tokenizer.decode(ids) == " ab\né b"
    assert tokenizer.encode_prompt("a")[0] == 1


def test_phi3_tokens_swallow_the_space_after_them(tmp_path: Path) -> None:
    keys = {"general__name": "Phi-3-mini"}
    tokenizer = byte_level(tmp_path, specials=("<|endoftext|>", "<|end|>"), **keys)
    ids = tokenizer.encode("a<|end|> \n b<|endoftext|> c", special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["a", "<|end|>", "b", "<|endoftext|>", " ", "c"]


def test_chat_templates_by_name(tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    tokenizer = byte_level(tmp_path, **keys)
    assert tokenizer.chat_template == "A"
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    assert byte_level(tmp_path, specials=CHATML).chat_template is None
