"""Tool calls written as Python: [name(key=value), ...]."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from rimuru.server.answer_parts import Part
from rimuru.server.tool_blocks import SPACE, JsonBlock, JsonScan


class PythonBlock(JsonBlock):
    """[name(key=value), ...], or JSON where the conversation asked for that."""

    def _begin(self, parts: list[Part]) -> bool:
        self._skip(SPACE)
        if self._text == "[" or not self._text:
            return False
        inner = self._text.lstrip("[" + SPACE)
        if not inner:
            return False
        if inner[0] == "{":
            return super()._begin(parts)
        if self._text[0] != "[":
            return self._fail(parts)
        if not self._n_scanned:
            self._scan = JsonScan(quotes="\"'")
        limit = self._text.find(self.fmt.close)
        end = self._scan.end_of(self._text[self._n_scanned : limit if limit >= 0 else None])
        if end is None:
            self._n_scanned = len(self._text)
            return self._fail(parts) if limit >= 0 else False
        text = self._take(end + self._n_scanned)
        calls = python_calls(text, self.calls.parameters)
        if not calls:
            return self._fail(parts)
        for name, arguments in calls:
            self._start(parts, name)
            parts += self.calls.arguments(self._index, json.dumps(arguments, ensure_ascii=False))
        self._step = self._end
        return True


def python_calls(
    text: str, parameters: Mapping[str, Mapping[str, frozenset[str]]]
) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of a list written in Python; None where it is not one of calls with constant arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_python_call(node, parameters) for node in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


_PYTHONNAMES = {"true": True, "false": False, "null": None}


class _JsonNames(ast.NodeTransformer):
    """true, false and null as their Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _PYTHONNAMES:
            raise ValueError(node.id)
        return ast.copy_location(ast.Constant(_PYTHONNAMES[node.id]), node)


def _python_call(node: ast.expr, parameters: Mapping[str, Mapping[str, frozenset[str]]]) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    positions = list(parameters.get(name, {}))
    if len(node.args) > len(positions):
        raise ValueError("more arguments than parameters")
    values = {key: _constant(value) for key, value in zip(positions, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments of a dict")
        values[keyword.arg] = _constant(keyword.value)
    json.dumps(values, allow_nan=False)  # tuples become lists; sets and bytes are refused
    return name, values


def _constant(node: ast.expr) -> Any:
    value = ast.literal_eval(_JsonNames().visit(node))
    if isinstance(value, (set, bytes, complex)):
        raise ValueError("no JSON value")
    return value
