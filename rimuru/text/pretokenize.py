"""Pre-tokenisers: the regexes that cut text into words before byte-level BPE, by `tokenizer.ggml.pre`.

The patterns of one preset are applied in order; each splits every piece that the ones before it left, matches and gaps
alike, and nothing is dropped. They are written for the regex engine of the `tokenizers` library (Unicode categories,
look-ahead). Where llama.cpp approximates a category (gpt-4o's letter cases), the original categories stand here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rimuru.base.errors import UnsupportedModelError

logger = logging.getLogger(__name__)


def _any_of(*patterns: str) -> str:
    return "|".join(patterns)


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION_RUN = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _any_of(_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION_RUN, _TAIL)
_QWEN2 = _any_of(_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION_RUN, _TAIL)
_QWEN35 = _any_of(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _TAIL)
_SEED = _any_of(_CONTRACTION, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _TAIL)
_BAILING = _any_of(
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", _WORD, r"\p{N}", _PUNCTUATION_RUN, r"\s*[\r\n]|\s+(?!\S)|\s+"
)

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(suffix: str, digits: str, punctuation_end: str, minus: str = "") -> str:
    """Words that end where lower case turns to upper case; `minus` is cut out of both letter classes."""
    upper, lower = f"[{_UPPER}{minus}]", f"[{_LOWER}{minus}]"
    return _any_of(
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}",
        digits,
        rf" ?[^\s\p{{L}}\p{{N}}]+{punctuation_end}",
        _TAIL,
    )


_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}", r"[\r\n/]*")
_TEKKEN = _cased("", r"\p{N}", r"[\r\n/]*")
_KIMI = r"\p{Han}+|" + _cased(_CONTRACTION + "?", r"\p{N}{1,3}", r"[\r\n]*", minus=r"&&[^\p{Han}]")

_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# The look-behind keeps long runs of spaces linear; without it every space of a run would be tried as a start.
_TRAILING_SPACE = r"(?<!\s)\s+$"
_DEEPSEEK3 = _any_of(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _TAIL,
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The patterns of one `pre` kind, and what else the kind decides.

    ignore_merges: a whole word that is a token is emitted as it is, without asking the merges.
    add_bos: whether BOS is added where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_GPT2_NAMES = (
    "gpt-2 phi-2 jina-v1-en jina-v2-en jina-v2-de jina-v2-es jina-v2-code jina-de jina-es gigachat a.x-4.0 mellum "
    "modern-bert exaone4 mpt olmo jais trillion granite-docling roberta-bpe"
)

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open megrez stablelm2 grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    (_GPT2_NAMES, PreTokenizer((_GPT2,))),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", _DEFAULT),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, _TRAILING_SPACE, _CJK_HANGUL, r"\p{N}+")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    # Digits in threes counted from the right: 1234567 is 1 234 567. The first group is cut off once per run of digits,
    # because a look-ahead at every group would take quadratic time.
    ("superbpe", PreTokenizer((r"\p{N}+", r"\d+", r"\A\d{1,2}(?=(?:\d{3})+\z)", r"\d{3}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for names, kind in _KINDS for name in names.split()}
"""`tokenizer.ggml.pre` -> its kind."""

GEMMA4_PATTERN = r"[^\n]+|[\n]+"
"""Words of the model `gemma4`, whose BPE works on characters instead of bytes."""


def find_pre_tokenizer(name: str | None, file: str) -> PreTokenizer:
    """The kind named by `tokenizer.ggml.pre` of `file`.

    A missing name or "default" gives the default patterns and one warning line, because the ids are then a guess;
    an unknown name is an UnsupportedModelError that lists the known ones.
    """
    if name is None or name == "default":
        logger.warning(
            "%s: tokenizer.ggml.pre is %s: the default splitting rules are used, and token ids may differ from "
            "those the model was trained with",
            file,
            "missing" if name is None else '"default"',
        )
        return _DEFAULT
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"{file}: tokenizer.ggml.pre {name!r:.80} is not supported; supported are: {supported}"
        )
    return kind
