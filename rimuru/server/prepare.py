"""Requests to jobs: prompts become token ids, options SamplingParams, grammars and parsers. Runs in worker threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rimuru.base.errors import BadInputError, ContextLengthError
from rimuru.engine.build import LoadedModel
from rimuru.request import MAX_ANSWERS, SamplingParams, TokenConstraint
from rimuru.server.answer_parser import AnswerParser, AnswerReader, ReasoningSplitter
from rimuru.server.errors import FieldError
from rimuru.server.grammar import GrammarCompiler, ReasoningState, schema_of_response_format
from rimuru.server.harmony import HarmonyParser
from rimuru.server.openai_schema import ChatRequest, CompletionRequest, SamplingFields, TemplateRequest
from rimuru.server.tool_calls import CallCounter, ToolCallParser, function_of
from rimuru.server.tool_formats import HARMONY, reasoning_format, tool_format
from rimuru.text.guard import RenderedChat
from rimuru.text.tokenizer import Tokenizer

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_FIXED_VARIABLES = frozenset(("self", "messages", "tools", "documents", "add_generation_prompt"))


LEAST_TEXT_BYTES = 1 << 20
"""Of a text that /tokenize takes, whatever the context."""
LIKELY_TOKEN_BYTES = 8
"""Tokens of ordinary text are shorter, so that a context's worth of it is always taken."""
_MOST_IDS = 1 << 20


@dataclass(slots=True)
class Prepared:
    """What a job needs, and how its answers are read."""

    prompts: list[list[int]]
    params: SamplingParams
    make_constraint: Callable[[], TokenConstraint] | None
    new_parser: Callable[[], AnswerReader]


