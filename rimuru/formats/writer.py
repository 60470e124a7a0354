"""Writes small GGUF files: test models, demo models, files with wished-for faults.

write_gguf(path, [("general.architecture", "str", "llama"), ("a.b", "arr", ("i32", [1, 2]))],
           [("output_norm.weight", (64,), BY_NAME["f32"], raw_bytes)])
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rimuru.base.units import align_up
from rimuru.formats.gguf_values import ARRAY, BOOL, NUMERIC_DTYPES, STRING, TYPE_NAMES
from rimuru.formats.quants import QuantFormat

KeyValue = tuple[str, str, object]
TensorData = tuple[str, Sequence[int], QuantFormat, "NDArray[np.uint8]"]
_TYPE_IDS = {name: type_id for type_id, name in TYPE_NAMES.items()}


def write_gguf(
    path: str | Path, kv: Iterable[KeyValue], tensors: Iterable[TensorData], version: int = 3, alignment: int = 32
) -> None:
    """Write a GGUF file.

    kv: (key, type name of gguf_values.TYPE_NAMES, value); for type `arr` the value is (element type name, values).
    tensors: (name, shape in ne order, format, uint8 array whose bytes are the rows in order). The key
    general.alignment is added where `alignment` is not 32. ValueError when bytes and shape disagree.
    """
    entries, rows = list(kv), list(tensors)
    if alignment != 32 and all(key != "general.alignment" for key, _, _ in entries):
        entries.append(("general.alignment", "u32", alignment))
    head = [b"GGUF", struct.pack("<Iqq", version, len(rows), len(entries))]
    for key, type_name, value in entries:
        head += [_string(key), struct.pack("<I", _TYPE_IDS[type_name]), _value(type_name, value)]
    offset_bytes = 0
    for name, shape, fmt, raw in rows:
        n_bytes = fmt.row_bytes(shape[0]) * int(np.prod(shape[1:], dtype=np.int64))
        if raw.nbytes != n_bytes:
            raise ValueError(f"tensor {name}: {raw.nbytes} bytes are given, {fmt.name} {list(shape)} takes {n_bytes}")
        head += [_string(name), struct.pack(f"<I{len(shape)}qIQ", len(shape), *shape, fmt.ggml_id, offset_bytes)]
        offset_bytes += align_up(n_bytes, alignment)
    with open(path, "wb") as file:
        file.write(b"".join(head))
        for _, _, _, raw in rows:
            _pad(file, alignment)
            for part in raw if raw.ndim > 2 else (raw,):  # which may repeat without taking memory (np.broadcast_to)
                file.write(np.ascontiguousarray(part).reshape(-1).data)
        _pad(file, alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(type_name: str, value: object) -> bytes:
    type_id = _TYPE_IDS[type_name]
    if type_id == STRING:
        assert isinstance(value, (str, bytes))
        return _string(value)
    if type_id == ARRAY:
        assert isinstance(value, tuple)
        element_name, values = value
        head = struct.pack("<IQ", _TYPE_IDS[element_name], len(values))
        if element_name == "str":
            return head + b"".join(_string(text) for text in values)
        return head + np.asarray(values, NUMERIC_DTYPES[_TYPE_IDS[element_name]]).tobytes()
    if type_id == BOOL:
        return bytes((bool(value),))
    return np.asarray(value, NUMERIC_DTYPES[type_id]).tobytes()
