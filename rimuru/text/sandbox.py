"""The jinja2 environment of chat templates: what they may use, and how much.

A template comes out of a model file that nobody has read. It runs in jinja2's immutable sandbox, and here its work is
bounded too: rounds and calls are counted, texts and numbers cannot grow past a limit, and the clock is looked at.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 16 << 20
"""Characters that one rendering may write or hold in one value."""
MAX_ELEMENTS = 1 << 20
MAX_ROUNDS = 1_000_000
MAX_SECONDS = 5.0
_MAX_WIDTH = 100_000
_MAX_BITS = 1 << 14
_WIDE_FORMAT = re.compile(r"\d{6}")
_TICK, _JOIN = " tick", " join"  # filters that the compiled template calls; no template can spell these names
_PASSED_BY_JINJA = (jinja2.Environment, Context, nodes.EvalContext)
_WIDTH_FILTERS = frozenset(("center", "indent", "wordwrap", "batch", "slice", "truncate", "tojson"))
_ELEMENT_FILTERS = frozenset(
    (
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    )
)
"""Filters that hand elements on without writing them as text."""


class TemplateLimitError(jinja2.TemplateError):
    """The template asked for more work or memory than a prompt can need."""


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it changes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Budget(threading.local):
    """What is left of one rendering, in the thread that renders."""

    rounds = MAX_ROUNDS
    characters = MAX_CHARACTERS
    deadline = float("inf")

    def start(self) -> None:
        self.rounds = MAX_ROUNDS
        self.characters = MAX_CHARACTERS
        self.deadline = time.monotonic() + MAX_SECONDS


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The semantics of the transformers library's chat templates, with limits. One may serve many threads."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        self._budget = _Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=self._count_output,
        )
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.filters["tojson"] = to_json
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters[_TICK] = self._tick_filter
        self.filters[_JOIN] = _join_texts

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow and shrink by one element a call: templates repaired for other engines than transformers do
        that (Kimi K2), and every list that a template can reach is the rendering's own."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def load(self, source: str) -> jinja2.Template:
        """Compile a template text. Raises jinja2.TemplateError."""
        return self.from_string(_CountRounds().visit(self.parse(source)))

    def render(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        """Run a template of load(). Raises TemplateLimitError past a limit, and whatever the template raises."""
        self._budget.start()
        pieces: list[str] = []
        n_characters = 0
        for piece in template.generate(variables):
            n_characters += len(piece)
            _check_characters(n_characters)
            pieces.append(piece)
        return "".join(pieces)

    def _tick(self, n_characters: int = 0) -> None:
        """Count one round of a loop, one macro or one call, and the fixed text that it writes."""
        budget = self._budget
        budget.rounds -= 1
        budget.characters -= n_characters
        if budget.rounds < 0:
            raise TemplateLimitError(f"it runs for more than {MAX_ROUNDS} rounds")
        if budget.characters < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters")
        if not budget.rounds & 0xFF and time.monotonic() > budget.deadline:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS} seconds")

    @jinja2.pass_context
    def _tick_filter(self, context: Context, n_characters: int) -> None:
        # Asking for the context keeps the compiler from taking the call for a constant.
        del context
        self._tick(n_characters)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._tick()
        target = getattr(obj, "__self__", None) or getattr(getattr(obj, "__wrapped__", None), "__self__", None)
        if isinstance(target, str):
            _check_text_call(getattr(obj, "__name__", ""), target, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def _count_output(self, value: object) -> object:
        self._budget.characters -= _text_length(value)
        if self._budget.characters < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters")
        return value

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with its arguments checked before it runs. Keeps what jinja2 noted on the function."""

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self._tick()
            values = [value for value in args if not isinstance(value, _PASSED_BY_JINJA)]
            if name not in _ELEMENT_FILTERS:
                for value in values:
                    _check_characters(_text_length(value))
            _check_filter(name, values, kwargs)
            return function(*args, **kwargs)

        return checked