class Preparer:
    """Stateless but for the grammar tables; may be used by several threads at once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._grammars: GrammarCompiler | None = None
        self._longest_token_bytes = 0

    @property
    def context_length(self) -> int:
        """Now: a resize changes it."""
        return self.loaded.engine.context_length

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit in the context before it is cut into tokens: that takes seconds and memory."""
        if not self._longest_token_bytes:
            tokenizer = self.tokenizer
            self._longest_token_bytes = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab))
        at_least = len(text.encode("utf-8", "replace")) // self._longest_token_bytes
        if at_least >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {at_least} tokens or more, but the context holds {self.context_length}; shorten it"
            )

    def check_text(self, text: str) -> None:
        """Refuse a text far beyond the context that is only to be cut into tokens: a megabyte takes half a second and
        200 MB."""
        n_bytes = len(text.encode("utf-8", "replace"))
        most = max(LEAST_TEXT_BYTES, LIKELY_TOKEN_BYTES * self.context_length)
        if n_bytes > most:
            raise FieldError(f"the text has {n_bytes} bytes, the limit is {most}; send it in parts", "content")

    def check_ids(self, ids: list[int]) -> None:
        """Refuse more ids than that at once: each may stand for hundreds of bytes."""
        most = max(_MOST_IDS, self.context_length)
        if len(ids) > most:
            raise FieldError(f"there are {len(ids)} tokens, the limit is {most}; send them in parts", "tokens")

    def _encode(self, text: str) -> list[int]:
        self._check_length(text)
        return self.tokenizer.encode_prompt(text)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises BadInputError where the model's file has none."""
        if self.loaded.tokenizer is None:
            raise BadInputError("this model's file has no tokenizer: send token ids to /v1/completions instead of text")
        return self.loaded.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.loaded.engine.n_vocab)
        return self._grammars

    # ---- completions
    def completion(self, body: CompletionRequest) -> Prepared:
        """A raw completion: control tokens in the prompt are recognised, BOS is added as the file says."""
        params = body.sampling_params(self.context_length, body.logprobs is not None, body.logprobs or 0)
        _check_answers(len(body.prompts()) * params.n)
        prompts = [p if isinstance(p, list) else self._encode(p) for p in body.prompts()]
        make_constraint = self._format_constraint(body, ReasoningState())
        return Prepared(prompts, params, make_constraint, lambda: AnswerParser(None, None))

    # ---- chats
    def chat(self, body: ChatRequest) -> Prepared:
        """A conversation through the model's chat template."""
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs needs logprobs to be true", "top_logprobs")
        tools = checked_tools(body.tools) if body.tools and body.tool_choice != "none" else []
        rendered = self.render(
            body.messages, tools, body.documents, True, _variables(body.chat_template_kwargs, body.reasoning_effort)
        )
        self._check_length(rendered.marked)
        params = body.sampling_params(self.context_length, bool(body.logprobs), body.top_logprobs or 0)
        thinking = self._thinking(rendered.text, bool(tools))
        reasoning, splits = reasoning_format(self._template_source(bool(tools))), body.reasoning_format != "none"
        fmt = tool_format(self._template_source(bool(tools)), self._has_token)
        parallel = body.parallel_tool_calls is not False
        wanted = _wanted_tools(body, tools)
        if wanted:
            make_constraint: Callable[[], TokenConstraint] | None
            make_constraint = self.grammars.tool_call(wanted, fmt, thinking, parallel)
        else:
            make_constraint = self._format_constraint(body, thinking)

        def new_parser() -> AnswerReader:
            if fmt is HARMONY:
                return HarmonyParser(CallCounter(tools, parallel) if tools else None, keeps_reasoning=not splits)
            also_ends = fmt.opens if tools and fmt.ends_reasoning else ()
            return AnswerParser(
                ReasoningSplitter(thinking.begun, reasoning, also_ends) if splits and reasoning else None,
                ToolCallParser(fmt, tools, parallel) if tools else None,
            )

        return Prepared([self.tokenizer.encode_chat(rendered)], params, make_constraint, new_parser)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> RenderedChat:
        """The conversation as the model reads it."""
        if self.loaded.chat is None:
            raise BadInputError("this model's file has no tokenizer: a conversation cannot be put into tokens")
        return self.loaded.chat.render(messages, tools or None, documents, add_generation_prompt, **variables)

    def template(self, body: TemplateRequest) -> RenderedChat:
        """What /apply-template shows."""
        variables = _variables(body.chat_template_kwargs, None)
        tools = checked_tools(body.tools or ())
        return self.render(body.messages, tools, body.documents, body.add_generation_prompt, variables)

    def _template_source(self, tools: bool) -> str:
        return "" if self.loaded.chat is None else self.loaded.chat.source(tools)

    def _has_token(self, text: str) -> bool:
        return self.tokenizer.token_id(text) is not None

    def _thinking(self, prompt_text: str, tools: bool) -> ReasoningState:
        """From the template and the end of the prompt: the opening mark there has begun the reasoning, the closing one
        has ended it."""
        source, end = self._template_source(tools), prompt_text.rstrip()
        fmt = reasoning_format(source)
        if fmt is None:
            return ReasoningState()
        if end.endswith(fmt.begin):
            return ReasoningState(fmt, True)
        is_harmony = tool_format(source) is HARMONY
        return ReasoningState(None if end.endswith(fmt.end) and not is_harmony else fmt, False, is_harmony)

    def _format_constraint(
        self, body: SamplingFields, thinking: ReasoningState
    ) -> Callable[[], TokenConstraint] | None:
        schema = schema_of_response_format(body.response_format)
        return None if schema is None else self.grammars.json_schema(schema, thinking)


def checked_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools that are functions with usable names. Raises FieldError for others."""
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise FieldError(f"tools[{i}].type must be 'function'", "tools")
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise FieldError(f"tools[{i}].function.name must be a name of letters, digits, '_', '-' or '.'", "tools")
        for key, kind, told in (("parameters", Mapping, "a JSON schema"), ("description", str, "a text")):
            if not isinstance(function.get(key), (kind, type(None))):
                raise FieldError(f"tools[{i}].function.{key} must be {told}", "tools")
    return list(tools)


def _wanted_tools(body: ChatRequest, tools: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of which one must be called; none where the model is free."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise FieldError("tool_choice asks for a tool, but there are no tools", "tool_choice")
    if choice == "required":
        return tools
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = named.get("name") if isinstance(named, dict) else None
    found = [tool for tool in tools if function_of(tool)["name"] == name]
    if not found:
        raise FieldError("tool_choice names no tool of this request", "tool_choice")
    return found


def _variables(template_kwargs: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
    variables = dict(template_kwargs or {})
    clash = sorted(_FIXED_VARIABLES & variables.keys())
    if clash:
        raise FieldError(f"chat_template_kwargs may not set {clash[0]!r}", "chat_template_kwargs")
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    return variables


def _check_answers(n_answers: int) -> None:
    if n_answers > MAX_ANSWERS:
        raise FieldError(f"one request may ask for at most {MAX_ANSWERS} answers, not {n_answers}", "n")
