"""Kernel: one compiled function with a declared signature. The only place where kernels are launched.

A signature is a string of parameters in the kernel's order, separated by commas:

    "out: f32*, x: f32*, table: *, n_tokens: i32, n_bytes: i64, eps: f32"

`f32*` is a pointer whose array must have that element type, `*` a pointer to anything. A pointer argument is a device
array, an address (int), or None (null). Scalars are packed by their declared type. With RIMURU_CHECK=0 nothing is
verified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rimuru.base import env
from rimuru.ops.cuda import loader

_SCALARS: dict[str, Any] = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "u64": np.uint64}
_ELEMENTS = {
    "f32": "float32", "f16": "float16", "bf16": "uint16", "i8": "int8", "u8": "uint8", "i32": "int32",
    "i64": "int64", "u64": "uint64", "bool": "bool",
}  # fmt: skip
_DEFAULT_SHARED_BYTES = 48 * 1024


def address_of(array: Any) -> int:
    """The device address of an array, of an int (itself) or of None (0)."""
    if array is None:
        return 0
    return array if isinstance(array, int) else int(array.data.ptr)


class Kernel:
    """A kernel of `path` under cuda_src, compiled with `defines` at its first launch."""

    def __init__(self, path: str, name: str, signature: str, defines: Mapping[str, int | str] | None = None) -> None:
        self.path = path
        self.name = name
        self.defines = dict(defines or {})
        self.parameters: list[tuple[str, str]] = []
        for parameter in signature.split(","):
            label, _, kind = (part.strip() for part in parameter.partition(":"))
            if kind not in _SCALARS and kind.rstrip("*") not in ("", *_ELEMENTS):
                raise ValueError(f"{name}: parameter {label} has the unknown type {kind!r}")
            self.parameters.append((label, kind))
        self._packers = [_SCALARS.get(kind) for _, kind in self.parameters]
        self._function: Any = None
        self._raw: Any = None
        self._shared_bytes = _DEFAULT_SHARED_BYTES
        self._checked = env.check_launches()

    @property
    def source(self) -> tuple[str, dict[str, int | str]]:
        """(path, defines), as loader.compile_all takes it."""
        return self.path, self.defines

    def load(self) -> None:
        """Compile now; a launch during graph capture must find its kernel loaded."""
        if self._function is None:
            self._raw = loader.module(self.path, self.defines).kernel(self.name)
            self._function = self._raw.kernel

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch on `stream`, or on the current stream of the thread."""
        if self._function is None:
            self.load()
        if self._checked:
            self._check(grid, block, args)
        if shared_bytes > self._shared_bytes:
            self._raw.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes = shared_bytes
        packed = tuple(
            np.uint64(address_of(arg)) if pack is None else pack(arg)
            for pack, arg in zip(self._packers, args, strict=True)
        )
        self._function(grid, block, packed, shared_bytes, stream)

    def _check(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, {len(args)} given")
        if min(grid) < 1 or min(block) < 1 or math.prod(block) > 1024 or max(grid[1:], default=1) > 65535:
            raise ValueError(f"{self.name}: grid {grid}, block {block} cannot be launched")
        for (label, kind), arg in zip(self.parameters, args, strict=True):
            if kind in _SCALARS:
                if kind == "i32" and not -(1 << 31) <= int(arg) < (1 << 31):
                    raise ValueError(f"{self.name}: {label} = {arg} does not fit in 32 bits")
            elif arg is not None and not isinstance(arg, int):
                wanted = _ELEMENTS.get(kind.rstrip("*"))
                if wanted is not None and arg.dtype != wanted:
                    raise TypeError(f"{self.name}: {label} has elements {arg.dtype}, not {wanted}")
                if not arg.flags.c_contiguous:
                    raise ValueError(f"{self.name}: {label} of shape {arg.shape} is not contiguous")
