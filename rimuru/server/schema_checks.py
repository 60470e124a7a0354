"""What a JSON schema may not hold, because the grammar library would take it for something else or never come to an
end: numbers beyond what a double holds exactly, and references that lead back to themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_EXACT = 1 << 53
"""Beyond this not every integer is a double; the library computes with doubles."""
MIN_BOUND = 1e-15
"""Bounds nearer to zero (but not zero) are no longer met to the last digit."""
MAX_VISITS = 200_000
"""Parts of a schema that are looked at to find endless references; a larger one is left to the grammar."""

_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_NOTES = frozenset(("default", "examples", "title", "description", "$comment"))


def inexact_number(schema: Any) -> str | None:
    """Where the schema has a number that the library cannot hold exactly, and what is wrong; None where it has none."""
    for path, key, number in _numbers(schema):
        if abs(number) > MAX_EXACT:
            return f"{path} is beyond 2^53 (9007199254740992): numbers of that size cannot be kept exactly"
        if key in _BOUNDS and 0 < abs(number) < MIN_BOUND:
            return f"{path} is too close to zero to be kept exactly"
    return None


def _numbers(schema: Any) -> Iterator[tuple[str, str, int | float]]:
    """(path, keyword, number) of all numbers that limit values."""
    pending: list[tuple[str, str, Any, str]] = [("", "", schema, "schema")]
    while pending:
        path, key, value, kind = pending.pop()
        if isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            if kind == "data" or key in _BOUNDS or key in _COUNTS:
                yield path or "the value", key, value
        elif isinstance(value, list):
            pending += [(f"{path}[{i}]", key, item, kind) for i, item in enumerate(value)]
        elif isinstance(value, Mapping):
            for name, item in value.items():
                at = f"{path}.{name[:40]}".lstrip(".")
                if kind == "data" or (kind == "schema" and name in ("const", "enum")):
                    pending.append((at, name if kind == "schema" else key, item, "data"))
                elif kind == "by name":
                    pending.append((at, "", item, "schema"))
                elif name not in _NOTES:
                    pending.append((at, name, item, "by name" if name in _BY_NAME else "schema"))


def is_endless(schema: Any) -> bool:
    """True where no finite value fits, because what every value must contain refers back to the schema itself."""
    return _Endings(schema).is_endless()


class _Endings:
    """Which targets of references have finite values: those found so far, until no more are found."""

    def __init__(self, schema: Any) -> None:
        self.root = schema
        self._targets: dict[str, Any] = {}
        self._ending: set[int] = set()
        self._n_visits = 0

    def is_endless(self) -> bool:
        self._find_targets()
        if not self._targets:
            return False
        found = True
        while found and self._n_visits < MAX_VISITS:
            found = False
            for target in reversed(self._targets.values()):  # what others need tends to be found late
                if id(target) not in self._ending and self._ends(target):
                    self._ending.add(id(target))
                    found = True
        return self._n_visits < MAX_VISITS and not self._ends(self.root)

    def _find_targets(self) -> None:
        pending, seen = [self.root], set()
        while pending:
            value = pending.pop()
            if not isinstance(value, (dict, list)) or id(value) in seen:
                continue
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
            ref = value.get("$ref") if isinstance(value, dict) else None
            if isinstance(ref, str) and ref not in self._targets and (target := self._resolve(ref)) is not None:
                self._targets[ref] = target
                pending.append(target)

    def _resolve(self, ref: str) -> dict[str, Any] | None:
        if ref != "#" and not ref.startswith("#/"):
            return None
        value = self.root
        for part in unquote(ref).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and part.isascii() and part.isdigit() and len(part) < 7:
                value = value[int(part)] if int(part) < len(value) else None
            else:
                return None
        return value if isinstance(value, dict) else None

    def _ends(self, schema: Any) -> bool:
        self._n_visits += 1
        if not isinstance(schema, dict) or "const" in schema or "enum" in schema or self._n_visits > MAX_VISITS:
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref in self._targets and id(self._targets[ref]) not in self._ending:
            return False
        if not all(map(self._ends, _list(schema.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            options = _list(schema.get(key))
            if options and not any(map(self._ends, options)):
                return False
        kind = schema.get("type")
        if kind in ("object", ["object"]):
            return all(self._member_ends(schema, name) for name in _list(schema.get("required")))
        return kind not in ("array", ["array"]) or self._items_end(schema)

    def _member_ends(self, schema: dict[str, Any], name: Any) -> bool:
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        if isinstance(properties, dict) and isinstance(name, str) and name in properties:
            return self._ends(properties[name])
        others = list(patterns.values()) if isinstance(patterns, dict) else []
        return any(map(self._ends, [*others, schema.get("additionalProperties", True)]))

    def _items_end(self, schema: dict[str, Any]) -> bool:
        least, items = schema.get("minItems"), schema.get("items")
        if not isinstance(least, int) or least <= 0:
            return True
        heads = _list(schema.get("prefixItems")) or _list(items)
        return all(map(self._ends, heads[:least])) and (least <= len(heads) or self._ends(items))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
