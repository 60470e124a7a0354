"""Parser of one GGUF file's header: metadata, tensor directory, and every check that the header alone allows.

    "GGUF" | version u32 | n_tensors i64 | n_kv i64 | n_kv x (key, type u32, value)
    | n_tensors x (name, n_dims u32, dims i64[n_dims], type u32, offset u64) | padding | tensor data

Every count is compared with the bytes that are left in the file before anything of that size is allocated or looped
over, so time and memory follow the file's real size and never a number in it. The header is read, not mapped: a file
that is cut off meanwhile must give an error, and a mapping would kill the process.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path

from rimuru.base.errors import FileFormatError
from rimuru.base.screen import brief
from rimuru.base.units import MIB, align_up
from rimuru.formats.gguf_values import ARRAY, BOOL, NUMERIC_DTYPES, STRING, TYPE_NAMES, NumericArray, StringArray
from rimuru.formats.quants import BY_ID, QuantFormat

MAX_HEADER_BYTES = 256 * MIB
"""Real headers have 5 to 20 MB (the vocabulary); the limit bounds the time that a sparse hostile file can cost."""
MAX_ARRAY_ELEMENTS = 1 << 30
MAX_DIMS = 4
MAX_NAME_BYTES = 63
_INT64_MAX = (1 << 63) - 1
_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_FIRST_READ_BYTES = 1 * MIB
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: _U32,
    5: struct.Struct("<i"), 6: struct.Struct("<f"), BOOL: struct.Struct("<?"), 10: _U64, 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory.

    `shape` is in ne order: shape[0] is the contiguous input width. `offset_bytes` is absolute in the file of part
    number `part` (0 for a file that is not split).
    """

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    part: int
    offset_bytes: int
    n_bytes: int

    @property
    def n_in(self) -> int:
        """Elements of a row: the input width of a matrix."""
        return self.shape[0]

    @property
    def n_elements(self) -> int:
        """Elements of the whole tensor."""
        return _product(self.shape)

    @property
    def n_rows(self) -> int:
        """Rows of n_in elements, over all further dimensions."""
        return _product(self.shape[1:]) if self.n_in else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.format.row_bytes(self.n_in)


@dataclass(slots=True)
class Header:
    """All that a file's header says. `data` holds the header's bytes, which lazy arrays refer to."""

    version: int
    entries: dict[str, tuple[int, object]]
    tensors: list[TensorInfo]
    data: bytearray


def parse_header(path: Path, fd: int, size_bytes: int, part: int) -> Header:
    """Read and check the header of the open file `fd`. Raises FileFormatError; `part` is noted in the tensors."""
    cursor = _Cursor(path, fd, size_bytes)
    version, n_tensors, n_kv = _read_counts(cursor)
    entries = _read_entries(cursor, n_kv)
    alignment = _alignment(cursor, entries)
    rows = _read_directory(cursor, n_tensors)
    tensors = _place(cursor, rows, alignment, part)
    return Header(version, entries, tensors, cursor.finish())


def _product(dims: tuple[int, ...]) -> int:
    total = 1
    for dim in dims:
        total *= dim
    return total


