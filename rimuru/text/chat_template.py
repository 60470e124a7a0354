"""Chat templates: messages to the text that a model was trained on, with the semantics of the transformers library."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import cast

import jinja2
from jinja2 import nodes

from rimuru.base.errors import BadInputError
from rimuru.text.guard import Guard, RenderedChat
from rimuru.text.messages import normalise_messages
from rimuru.text.plain_tools import knows_tools, whole_tools, with_plain_tools
from rimuru.text.sandbox import MAX_SECONDS, TemplateEnvironment, TemplateRefusal
from rimuru.text.template_habits import (
    Habits,
    find_habits,
    fit_history,
    fit_roles,
    with_told_tools,
    with_tools_in_message,
    with_written_calls,
)
from rimuru.text.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 1 << 20

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used where the file has no template but the tokens of ChatML."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\n\n' }}"
    "{% else %}{{ message.role | capitalize + ': ' + message.content + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Used where the file has no template and nothing better is known: `User: ...`, `Assistant: ...`, empty lines."""

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_TOKEN_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_READING_METHODS = frozenset(
    (
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "replace",
        "count",
    )
)


class ChatTemplate:
    """The chat template of a model. Immutable and thread-safe; templates are compiled when first used."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sources: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """sources: template texts by name ("default", "tool_use"), None for the file's own; now: their clock."""
        self._tokenizer = tokenizer
        self._sources = dict(tokenizer.chat_templates if sources is None else sources)
        if "default" not in self._sources:
            chatml = tokenizer.token_id("<|im_start|>") is not None and tokenizer.token_id("<|im_end|>") is not None
            self._sources["default"] = CHATML_TEMPLATE if chatml else PLAIN_TEMPLATE
        self._environment = TemplateEnvironment(now)
        self._compiled: dict[str, tuple[jinja2.Template, frozenset[str], Habits]] = {}
        self._control_texts = tokenizer.control_texts()
        self._token_variables = {
            f"{role}_token": text for role in _TOKEN_ROLES if (text := tokenizer.special_text(role)) is not None
        }

    def source(self, tools: bool = False) -> str:
        """The template text that a request with or without tools uses."""
        return self._sources[self._name(tools)]

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._sources else "default"

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> RenderedChat:
        """The conversation as the model reads it. `variables` go to the template as they are (enable_thinking, ...).

        Control-token texts inside messages, tools and documents are kept apart from those that the template writes.
        Raises BadInputError for messages that cannot be used, and for a template that fails or refuses them.
        """
        name = self._name(bool(tools))
        template, read_texts, habits = self._template(name)
        clash = sorted(_RESERVED & variables.keys())
        if clash:
            raise BadInputError(f"chat template variable {clash[0]!r} is reserved")
        variables = variables | {"add_generation_prompt": add_generation_prompt}

        def render(given: Sequence[object] | None) -> RenderedChat:
            try:
                source = self._sources[name]
                guard, values = self._guarded(messages, given, documents, variables, source, read_texts, habits)
            except RecursionError:
                raise BadInputError("the conversation has values that are nested too deeply") from None
            text = self._run(template, values)
            return RenderedChat(text, {s: c for s, c in guard.stand_ins.items() if s in text})

        try:
            return render(tools)
        except BadInputError:
            whole = whole_tools(tools or ())
            if not tools or whole == list(tools):
                raise
            return render(whole)  # a template may need what a client may leave out

    def _guarded(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        documents: Sequence[object] | None,
        variables: Mapping[str, object],
        source: str,
        read_texts: frozenset[str],
        habits: Habits,
    ) -> tuple[Guard, dict[str, object]]:
        """What goes into a template, with no control token spelled out. read_texts: token texts that it looks for."""
        normal = fit_history(fit_roles(normalise_messages(messages, source), habits), habits)
        if not knows_tools(source):
            normal = with_plain_tools(normal, tools)
        elif habits.tools == "message":
            normal = with_tools_in_message(normal, tools)
        guard = Guard(self._control_texts, [normal, tools, documents, variables])
        # A template that looks for a control token in earlier answers (to cut off the reasoning) must find it there.
        marked = [
            cast(
                "dict[str, object]", guard.mark(message, read_texts if message["role"] == "assistant" else frozenset())
            )
            for message in normal
        ]
        marked_tools = cast("list[object] | None", guard.mark(list(tools) if tools else None))
        if not habits.shows_calls:  # in the model's own marks, which are to be control tokens: so after the marking
            marked = with_written_calls(marked, source, self._has_token)
        if habits.tools == "untold":
            marked = with_told_tools(marked, marked_tools, source, self._has_token)
        return guard, {
            **self._token_variables,
            **{key: guard.mark(value) for key, value in variables.items()},
            "messages": marked,
            "tools": marked_tools,
            "documents": guard.mark(documents or None),
        }

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """render() as token ids."""
        return self._tokenizer.encode_chat(self.render(messages, tools, documents, add_generation_prompt, **variables))

    def _has_token(self, text: str) -> bool:
        return self._tokenizer.token_id(text) is not None

    def _template(self, name: str) -> tuple[jinja2.Template, frozenset[str], Habits]:
        found = self._compiled.get(name)
        if found is None:
            source = self._sources[name]
            if len(source) > MAX_SOURCE_CHARACTERS:
                raise BadInputError(f"the model's chat template has more than {MAX_SOURCE_CHARACTERS} characters")
            try:
                tree = self._environment.parse(source)
                template = self._environment.load(source)
            except (jinja2.TemplateError, RecursionError, ValueError, MemoryError, OverflowError) as error:
                raise BadInputError(f"the model's chat template cannot be compiled: {_one_line(error)}") from error
            until = time.monotonic() + MAX_SECONDS  # for all trials together
            habits = find_habits(
                source, tree, lambda messages: self._try(template, messages) if time.monotonic() < until else None
            )
            self._compiled[name] = found = template, _texts_read(tree) & self._control_texts, habits
        return found

    def _try(self, template: jinja2.Template, messages: list[dict[str, object]]) -> str | None:
        """A conversation without tools, None where the template cannot show it."""
        variables = {**self._token_variables, "messages": messages, "tools": None, "documents": None}
        try:
            return self._run(template, variables | {"add_generation_prompt": True})
        except BadInputError:
            return None

    def _run(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        try:
            return self._environment.render(template, variables)
        except TemplateRefusal as error:
            raise BadInputError(f"the model's chat template refuses this conversation: {_one_line(error)}") from error
        except Exception as error:  # the template is a program from the model file: it may fail in any way
            raise BadInputError(f"the model's chat template failed: {_one_line(error)}") from error


def _texts_read(tree: nodes.Template) -> frozenset[str]:
    """Fixed texts that a template looks for in other texts: `'x' in y`, `y.split('x')`, `y | replace('x', '')`."""
    found: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            found.append(compare.expr)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _READING_METHODS:
            found += call.args
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in _READING_METHODS:
            found += filtered.args
    return frozenset(node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
