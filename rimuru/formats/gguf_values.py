"""The metadata of a GGUF file: typed access to its keys, with errors that name key, type and file.

Scalars are decoded while the file is opened. Arrays stay bytes: a numeric array becomes a view of the header when it
is asked for, a string array knows where its strings lie and decodes those that are used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from rimuru.base.errors import FileFormatError, UnsupportedModelError
from rimuru.base.screen import brief

T = TypeVar("T", int, float, str, bool)
D = TypeVar("D")

BOOL, STRING, ARRAY = 7, 8, 9
NUMERIC_DTYPES: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Numpy types of the fixed-size value types; a bool is one byte."""
TYPE_NAMES: dict[int, str] = {
    0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", BOOL: "bool", STRING: "str", ARRAY: "arr",
    10: "u64", 11: "i64", 12: "f64",
}  # fmt: skip
"""Value type ids of the container format and our short names for them."""
_INTEGER_TYPES = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
_ACCEPTED: dict[type, frozenset[int]] = {
    int: _INTEGER_TYPES,
    float: _INTEGER_TYPES | {6, 12},
    bool: frozenset((BOOL,)),
    str: frozenset((STRING,)),
}
_MISSING = object()


class StringArray(Sequence[str]):
    """Strings of one array key, decoded when used. Bytes that are no UTF-8 become U+FFFD (`raw` gives them exactly)."""

    def __init__(self, buffer: bytearray, starts: Sequence[int]) -> None:
        # starts has one entry more than there are strings: text i is buffer[starts[i] : starts[i + 1] - 8], because
        # an 8-byte length stands before each text.
        self._buffer = buffer
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of string `index` (0 to len - 1)."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bytes(self._buffer[self._starts[index] : self._starts[index + 1] - 8])

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.raw(index + len(self) if index < 0 else index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        view = memoryview(self._buffer)
        starts = iter(self._starts)
        start = next(starts)
        for following in starts:
            yield str(view[start : following - 8], "utf-8", "replace")
            start = following


@dataclass(frozen=True, slots=True)
class NumericArray:
    """Where a numeric array lies in the header: element type id, byte offset and element count."""

    type_id: int
    offset_bytes: int
    n_elements: int


class KeyValues(Mapping[str, object]):
    """The keys of a file. `kv[key]` gives a Python scalar, a read-only numpy array or a StringArray.

    The typed getters take `kind`: int (any integer type), float (f32, f64 and the integers; finite), bool or str.
    All raise FileFormatError with one line that names the key, the types and the file.
    """

    def __init__(self, path: Path, header: bytearray, entries: dict[str, tuple[int, object]]) -> None:
        self._path = path
        self._header = header
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> object:
        value = self._entries[key][1]
        return self._array(value) if isinstance(value, NumericArray) else value

    def type_name(self, key: str) -> str:
        """The stored type of a key: `u32`, `str`, `arr[i32]` ... KeyError where the key is absent."""
        type_id, value = self._entries[key]
        if type_id != ARRAY:
            return TYPE_NAMES[type_id]
        return f"arr[{TYPE_NAMES[value.type_id] if isinstance(value, NumericArray) else 'str'}]"

    # The second argument of a mapping's get is the default; here it is the type, which callers nearly always give.
    @overload  # type: ignore[override]
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None = None) -> T | None: ...
    @overload
    def get(self, key: str, kind: None = None, default: D | None = None) -> object | D | None: ...
    def get(self, key: str, kind: type | None = None, default: object = None) -> object:
        """The value of a key as `kind`, or `default` where the key is absent. Without `kind`: the plain value."""
        if key not in self._entries:
            return default
        return self[key] if kind is None else self._scalar(key, kind)

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a key as `kind`; a missing key is an error."""
        if key not in self._entries:
            raise self._error(key, "is missing")
        return cast(T, self._scalar(key, kind))

    def expect(self, key: str, kind: type[T], allowed: Collection[T], default: T | None = None) -> T:
        """Like require (or get with `default`), but UnsupportedModelError unless the value is in `allowed`."""
        value = self.require(key, kind) if default is None else self.get(key, kind, default)
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise UnsupportedModelError(
                f"{self._path}: key {key} is {value!r:.80}, which is not supported ({choices} are)"
            )
        return value

    def require_list(self, key: str, kind: type[T]) -> Sequence[T]:
        """The elements of an array key; a StringArray for str, else a list. A missing key is an error."""
        if key not in self._entries:
            raise self._error(key, "is missing")
        return cast("Sequence[T]", self._list(key, kind))

    def get_list(self, key: str, kind: type[T], default: Sequence[T] | None = None) -> Sequence[T] | None:
        """Like require_list, with `default` where the key is absent."""
        return self.require_list(key, kind) if key in self._entries else default

    def per_layer(
        self, key: str, kind: type[T], n_layers: int, default: T | Sequence[T] | None = None
    ) -> tuple[T, ...]:
        """One value per layer: a scalar holds for all layers, an array must have exactly n_layers entries.

        `default` (scalar or sequence) stands for an absent key; without one the key is required.
        """
        values: object
        if key not in self._entries:
            if default is None:
                raise self._error(key, "is missing")
            values = default
        elif self._entries[key][0] == ARRAY:
            values = self._list(key, kind)
        else:
            values = self._scalar(key, kind)
        if isinstance(values, str) or not isinstance(values, Sequence):
            return (cast(T, values),) * n_layers
        if len(values) != n_layers:
            raise self._error(key, f"has {len(values)} entries, but the model has {n_layers} layers")
        return tuple(values)

    def _array(self, array: NumericArray) -> NDArray[np.generic]:
        # A fresh view each time: nothing holds on to the header longer than its user does.
        found = np.frombuffer(self._header, NUMERIC_DTYPES[array.type_id], array.n_elements, array.offset_bytes)
        if array.type_id == BOOL:
            found = found != 0
        found.flags.writeable = False
        return found

    def _scalar(self, key: str, kind: type) -> int | float | bool | str:
        type_id, value = self._entries[key]
        if type_id not in _ACCEPTED[kind]:
            raise self._error(key, f"must be of type {kind.__name__}, but is {self.type_name(key)}")
        if kind is float:
            number = float(cast(float, value))
            if not math.isfinite(number):
                raise self._error(key, f"is {number}, which is no finite number")
            return number
        return cast("int | bool | str", value)

    def _list(self, key: str, kind: type) -> Sequence[object]:
        type_id, value = self._entries[key]
        if type_id == ARRAY and kind is str and isinstance(value, StringArray):
            return value
        # Flags per layer are bool in one file and 0/1 integers in the next.
        accepted = _ACCEPTED[kind] | (_INTEGER_TYPES if kind is bool else frozenset())
        if type_id != ARRAY or not isinstance(value, NumericArray) or value.type_id not in accepted:
            raise self._error(key, f"must be an array of {kind.__name__}, but is {self.type_name(key)}")
        found = self._array(value)
        if kind is bool:
            if found.size and int(found.max()) > 1:
                raise self._error(key, "must hold flags, but has an entry that is neither 0 nor 1")
            found = found.astype(np.bool_)
        elif kind is float:
            found = found.astype(np.float64)
            if not np.isfinite(found).all():
                raise self._error(key, "has an entry that is no finite number")
        return cast("list[object]", found.tolist())

    def _error(self, key: str, what: str) -> FileFormatError:
        return FileFormatError(f"{self._path}: key {brief(key, 80)} {what}")