class _Cursor:
    """A position in the file and the bytes read so far, which grow on demand and never past the end of the file."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.at = 0
        self.data = bytearray()
        self._fd = fd

    def error(self, what: str) -> FileFormatError:
        return FileFormatError(f"{self.path}: {what}")

    @property
    def left_bytes(self) -> int:
        return self.size_bytes - self.at

    def need(self, end: int, what: str) -> int:
        """Make data[:end] available; returns how many bytes are. Raises when the file ends before `end`."""
        if end > self.size_bytes:
            raise self.error(f"the file is cut off or damaged: it ends inside {what} ({self.size_bytes} bytes)")
        if end > MAX_HEADER_BYTES:
            raise self.error(f"the header is larger than {MAX_HEADER_BYTES >> 20} MiB, no sound model file has that")
        if end > len(self.data):
            wanted = min(self.size_bytes, max(end, 2 * len(self.data), _FIRST_READ_BYTES))
            while len(self.data) < wanted:
                piece = os.pread(self._fd, min(wanted - len(self.data), 8 * MIB), len(self.data))
                if not piece:
                    raise self.error("the file became shorter while it was read")
                self.data += piece
        return len(self.data)

    def take(self, layout: struct.Struct, what: str) -> int | float | bool:
        """The next scalar."""
        end = self.at + layout.size
        if end > len(self.data):
            self.need(end, what)
        (value,) = layout.unpack_from(self.data, self.at)
        self.at = end
        return value  # type: ignore[no-any-return]

    def count(self, layout: struct.Struct, what: str) -> int:
        """The next scalar, which is an integer."""
        return int(self.take(layout, what))

    def text(self, what: str) -> bytes:
        """The next string: u64 length and bytes."""
        length = self.count(_U64, what)
        if length > self.left_bytes:
            raise self.error(f"the file is cut off or damaged: {what} is said to have {length} bytes")
        end = self.at + length
        if end > len(self.data):
            self.need(end, what)
        found = bytes(self.data[self.at : end])
        self.at = end
        return found

    def identifier(self, what: str) -> str:
        """The next string, as a key or tensor name."""
        raw = self.text(what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not valid UTF-8: {raw[:40]!r}") from None

    def strings(self, n_strings: int, what: str) -> StringArray:
        """The next n_strings strings: only their places are noted."""
        starts = array("Q")
        note, unpack, data = starts.append, _U64.unpack_from, self.data
        at, available, size_bytes = self.at, len(data), self.size_bytes
        for _ in range(n_strings):
            if at + 8 > available:
                available = self.need(at + 8, what)
            (length,) = unpack(data, at)
            at += 8
            note(at)
            at += length
            if at > size_bytes:
                raise self.error(f"the file is cut off or damaged: a string of {what} is said to have {length} bytes")
        self.need(at, what)
        note(at + 8)
        self.at = at
        return StringArray(data, starts)

    def finish(self) -> bytearray:
        """The bytes of the header, without what was read ahead."""
        del self.data[self.at :]
        return self.data


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    cursor.need(min(4, cursor.size_bytes), "the file's first bytes")
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        raise cursor.error(f"this is no GGUF file: it starts with {magic!r} instead of b'GGUF'")
    cursor.at = 4
    version = cursor.count(_U32, "the version")
    if version and not version & 0xFFFF:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cursor.error(f"big-endian GGUF is not supported (version {swapped}); convert it to little-endian")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors, n_kv = (cursor.count(_SCALARS[11], "the header") for _ in range(2))
    if n_tensors < 0 or n_tensors * _MIN_TENSOR_BYTES > cursor.left_bytes:
        raise cursor.error(f"the header announces {n_tensors} tensors, more than the file can hold")
    if n_kv < 0 or n_kv * _MIN_KV_BYTES > cursor.left_bytes:
        raise cursor.error(f"the header announces {n_kv} metadata keys, more than the file can hold")
    return version, n_tensors, n_kv


def _read_entries(cursor: _Cursor, n_kv: int) -> dict[str, tuple[int, object]]:
    entries: dict[str, tuple[int, object]] = {}
    for _ in range(n_kv):
        key = cursor.identifier("a metadata key")
        if not key:
            raise cursor.error("a metadata key is empty")
        if key in entries:
            raise cursor.error(f"key {brief(key, 80)} is there twice")
        shown = brief(key, 80)  # what a damaged file calls a key may be a page of anything
        type_id = cursor.count(_U32, f"the type of key {shown}")
        entries[key] = (type_id, _read_value(cursor, shown, type_id))
    return entries


def _read_value(cursor: _Cursor, key: str, type_id: int) -> object:
    if type_id in _SCALARS:
        return cursor.take(_SCALARS[type_id], f"the value of key {key}")
    if type_id == STRING:
        return cursor.text(f"the value of key {key}").decode("utf-8", "replace")
    if type_id != ARRAY:
        raise cursor.error(f"key {key} has the unknown value type {type_id}")
    element_id = cursor.count(_U32, f"the array of key {key}")
    n_elements = cursor.count(_U64, f"the array of key {key}")
    if element_id == ARRAY or element_id not in TYPE_NAMES:
        what = "an array of arrays" if element_id == ARRAY else f"an array of the unknown type {element_id}"
        raise cursor.error(f"key {key} is {what}, which is not allowed")
    element_bytes = 8 if element_id == STRING else int(NUMERIC_DTYPES[element_id][2:])
    if n_elements > MAX_ARRAY_ELEMENTS or n_elements * element_bytes > cursor.left_bytes:
        raise cursor.error(f"key {key} announces an array of {n_elements} entries, more than the file can hold")
    if element_id == STRING:
        return cursor.strings(n_elements, f"the array of key {key}")
    found = NumericArray(element_id, cursor.at, n_elements)
    cursor.at += n_elements * element_bytes
    cursor.need(cursor.at, f"the array of key {key}")
    return found


def _alignment(cursor: _Cursor, entries: dict[str, tuple[int, object]]) -> int:
    type_id, value = entries.get("general.alignment", (4, 32))
    if type_id != 4 or not isinstance(value, int):
        raise cursor.error(f"key general.alignment must be of type u32, but is {TYPE_NAMES[type_id]}")
    if value <= 0 or value & (value - 1):
        raise cursor.error(f"key general.alignment is {value}, which is no power of two")
    return value


def _read_directory(cursor: _Cursor, n_tensors: int) -> list[tuple[str, tuple[int, ...], QuantFormat, int]]:
    """The tensor directory as (name, shape, format, offset in the data section)."""
    rows: list[tuple[str, tuple[int, ...], QuantFormat, int]] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        name = cursor.identifier("a tensor name")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise cursor.error(f"tensor name {name[:40]}... is longer than {MAX_NAME_BYTES} bytes")
        if name in names:
            raise cursor.error(f"tensor {name} is there twice")
        names.add(name)
        where = f"the entry of tensor {name}"
        n_dims = cursor.count(_U32, where)
        if n_dims > MAX_DIMS:
            raise cursor.error(f"tensor {name} has {n_dims} dimensions, at most {MAX_DIMS} are allowed")
        shape = tuple(cursor.count(_SCALARS[11], where) for _ in range(n_dims)) or (1,)
        type_id = cursor.count(_U32, where)
        offset_bytes = cursor.count(_U64, where)
        if min(shape) < 0:
            raise cursor.error(f"tensor {name} has a negative dimension: {list(shape)}")
        if type_id not in BY_ID:
            raise cursor.error(f"tensor {name} has the unknown type id {type_id}")
        rows.append((name, shape, BY_ID[type_id], offset_bytes))
    return rows


def _place(
    cursor: _Cursor, rows: list[tuple[str, tuple[int, ...], QuantFormat, int]], alignment: int, part: int
) -> list[TensorInfo]:
    """Sizes and absolute places: tensors lie one after the other, each padded to the alignment, inside the file."""
    data_start = align_up(cursor.at, alignment)
    tensors: list[TensorInfo] = []
    expected_bytes = 0
    for name, shape, fmt, offset_bytes in rows:
        if shape[0] % fmt.block_elements:
            raise cursor.error(
                f"tensor {name} has rows of {shape[0]} elements, no multiple of a {fmt.name} block "
                f"({fmt.block_elements})"
            )
        n_elements = _product(shape)
        n_bytes = n_elements // fmt.block_elements * fmt.block_bytes
        if max(n_elements, n_bytes) > _INT64_MAX:
            raise cursor.error(f"tensor {name} of shape {list(shape)} is too large")
        if offset_bytes != expected_bytes:
            raise cursor.error(f"tensor {name} lies at {offset_bytes} of the data, but {expected_bytes} is its place")
        start = data_start + offset_bytes
        if n_bytes and start + n_bytes > cursor.size_bytes:
            raise cursor.error(
                f"the file is cut off: tensor {name} ends at byte {start + n_bytes}, the file at {cursor.size_bytes}"
            )
        tensors.append(TensorInfo(name, shape, fmt, part, start, n_bytes))
        expected_bytes += align_up(n_bytes, alignment)
    return tensors
