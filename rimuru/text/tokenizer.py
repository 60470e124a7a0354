"""Text to token ids and back, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from rimuru.base.errors import BadInputError, FileFormatError, UnsupportedModelError
from rimuru.formats.gguf import KeyValues, open_gguf
from rimuru.text.byte_bpe import SPACE_MARK, ByteLevelBpe, CharacterBpe, byte_level_bytes
from rimuru.text.guard import RenderedChat
from rimuru.text.pretokenize import find_pre_tokenizer
from rimuru.text.special import SpecialTokens
from rimuru.text.spm import SentencePieceBpe
from rimuru.text.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocab, read_vocab

_NO_TOKENIZER = ("none", "no_vocab")
_SUPPORTED = ("gpt2", "llama", "gemma4")
_SPM_DEFAULT_IDS = {"bos": 1, "eos": 2, "unk": 0}
_PHI3_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")


class _Encoder(Protocol):
    def encode(self, text: str, after_special: bool) -> list[int]: ...


class Tokenizer:
    """Encodes and decodes exactly as the model was trained. Immutable and thread-safe.

    n_vocab       number of token ids
    bos_id, eos_id, special_ids  as the file says (None, or absent, where it has none)
    eog_ids       ids that end a generation
    add_bos, add_eos             whether the file wants them around a text
    chat_template, chat_templates  the default template (or None), and all by name ("default", "tool_use", ...)

    Control tokens (`<|im_end|>`) are recognised in trusted text only, user-defined tokens in every text.
    """

    def __init__(self, kv: KeyValues, file: str) -> None:
        """Read `tokenizer.*`. Raises UnsupportedModelError for a kind of tokenizer that cannot run.

        FileFormatError for lists that do not fit together. Use from_kv where the file may have no tokenizer.
        """
        model = kv.require("tokenizer.ggml.model", str)
        if model not in _SUPPORTED:
            raise UnsupportedModelError(
                f"{file}: tokenizer.ggml.model {model!r:.80} is not supported; supported are: {', '.join(_SUPPORTED)}"
            )
        self.model = model
        self._vocab = read_vocab(kv, file, _SPM_DEFAULT_IDS if model == "llama" else {})
        self.n_vocab = len(self._vocab.tokens)
        self.special_ids: Mapping[str, int] = self._vocab.special_ids
        self.bos_id = self.special_ids.get("bos")
        self.eos_id = self.special_ids.get("eos")
        self.eog_ids = self._vocab.eog_ids
        self.chat_templates = _chat_templates(kv)
        self.chat_template = self.chat_templates.get("default")
        self.add_space_prefix = kv.get("tokenizer.ggml.add_space_prefix", bool, model == "llama") and model == "llama"
        self._encoder, add_bos = self._build_encoder(kv, file)
        self.add_bos = kv.get("tokenizer.ggml.add_bos_token", bool, add_bos) and self.bos_id is not None
        self.add_eos = kv.get("tokenizer.ggml.add_eos_token", bool, False) and self.eos_id is not None
        if model == "gemma4":
            self.add_bos = self.bos_id is not None
        self._always, self._trusted = self._build_matchers(kv)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a GGUF file (a file that holds only a vocabulary will do).

        Raises BadInputError where the file has none, and what opening and __init__ raise.
        """
        with open_gguf(path) as gguf:
            tokenizer = cls.from_kv(gguf.kv, str(path))
        if tokenizer is None:
            raise BadInputError(f"{path}: the file has no tokenizer; use token ids, or a file with tokenizer.ggml.*")
        return tokenizer

    @classmethod
    def from_kv(cls, kv: KeyValues, file: str) -> Tokenizer | None:
        """The tokenizer of an open file's metadata, or None where it has none."""
        model = kv.get("tokenizer.ggml.model", str)
        return None if model is None or model in _NO_TOKENIZER else cls(kv, file)

    def _build_encoder(self, kv: KeyValues, file: str) -> tuple[_Encoder, bool]:
        vocab = self._vocab
        if self.model == "llama":
            scores = kv.require_list("tokenizer.ggml.scores", float)
            if len(scores) < self.n_vocab:
                raise FileFormatError(
                    f"{file}: tokenizer.ggml.scores has {len(scores)} entries for {self.n_vocab} tokens"
                )
            not_merged = vocab.control | vocab.byte_values.keys()
            encoder = SentencePieceBpe(
                vocab.ids, scores, not_merged, vocab.byte_ids, self.special_ids.get("unk"), self.add_space_prefix
            )
            return encoder, True
        if self.model == "gemma4":
            merges = kv.require_list("tokenizer.ggml.merges", str)
            return CharacterBpe(vocab.ids, vocab.control, merges), True
        pre = kv.get("tokenizer.ggml.pre", str)
        kind = find_pre_tokenizer(pre, file)
        found = kv.get_list("tokenizer.ggml.merges", str)
        if found is None:
            raise UnsupportedModelError(f"{file}: tokenizer.ggml.merges is missing, and {pre!r} cannot do without")
        return ByteLevelBpe(vocab.ids, self.n_vocab, vocab.control, found, kind), kind.add_bos

    def _build_matchers(self, kv: KeyValues) -> tuple[SpecialTokens, SpecialTokens]:
        vocab = self._vocab
        always = {vocab.tokens[i]: i for i in vocab.user_defined}
        trusted = always | {vocab.tokens[i]: i for i in vocab.control if not _is_unused(vocab, i)}
        strip_left: frozenset[int] = frozenset()
        strip_right: frozenset[int] = frozenset()
        if kv.get("tokenizer.ggml.pre", str, "").startswith("jina-v2-") and "<mask>" in vocab.ids:
            strip_left = frozenset((vocab.ids["<mask>"],))
        name = kv.get("general.name", str, "").lower()
        if "phi-3" in name or "phi3" in name:
            kept = {vocab.ids[text] for text in _PHI3_UNSTRIPPED if text in vocab.ids}
            strip_right = frozenset(trusted.values()) - kept
        return SpecialTokens(always, strip_left, strip_right), SpecialTokens(trusted, strip_left, strip_right)

    def encode(self, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of `text`.

        special: control tokens in the text are recognised; else they are ordinary text. add_bos: put BOS first
        (if the vocabulary has one, and the ids do not begin with it already).
        """
        ids = self._encode_pieces((self._trusted if special else self._always).split(_clean(text)))
        return self._with_bos(ids) if add_bos else ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw completion prompt.

        Control tokens are recognised (a raw prompt is the whole truth about the context, and people write chat
        markup by hand); BOS is added as the file says, never a second one. EOS is never added: the text goes on.
        """
        return self.encode(text, special=True, add_bos=self.add_bos)

    def encode_chat(self, chat: RenderedChat | str) -> list[int]:
        """Token ids of a rendered chat (or of template output that is trusted as a whole).

        Control tokens are recognised where the template wrote them, and are plain text where a message did. BOS is
        added only if the file says so and the template has not written it.
        """
        if isinstance(chat, str):
            return self.encode_prompt(chat)
        pieces: list[str | int] = []
        for piece in self._trusted.split(_clean(chat.marked)):
            if isinstance(piece, str) and (plain := chat.unmark(piece)) != piece:
                pieces += self._always.split(plain)
            else:
                pieces.append(piece)
        ids = self._encode_pieces(pieces)
        return self._with_bos(ids) if self.add_bos else ids

    def _encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        after_special = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
            else:
                ids += self._encoder.encode(piece, after_special)
                after_special = False
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self.bos_id is None or ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Spaces are never cleaned.

        Control tokens give no text unless `special`. SentencePiece's prefix space is removed once, at the start.
        """
        return self.decode_bytes(ids, special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], special: bool = False) -> bytes:
        """Like decode, as the exact bytes. Raises BadInputError for an id outside the vocabulary."""
        data = b"".join([self.piece_bytes(token_id, special) for token_id in ids])
        return data[1:] if self.add_space_prefix and data[:1] == b" " else data

    def piece_bytes(self, token_id: int, special: bool = False) -> bytes:
        """The bytes that a token adds to an answer: none for a control token, unless `special`."""
        return self.token_bytes(token_id) if special or token_id not in self._vocab.hidden else b""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; of a control token its text. Raises BadInputError for an unknown id."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """token_bytes as text, for people; incomplete UTF-8 becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """Whether the token gives no text in an answer."""
        return token_id in self._vocab.hidden

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that are recognised in trusted text only, shown in answers or not."""
        return self._vocab.control

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this exact text, or None."""
        token_id = self._vocab.ids.get(text)
        return token_id if token_id in self._vocab.control else None

    def special_text(self, role: str) -> str | None:
        """The text of the token with a role (bos, eos, unk, pad, ...), or None."""
        return self._vocab.text_of(role)

    def control_texts(self) -> frozenset[str]:
        """Texts that are control tokens in trusted text and must stay plain text elsewhere."""
        return frozenset(self._vocab.tokens[i] for i in self._vocab.control if not _is_unused(self._vocab, i))

    def token_id(self, text: str) -> int | None:
        """The id of the token with this exact vocabulary text, or None."""
        return self._vocab.ids.get(text)

    def _find_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.n_vocab:
            raise BadInputError(f"token id {token_id} is outside the vocabulary of {self.n_vocab} tokens")
        text, kind = self._vocab.tokens[token_id], self._vocab.types[token_id]
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text.encode("utf-8", "surrogateescape")
        if self.model == "gpt2":
            return byte_level_bytes(text)
        if token_id in self._vocab.byte_values:
            return bytes([self._vocab.byte_values[token_id]])
        return text.replace(SPACE_MARK, " ").encode("utf-8", "surrogateescape")


def _is_unused(vocab: Vocab, token_id: int) -> bool:
    """Placeholders such as `<unused7>` are no tokens that a text could mean."""
    return vocab.types[token_id] == CONTROL and "unused" in vocab.tokens[token_id]


def _clean(text: str) -> str:
    """Text that UTF-8 can hold: pairs of surrogates are joined, lone ones (JSON allows them) become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _chat_templates(kv: KeyValues) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key in kv:
        if key == prefix:
            found["default"] = kv.require(key, str)
        elif key.startswith(prefix + "."):
            found[key[len(prefix) + 1 :]] = kv.require(key, str)
    return found
