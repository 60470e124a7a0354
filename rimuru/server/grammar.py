"""Answers that must follow a grammar: JSON, a JSON schema, a tool call. The grammar library llguidance is optional."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rimuru.base.extras import install_command
from rimuru.request import TokenConstraint
from rimuru.server.errors import FieldError, NotSupportedError
from rimuru.server.tool_calls import function_of
from rimuru.server.tool_formats import ReasoningFormat, ToolFormat
from rimuru.server.tool_grammars import check_parameters, regex_text, schema_text, tool_rules
from rimuru.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_ITEMS_IN_ROW = 20_000
"""Of the library's parser; each optional property takes four. More would hold up the steps that others share."""
N_PROBES = 4
"""Tokens of which a grammar is tried before its answer begins."""
_BAD_PATTERN = re.compile(r"regex parse error:\n(.*?)\nerror: ([^\n]*)", re.DOTALL)


class GrammarCompiler:
    """Grammars for one tokenizer. Thread-safe; the library's tables are built when first needed."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab
        self._tables: Any = None
        self._marks = sorted(filter(None, tokenizer.control_texts()), key=len, reverse=True)

    def json_schema(self, schema: Any, thinking: ReasoningState) -> Callable[[], TokenConstraint]:
        """Answers that are one JSON value of the schema, after the reasoning where the model reasons."""
        lead = self._literal("<|channel|>final<|message|>") if thinking.is_harmony else ""
        rules = f"answer: {lead} value\nvalue: %json {schema_text(schema)}"
        return self._compile(self._lark(thinking, rules), "response_format")

    def tool_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        fmt: ToolFormat,
        thinking: ReasoningState,
        parallel: bool,
    ) -> Callable[[], TokenConstraint]:
        """Answers that call one of the tools (or several, where parallel), written as the model writes calls."""
        functions = [function_of(tool) for tool in tools]
        check_parameters(functions)
        rules = tool_rules(fmt, functions, self._literal, parallel)
        return self._compile(self._lark(thinking, rules), "tools")

    def _lark(self, thinking: ReasoningState, rules: str) -> str:
        """The grammar of an answer, with the reasoning that may stand before what the rules ask for."""
        fmt = thinking.fmt
        if fmt is None:
            return f"start: answer\n{rules}\n"
        begin, optional = ("", "") if thinking.begun else (self._literal(fmt.begin), "?")
        behind = self._literal("<|start|>assistant") if thinking.is_harmony else "/\\n{0,2}/"
        if self._tokenizer.control_id(fmt.end) is None:
            thoughts = f"thoughts[lazy]: /(?s:.*){regex_text(fmt.end)}/"
        else:
            thoughts = f"thoughts: THOUGHTS {self._literal(fmt.end)}\nTHOUGHTS: /(?s:.*)/"
        head = f"start: reasoning{optional} answer\nreasoning: {begin} thoughts {behind}"
        return f"{head}\n{thoughts}\n{rules}\n"

    def _literal(self, text: str) -> str:
        """A text as a grammar spells it. Control tokens are named by id: nothing else may stand for them."""
        if not text:
            return ""
        pieces = re.split(f"({'|'.join(map(re.escape, self._marks))})", text) if self._marks else [text]
        ids = [self._tokenizer.control_id(piece) for piece in pieces]
        return " ".join(
            json.dumps(piece) if token_id is None else f"<[{token_id}]>"
            for piece, token_id in zip(pieces, ids, strict=True)
            if piece
        )

    def _compile(self, lark: str, param: str) -> Callable[[], TokenConstraint]:
        library, tables = self._load()
        text = library.LLMatcher.grammar_from_lark(lark)
        limits = library.LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)
        matcher = library.LLMatcher(tables, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise FieldError(f"{param} cannot be turned into a grammar: {_told(matcher.get_error())}", param)

        def new_constraint() -> GrammarConstraint:
            return GrammarConstraint(matcher.deep_copy(), self._n_vocab, self._tokenizer.eog_ids, param)

        probe = new_constraint()  # what is too much for the library shows in the first tokens as a rule
        for _ in range(N_PROBES):
            probe.advance(int(probe.allowed().argmax()))
        if probe.error is not None:
            raise probe.error
        return new_constraint

    def _load(self) -> tuple[Any, Any]:
        try:
            import llguidance
        except ImportError:
            raise NotSupportedError(
                f"structured answers need the package llguidance on the server: {install_command('server')}"
            ) from None
        if self._tables is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            eog_ids = sorted(self._tokenizer.eog_ids)
            if not eog_ids:
                raise NotSupportedError("structured answers need a model file that names its end token")
            self._tables = llguidance.LLTokenizer(wrapper, n_vocab=self._tokenizer.n_vocab, eos_token=eog_ids)
        return llguidance, self._tables


@dataclass(frozen=True, slots=True)
class ReasoningState:
    """Whether an answer may begin with reasoning: not at all (no format), if the model wants to, or certainly (begun).

    is_harmony: every message of the answer has a header, so also the one behind the reasoning.
    """

    fmt: ReasoningFormat | None = None
    begun: bool = False
    is_harmony: bool = False


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.n_vocab)
        self.eos_token_id = next(iter(sorted(tokenizer.eog_ids)))
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = sorted(tokenizer.control_ids)

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


class GrammarConstraint:
    """A TokenConstraint that follows one answer through a grammar. When the grammar is at its end, or fails, only the
    end of the answer is left; a failure is told by `error`, and the answer is none."""

    def __init__(self, matcher: Any, n_vocab: int, eog_ids: frozenset[int], param: str) -> None:
        """param: the field of the request that asked for the grammar."""
        self._matcher, self._n_vocab, self._param = matcher, n_vocab, param
        self._end = np.zeros(n_vocab, np.bool_)
        self._end[sorted(eog_ids)] = True
        self.error: FieldError | None = None

    def allowed(self) -> np.ndarray:
        """See request.TokenConstraint."""
        if self.error is None and not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.zeros(self._n_vocab, np.bool_)
            known = np.unpackbits(bits, bitorder="little")[: self._n_vocab]
            mask[: known.size] = known
            if not self._failed() and not mask.any() and not self._matcher.is_accepting():
                self._fail("nothing may follow what has been written")
            if self.error is None and mask.any():
                return mask
        return self._end

    def advance(self, token_id: int) -> None:
        """See request.TokenConstraint."""
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._failed()

    def _failed(self) -> bool:
        if self.error is None and self._matcher.is_error():
            self._fail(_told(self._matcher.get_error()))
        return self.error is not None

    def _fail(self, why: str) -> None:
        log.info("the grammar of an answer failed: %s", why)
        self.error = FieldError(f"the answer cannot be held to the grammar of {self._param}: {why}", self._param)


def _told(text: str) -> str:
    """What the library says of an error, in one line."""
    if (bad := _BAD_PATTERN.search(text)) is not None:
        shown = bad[1].strip().splitlines()[0][:100] if bad[1].strip() else ""
        return f"the pattern {shown!r} is no regular expression that can be used: {bad[2][:200]}"
    first = (text.strip().splitlines() or ["unknown error"])[0]
    return re.sub(r"^at \d+\(\d+\): ", "", first)[:300]


def schema_of_response_format(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that a response_format asks for; None for plain text."""
    if response_format is None:
        return None
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return response_format.get("schema") or {"type": "object"}
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
        if schema is None:
            raise FieldError("response_format.json_schema.schema is missing", "response_format")
        return schema
    raise FieldError("response_format.type must be text, json_object or json_schema", "response_format")
