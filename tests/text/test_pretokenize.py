"""The pre-tokeniser table: every pattern compiles, loses nothing, and cuts where its models were trained to."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from small_vocab import byte_level
from tokenizers import Regex, pre_tokenizers

from rimuru.base.errors import UnsupportedModelError
from rimuru.text.pretokenize import PRE_TOKENIZERS, PreTokenizer

MIXED = (
    "Hello, WORLD's  don'T x->y\n\n\t  12345 ½ naïve café e\u0301 天气ですЖ 한국어 𠮷🚀\u200d🌫 "
    "`a|b` (\\) \u00a0\u3000 ǅ\r\nend   "
)


def pieces(kind: PreTokenizer, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_character_is_lost(name: str) -> None:
    found = pieces(PRE_TOKENIZERS[name], MIXED)
    assert "".join(found) == MIXED
    assert len(found) > 5 and all(found)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama-bpe", "I'LL pay 12345 -> ok\n\n  x", "I|'LL| pay| |123|45| ->| ok|\n\n| | x"),
        ("qwen2", "I'll pay 123 (x):\n", "I|'ll| pay| |1|2|3| (|x|):\n"),
        ("qwen35", "e\u0301a 12", "e\u0301a| |1|2"),
        ("qwen2", "e\u0301a", "e|\u0301a"),
        ("gpt-2", "I'll I'LL 1234\n\n x", "I|'ll| I|'|LL| 1234|\n\n| x"),
        ("gpt-2", "a\nb", "a|\n|b"),
        ("starcoder", "a 123", "a| |1|2|3"),
        ("falcon", "a+`b 12345", "a|+`|b| |123|45"),
        ("default", "a+`b 12345", "a|+|`|b| |123|45"),
        ("deepseek-coder", "a b!12天x", "a| b|!|1|2|天|x"),
        ("deepseek-llm", "foo bar 123 。天x \n", "foo| bar| |123| |。|天|x| |\n"),
        ("deepseek-v3", "foo -bar 12345天 x", "foo| -|bar| |123|45|天| x"),
        ("gpt-4o", "fooBar HTMLPage I'Ll a/b 1234//\n", "foo|Bar| HTMLPage| I'Ll| a|/b| |123|4|//\n"),
        ("tekken", "fooBar I'Ll 12", "foo|Bar| I|'Ll| |1|2"),
        ("bloom", "a b,c (d)", "a| b|,|c| (|d|)"),
        ("viking", "a12 b", "a|1|2| b"),
        ("bailingmoe", "I'Ll\n\nx 12", "I|'Ll|\n\n|x| |1|2"),
        ("seed-coder", "a !?\n\nb 12", "a| !?|\n\n|b| |1|2"),
        ("kimi-k2", "天气good天 HTMLPage 1234", "天气|good|天| HTMLPage| |123|4"),
        ("superbpe", "in 1234567 and 123", "in |1|234|567| and |123"),
    ],
)  # fmt: skip
def test_cuts(name: str, text: str, expected: str) -> None:
    assert "|".join(pieces(PRE_TOKENIZERS[name], text)) == expected


@pytest.mark.parametrize("name", ["qwen2", "gpt-4o", "deepseek-llm", "superbpe", "bailingmoe", "kimi-k2"])
def test_long_runs_take_linear_time(name: str) -> None:
    for text in (" " * 30_000 + "1", "1" * 30_000, "\n " * 15_000 + "x", "A" * 30_000, "\u00a0" * 30_000 + "x"):
        start = time.perf_counter()
        assert "".join(pieces(PRE_TOKENIZERS[name], text)) == text
        assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_missing_or_default_name_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pre: str | None
) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = byte_level(tmp_path, pre=pre)
    assert len(caplog.records) == 1 and "tokenizer.ggml.pre" in caplog.text
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello12")] == ["hello", "12"]


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'no-such-pre'.*deepseek-v3.*qwen2") as caught:
        byte_level(tmp_path, pre="no-such-pre")
    assert "\n" not in str(caught.value)