class _CountRounds(NodeTransformer):
    """Puts a tick into every loop and macro, and makes `~` a call that checks lengths."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter_call(_JOIN, nodes.Tuple(node.nodes, "load"), node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        n_fixed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.ExprStmt(_filter_call(_TICK, nodes.Const(n_fixed), node.lineno))
        node.body = [tick.set_lineno(node.lineno), *node.body]
        return node  # type: ignore[no-any-return]


def _filter_call(name: str, argument: nodes.Expr, line: int) -> nodes.Filter:
    call = nodes.Filter(argument, name, [], [], None, None)
    call.set_lineno(line)
    argument.set_lineno(line)
    return call


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as models saw it in training: plain json.dumps, nothing escaped for HTML, keys in order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_elements
    )


def _elements(value: object) -> list[object]:
    """What a filter such as `map` gives, which json does not know."""
    if isinstance(value, Iterator):
        return list(itertools.islice(value, MAX_ELEMENTS))
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _check_characters(n_characters: int) -> None:
    if n_characters > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS} characters")


def _check_length(value: object, n: int) -> None:
    if isinstance(value, (str, bytes)):
        _check_characters(n)
    elif n > MAX_ELEMENTS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ELEMENTS} elements")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        _check_length(left, len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "*":
        for sized, times in ((left, right), (right, left)):
            if hasattr(sized, "__len__") and isinstance(times, int):
                _check_length(sized, len(sized) * times)
        _check_bits(left, right, 1)
    elif operator == "**" and isinstance(right, int):
        _check_bits(left, 0, max(right, 1))


def _check_bits(left: object, right: object, times: int) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * times + right.bit_length() > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")


def _check_widths(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise TemplateLimitError(f"it asks for a width of more than {_MAX_WIDTH}")


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError(f"it asks for a width of more than {_MAX_WIDTH}")
    if "*" in text or "{" in text:
        _check_widths(values)
    # A field may name any value, and any number of fields the same one.
    n_fields = text.count("%") + text.count("{")
    _check_characters(len(text) + n_fields * max(map(_text_length, values), default=0))


def _text_length(value: object) -> int:
    """About how long str(value) is, found without making it; stops past MAX_CHARACTERS."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, dict)):
        return 0
    n_characters = 0
    rest: list[object] = [value]
    while rest and n_characters + 2 * len(rest) <= MAX_CHARACTERS:  # lists may hold one another, many times over
        item = rest.pop()
        if isinstance(item, (str, bytes)):
            n_characters += len(item)
        elif isinstance(item, dict):
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, (list, tuple)):
            rest += item
        n_characters += 2
    return n_characters + 2 * len(rest)


def _join_texts(parts: tuple[object, ...]) -> str:
    """The operator `~`."""
    _check_characters(sum(map(_text_length, parts)))
    return "".join(map(str, parts))


def _check_text_call(name: str, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths((*args, *kwargs.values()))
    elif name in ("format", "format_map"):
        _check_format(target, (*args, *kwargs.values()))
    elif name == "replace" and len(args) >= 2:
        _check_replace(target, args[0], args[1])
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _check_join(target, args[0])


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_characters(len(text) + text.count(old) * len(new))


def _check_join(separator: str, parts: Any) -> None:
    _check_characters(_text_length(list(parts)) + len(separator) * len(parts))


def _check_filter(name: str, values: list[Any], kwargs: dict[str, Any]) -> None:
    if name in _WIDTH_FILTERS:
        _check_widths((*values[1:], *kwargs.values()))
    elif name == "format" and values and isinstance(values[0], str):
        _check_format(values[0], (*values[1:], *kwargs.values()))
    elif name == "replace" and len(values) >= 3:
        _check_replace(str(values[0]), values[1], values[2])
    elif name == "join" and values and hasattr(values[0], "__len__"):
        _check_join(str(values[1] if len(values) > 1 else kwargs.get("d", "")), values[0])
