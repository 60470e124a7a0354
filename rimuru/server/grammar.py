"""Answers that must follow a grammar: JSON, a JSON schema, a tool call. The grammar library llguidance is optional."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rimuru.base.errors import BadInputError
from rimuru.request import TokenConstraint
from rimuru.server.answer_parser import END_THINK, THINK
from rimuru.server.errors import FieldError, NotSupportedError
from rimuru.server.tool_calls import CLOSE, OPEN, ToolFormat, function_of
from rimuru.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_SCHEMA_CHARACTERS = 1 << 18
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write white space: a model cannot fill its budget with blanks, and sees the spacing it was trained on."""


class GrammarCompiler:
    """Grammars for one tokenizer. Thread-safe; the library's tables are built when first needed."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab
        self._tables: Any = None

    def json_schema(self, schema: Any, thinking: ReasoningState) -> Callable[[], TokenConstraint]:
        """Answers that are one JSON value of the schema, after the reasoning where the model reasons."""
        return self._compile(_lark(thinking, f"answer: %json {_schema_text(schema)}"), "response_format")

    def tool_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        fmt: ToolFormat,
        thinking: ReasoningState,
        parallel: bool,
    ) -> Callable[[], TokenConstraint]:
        """Answers that call one of the tools (or several, where parallel), written as the model writes calls."""
        functions = [function_of(tool) for tool in tools]
        rule = _TOOL_RULES[fmt](functions)
        many = "+" if parallel and fmt != "json" else ""
        return self._compile(_lark(thinking, f"answer: call{many}\n{rule}"), "tools")

    def _compile(self, lark: str, param: str) -> Callable[[], TokenConstraint]:
        library, tables = self._load()
        text = library.LLMatcher.grammar_from_lark(lark)
        matcher = library.LLMatcher(tables, text, log_level=0)
        if matcher.is_error():
            raise FieldError(f"{param} cannot be turned into a grammar: {_first_line(matcher.get_error())}", param)
        return lambda: GrammarConstraint(matcher.deep_copy(), self._n_vocab, self._tokenizer.eog_ids)

    def _load(self) -> tuple[Any, Any]:
        try:
            import llguidance
        except ImportError:
            raise NotSupportedError(
                "structured answers need the package llguidance on the server: pip install 'rimuru[server]'"
            ) from None
        if self._tables is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            eog_ids = sorted(self._tokenizer.eog_ids)
            if not eog_ids:
                raise NotSupportedError("structured answers need a model file that names its end token")
            self._tables = llguidance.LLTokenizer(wrapper, n_vocab=self._tokenizer.n_vocab, eos_token=eog_ids)
        return llguidance, self._tables


class ReasoningState:
    """Whether an answer may begin with reasoning: not at all, if the model wants to, or certainly (begun)."""

    def __init__(self, possible: bool, begun: bool) -> None:
        self.possible, self.begun = possible, begun


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.n_vocab)
        self.eos_token_id = next(iter(sorted(tokenizer.eog_ids)))
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


class GrammarConstraint:
    """A TokenConstraint that follows one answer through a grammar. When the grammar is at its end, or fails, only the
    end of the answer is left."""

    def __init__(self, matcher: Any, n_vocab: int, eog_ids: frozenset[int]) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._end = np.zeros(n_vocab, np.bool_)
        self._end[sorted(eog_ids)] = True
        self.error: str | None = None

    def allowed(self) -> np.ndarray | None:
        """See request.TokenConstraint."""
        if self.error is None and not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.zeros(self._n_vocab, np.bool_)
            known = np.unpackbits(bits, bitorder="little")[: self._n_vocab]
            mask[: known.size] = known
            if mask.any() and not self._failed():
                return mask
        return self._end

    def advance(self, token_id: int) -> None:
        """See request.TokenConstraint."""
        if self.error is None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._failed()

    def _failed(self) -> bool:
        if self.error is None and self._matcher.is_error():
            self.error = _first_line(self._matcher.get_error())
            log.warning("a grammar gave up, the answer ends here: %s", self.error)
        return self.error is not None


def _lark(thinking: ReasoningState, rules: str) -> str:
    if not thinking.possible:
        return f"start: answer\n{rules}\n"
    begin = "" if thinking.begun else json.dumps(THINK) + " "
    optional = "" if thinking.begun else "?"
    return (
        f"start: reasoning{optional} answer\n"
        f"reasoning: {begin}thoughts /\\n{{0,2}}/\n"
        f"thoughts[lazy]: /(?s:.*){END_THINK.replace('/', chr(92) + '/')}/\n{rules}\n"
    )


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, (dict, bool)):
        raise FieldError("the JSON schema must be an object", "response_format")
    try:
        text = json.dumps({"x-guidance": _COMPACT, **schema} if isinstance(schema, dict) else schema)
    except (ValueError, RecursionError):
        raise FieldError("the JSON schema is nested too deeply", "response_format") from None
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise FieldError(f"the JSON schema has more than {MAX_SCHEMA_CHARACTERS} characters", "response_format")
    return text


def _call_schema(functions: Sequence[Mapping[str, Any]], key: str) -> str:
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": str(f["name"])}, key: _parameters(f)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for f in functions
    ]
    return _schema_text({"anyOf": options})


def _parameters(function: Mapping[str, Any]) -> Any:
    schema = function.get("parameters")
    return schema if isinstance(schema, Mapping) and schema else {"type": "object"}


def _hermes_rules(functions: Sequence[Mapping[str, Any]]) -> str:
    return (
        f"call: {json.dumps(OPEN)} /\\n/ object /\\n/ {json.dumps(CLOSE)} /\\n?/\n"
        f"object: %json {_call_schema(functions, 'arguments')}"
    )


def _json_rules(functions: Sequence[Mapping[str, Any]]) -> str:
    return f"call: %json {_call_schema(functions, 'parameters')}"


def _tagged_rules(
    functions: Sequence[Mapping[str, Any]], name: str, name_end: str, key: str, key_end: str, value_end: str
) -> str:
    """Calls whose parameters stand between tags: one rule a function, one a parameter, in the schema's order."""
    lines, calls = [], []
    for i, function in enumerate(functions):
        schema = _parameters(function)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        rules = []
        for j, (parameter, value) in enumerate(properties.items()):
            rules.append(f"p{i}_{j}" + ("" if parameter in required else "?"))
            lead = json.dumps(f"{key}{parameter}{key_end}")
            if isinstance(value, Mapping) and value.get("type", "string") != "string":
                body = f"v{i}_{j} {json.dumps(value_end)}"
                lines.append(f"v{i}_{j}: %json {_schema_text(dict(value))}")
            else:
                body = f"s{i}_{j}"
                lines.append(f"s{i}_{j}[lazy]: /(?s:.*){_regex(value_end)}/")
            lines.append(f"p{i}_{j}: {lead} {body}")
        calls.append(f"c{i}")
        lines.append(f"c{i}: {json.dumps(name + str(function['name']) + name_end)} {' '.join(rules)}")
    return "\n".join([f"call: {json.dumps(OPEN)} ({' | '.join(calls)}) {json.dumps(CLOSE)} /\\n?/", *lines])


def _coder_rules(functions: Sequence[Mapping[str, Any]]) -> str:
    tagged = _tagged_rules(functions, "\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n")
    return tagged.replace(f") {json.dumps(CLOSE)}", f") {json.dumps('</function>' + chr(10) + CLOSE)}", 1)


def _glm_rules(functions: Sequence[Mapping[str, Any]]) -> str:
    return _tagged_rules(functions, "", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")


_TOOL_RULES: dict[ToolFormat, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "hermes": _hermes_rules,
    "json": _json_rules,
    "coder": _coder_rules,
    "glm": _glm_rules,
}


def _regex(text: str) -> str:
    """A literal text inside /.../ of a grammar."""
    return text.replace("\\", "\\\\").replace("/", "\\/").replace("\n", "\\n")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["unknown error"])[0][:300]


def schema_of_response_format(response_format: Mapping[str, Any] | None) -> Any:
    """The JSON schema that a response_format asks for; None for plain text."""
    if response_format is None:
        return None
    kind = response_format.get("type", "text")
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
    raise BadInputError("response_format.type must be text, json_object or json_schema")
