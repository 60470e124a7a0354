"""Built-in model shapes: metadata of published models, so that planner, inspect and simulator need no file.

A shape is the keys that a GGUF of the model has (facts section 5), from which the architecture's module makes its
description as it does for a file. Prediction blocks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rimuru.arch.quant_mix import tensor_formats
from rimuru.arch.registry import read_config
from rimuru.arch.shape_data import SHAPES, ModelShape
from rimuru.arch.spec import ModelConfig
from rimuru.arch.tensors import model_tensors
from rimuru.base.errors import BadInputError
from rimuru.formats.gguf import KeyValues, TensorInfo
from rimuru.formats.gguf_values import ARRAY, BOOL, NUMERIC_DTYPES, STRING, NumericArray
from rimuru.formats.quants import BY_NAME, QuantFormat

__all__ = ["ModelShape", "ShapeGguf", "shape_gguf", "shape_names", "shape_table", "tensor_table"]

_U32, _I32, _F32 = 4, 5, 6
KeyValue = int | float | bool | str | list[int] | list[bool] | list[float]


@dataclass(frozen=True)
class ShapeGguf:
    """What an open GGUF file shows of itself (arch.common.Gguf), without the file."""

    architecture: str
    path: Path
    kv: KeyValues
    tensors: Mapping[str, TensorInfo]


def shape_names() -> tuple[str, ...]:
    """Names of the built-in shapes, sorted."""
    return tuple(sorted(SHAPES))


def shape_table(name: str, quant: str = "q4_k_m") -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """Description and tensors of a built-in shape in a quantisation. Raises BadInputError for an unknown name."""
    gguf, config = shape_gguf(name, quant)
    return config, dict(gguf.tensors)


def shape_gguf(name: str, quant: str = "q4_k_m") -> tuple[ShapeGguf, ModelConfig]:
    """The same as an object that can stand for an open file. Raises BadInputError for an unknown name."""
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise BadInputError(f"unknown model shape {name!r}; known: {', '.join(shape_names())}")
    return describe(shape, quant, name)


def describe(shape: ModelShape, quant: str, name: str) -> tuple[ShapeGguf, ModelConfig]:
    """Description and pretended file of any shape."""
    path = Path(name)
    kv = key_values(path, {"general.architecture": shape.architecture, "general.name": name} | shape.metadata())
    # The optional tensors that the shape has decide some fields; their sizes do not matter at this point.
    n_embd = kv.require(f"{shape.architecture}.embedding_length", int)
    seed = {"token_embd.weight": (n_embd, shape.n_vocab)} | dict.fromkeys(shape.optional_tensors(), (1,))
    any_type = BY_NAME["f32"]
    first = ShapeGguf(shape.architecture, path, kv, tensor_table(seed, dict.fromkeys(seed, any_type)))
    config = read_config(first)
    shapes = model_tensors(config)
    for layer in config.layers:
        rope = getattr(layer.mixer, "rope", None)
        if rope is not None and rope.factors_tensor is not None:
            shapes[rope.factors_tensor] = (rope.n_rot // 2,)
    table = tensor_table(shapes, tensor_formats(config, shapes, quant))
    return ShapeGguf(shape.architecture, path, kv, table), config


def tensor_table(shapes: Mapping[str, tuple[int, ...]], formats: Mapping[str, QuantFormat]) -> dict[str, TensorInfo]:
    """TensorInfo of tensors that lie in no file (part 0, offset 0)."""
    table = {}
    for name, shape in shapes.items():
        n_bytes = formats[name].row_bytes(shape[0]) * int(np.prod(shape[1:], dtype=np.int64))
        table[name] = TensorInfo(name, shape, formats[name], 0, 0, n_bytes)
    return table


def key_values(path: Path, metadata: Mapping[str, KeyValue]) -> KeyValues:
    """Metadata as if read from a file: integers are u32, lists are i32, f32 or bool arrays."""
    header = bytearray()
    entries: dict[str, tuple[int, object]] = {}
    for key, value in metadata.items():
        if isinstance(value, list):
            kind = _kind(value[0])
            raw = np.asarray(value, NUMERIC_DTYPES[kind]).tobytes()
            entries[key] = ARRAY, NumericArray(kind, len(header), len(value))
            header += raw
        else:
            kind = _kind(value)
            entries[key] = (_U32 if kind == _I32 else kind), value
    return KeyValues(path, header, entries)


def _kind(value: object) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, str):
        return STRING
    return _F32 if isinstance(value, float) else _I32
