"""The vocabulary of a GGUF file: token texts, kinds, special ids, and which tokens end a generation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rimuru.base.errors import FileFormatError
from rimuru.formats.gguf import KeyValues, StringArray

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_END_OF_TURN_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
)  # fmt: skip
_END_TEXTS = _END_OF_TURN_TEXTS + (
    "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>",
    "<|tool_response>", "[e~[",
)  # fmt: skip
_GLM_ENDS = ("<|user|>", "<|observation|>")
"""The next turn's beginning ends an answer of GLM; the file's keys need not name both."""
_GUESSED_TEXTS = {
    "eot": _END_OF_TURN_TEXTS,
    "eom": ("<|eom_id|>",),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_MARK_TEXTS = (
    "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<think>", "</think>", "[THINK]", "[/THINK]",
    "<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<|/tool_call|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<minimax:tool_call>", "</minimax:tool_call>",
    "<TOOLCALL>", "</TOOLCALL>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
"""Models mark the parts of an answer with these. Where they are control tokens they are shown all the same: whoever
reads the answer needs to see them, as in the vocabularies where they are not."""

_SPECIAL_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id", "mask": "mask_token_id",
    "cls": "cls_token_id", "fim_pad": "fim_pad_token_id", "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}  # fmt: skip


@dataclass(frozen=True)
class Vocab:
    """Texts and kinds by token id.

    special_ids  role (bos, eos, eot, ...) -> id, only for ids inside the vocabulary
    control      kinds control and unknown, and tokens that end a generation: matched only in trusted text
    user_defined matched in every text
    hidden       give no text when an answer is decoded
    eog_ids      end of generation
    byte_values  ids of the byte tokens `<0xXX>` -> byte
    byte_ids     per byte the id that spells it: `<0xXX>`, else the one-byte text, else None
    """

    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    special_ids: Mapping[str, int]
    control: frozenset[int]
    user_defined: frozenset[int]
    hidden: frozenset[int]
    eog_ids: frozenset[int]
    byte_values: Mapping[int, int]
    byte_ids: tuple[int | None, ...]

    def text_of(self, role: str) -> str | None:
        """The token text of a special role, or None where the file has no such token."""
        token_id = self.special_ids.get(role)
        return None if token_id is None else self.tokens[token_id]


def read_vocab(kv: KeyValues, file: str, default_ids: Mapping[str, int]) -> Vocab:
    """Read `tokenizer.ggml.*` of `file`. default_ids: special ids that hold where the file names none.

    Raises FileFormatError for lists that do not fit together and for two equal token texts.
    """
    tokens = _texts(kv.require_list("tokenizer.ggml.tokens", str))
    if not tokens:
        raise FileFormatError(f"{file}: tokenizer.ggml.tokens is empty")
    types = kv.get_list("tokenizer.ggml.token_type", int)
    if types is None:
        types = [NORMAL] * len(tokens)
    elif len(types) < len(tokens):
        raise FileFormatError(f"{file}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(text for token_id, text in enumerate(tokens) if ids[text] != token_id)
        raise FileFormatError(f"{file}: tokenizer.ggml.tokens has the text {twice!r:.80} twice")
    special_ids = _special_ids(kv, file, ids, default_ids)
    return _classify(tokens, types, ids, special_ids)


def _texts(raw: Sequence[str]) -> list[str]:
    texts = list(raw)
    for token_id, text in enumerate(texts):
        if not text:
            texts[token_id] = f"[EMPTY_{token_id}]"
        elif "\ufffd" in text and isinstance(raw, StringArray):
            # Tokens of single raw bytes are no UTF-8; kept apart by the surrogate escapes of their bytes.
            texts[token_id] = raw.raw(token_id).decode("utf-8", "surrogateescape")
    return texts


def _special_ids(kv: KeyValues, file: str, ids: Mapping[str, int], default_ids: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for role, key in _SPECIAL_KEYS.items():
        name = f"tokenizer.ggml.{key}"
        token_id = kv.get(name, int)
        if token_id is None:
            token_id = default_ids.get(role)
            if token_id is not None and token_id < len(ids):
                found[role] = token_id
        elif 0 <= token_id < len(ids):
            found[role] = token_id
        else:
            logger.warning("%s: %s is %d, outside the vocabulary of %d tokens: ignored", file, name, token_id, len(ids))
    for role, texts in _GUESSED_TEXTS.items():
        if role not in found:
            guess = next((ids[text] for text in texts if text in ids), None)
            if guess is not None:
                found[role] = guess
    return found


def _classify(
    tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int], special_ids: Mapping[str, int]
) -> Vocab:
    ends = {special_ids[role] for role in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if role in special_ids}
    ends |= {ids[text] for text in _END_TEXTS if text in ids}
    if "[gMASK]" in ids:
        ends |= {ids[text] for text in _GLM_ENDS if text in ids}
    if "<|role_end|>" in ids and "<|role_start|>" not in ids:  # Ling; beside the other it ends a heading
        ends.add(ids["<|role_end|>"])
    shown: set[int] = {ids[text] for text in _MARK_TEXTS if text in ids}
    guessed = {special_ids[role] for role in _GUESSED_TEXTS if role in special_ids}
    control = {i for i, kind in enumerate(types[: len(tokens)]) if kind in (CONTROL, UNKNOWN)} | ends | guessed
    if "<|return|>" in ids and "<|call|>" in ids and "<|end|>" in ids:
        ends.discard(ids["<|end|>"])
        shown.add(ids["<|end|>"])
    if "<|tool_response>" in ids and "</s>" in ids:
        ends.discard(ids["</s>"])
    byte_texts = [f"<0x{byte:02X}>" for byte in range(256)]
    return Vocab(
        tokens=tokens,
        types=types,
        ids=ids,
        special_ids=special_ids,
        control=frozenset(control),
        user_defined=frozenset(
            i for i, kind in enumerate(types[: len(tokens)]) if kind == USER_DEFINED and i not in control
        ),
        hidden=frozenset(control - shown),
        eog_ids=frozenset(ends),
        byte_values={ids[text]: byte for byte, text in enumerate(byte_texts) if text in ids},
        byte_ids=tuple(ids.get(text, ids.get(_raw_byte(byte))) for byte, text in enumerate(byte_texts)),
    )


def _raw_byte(byte: int) -> str:
    return bytes([byte]).decode("utf-8", "surrogateescape")
