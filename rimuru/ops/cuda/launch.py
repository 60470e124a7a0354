"""Kernel: one compiled function with a declared signature. The only place where kernels are launched.

A signature is a string of parameters in the kernel's order, separated by commas:

    "out: f32*, x: f32*, table: *, n_tokens: i32, n_bytes: i64, eps: f32"

`f32*` is a pointer whose array must have that element type, `*` a pointer to anything. A pointer argument is a device
array, an address (int), or None (null). Scalars are packed by their declared type. With RIMURU_CHECK=0 nothing is
verified.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from rimuru.base import env
from rimuru.ops.cuda import dependent, loader

_SCALARS = {"i32": "i4x", "i64": "q", "f32": "f4x", "u64": "Q"}
"""struct formats of the scalar types, each in a slot of 8 bytes."""

_ELEMENTS = {
    "f32": "float32", "f16": "float16", "bf16": "uint16", "i8": "int8", "u8": "uint8", "i32": "int32",
    "i64": "int64", "u64": "uint64", "bool": "bool",
}  # fmt: skip


class Kernel:
    """A kernel of `path` under cuda_src, compiled with `defines` at its first launch.

    Arguments are packed into one buffer per kernel, which the driver reads during the launch: one thread at a time.
    """

    _rehearsed: ClassVar[dict[Kernel, int] | None] = None

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
        n = len(self.parameters)
        self._labels = [label for label, _ in self.parameters]
        self._kinds = [
            (kind not in _SCALARS, np.dtype(_ELEMENTS[kind[:-1]]) if kind[:-1] in _ELEMENTS else None)
            for _, kind in self.parameters
        ]
        self._packer = struct.Struct("=" + "".join(_SCALARS.get(kind, "Q") for _, kind in self.parameters))
        self._buffer = ctypes.create_string_buffer(8 * n)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * n)(*[base + 8 * i for i in range(n)])
        self._pointers_at = ctypes.addressof(self._pointers)
        self._raw: Any = None
        self._function = 0
        self._launch_kernel: Any = None
        self._current_stream: Any = None
        self._shared_bytes = 0
        self._checked = env.check_launches()

    @property
    def source(self) -> tuple[str, dict[str, int | str]]:
        """(path, defines), as loader.compile_all takes it."""
        return self.path, self.defines

    def load(self, shared_bytes: int = 0) -> None:
        """Compile now, and allow launches with so much dynamic shared memory; a launch during graph capture must find
        its kernel loaded."""
        if self._launch_kernel is None:
            import cupy

            self._raw = loader.module(self.path, self.defines).kernel(self.name)
            self._function = int(self._raw.kernel.ptr)
            self._current_stream = cupy.cuda.get_current_stream
            follows = dependent.waits_for_predecessor(loader.flatten(self.path), self.name)
            self._launch_kernel = (follows and dependent.launcher()) or cupy.cuda.driver.launchKernel
        if shared_bytes > self._shared_bytes:
            # Static and dynamic shared memory share the default limit, so even a small request may need this.
            self._raw.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes = shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch on `stream`, or on the current stream of the thread."""
        if self._rehearsed is not None:
            self._rehearsed[self] = max(shared_bytes, self._rehearsed.get(self, 0))
            return
        if self._launch_kernel is None or shared_bytes > self._shared_bytes:
            self.load(shared_bytes)
        if self._checked:
            self._check(grid, block, args)
        # Checking and packing in one pass: a prefill step has a thousand launches of some twenty arguments.
        checked, values = self._checked, []
        for i, (is_pointer, wanted) in enumerate(self._kinds):
            arg = args[i]
            if not is_pointer or type(arg) is int:
                values.append(arg)
            elif arg is None:
                values.append(0)
            else:
                if checked and ((wanted is not None and arg.dtype is not wanted) or not arg._c_contiguous):
                    self._check_array(i, arg)
                values.append(arg.data.ptr)
        try:
            self._packer.pack_into(self._buffer, 0, *values)
        except struct.error as error:
            raise ValueError(f"{self.name}: {dict(zip(self._labels, values, strict=True))}: {error}") from error
        queue = self._current_stream() if stream is None else stream
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        bx, by, bz = block if len(block) == 3 else (*block, 1, 1)[:3]
        self._launch_kernel(self._function, x, y, z, bx, by, bz, shared_bytes, queue.ptr, self._pointers_at, 0)

    def _check(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, {len(args)} given")
        if min(grid) < 1 or min(block) < 1 or math.prod(block) > 1024 or max(grid[1:], default=1) > 65535:
            raise ValueError(f"{self.name}: grid {grid}, block {block} cannot be launched")

    def _check_array(self, i: int, array: Any) -> None:
        """Raise where an array is not what parameter i wants; equal types may be different objects."""
        wanted, label = self._kinds[i][1], self._labels[i]
        if wanted is not None and array.dtype != wanted:
            raise TypeError(f"{self.name}: {label} has elements {array.dtype}, not {wanted}")
        if not array._c_contiguous:  # CuPy's own flag: the public one costs a microsecond
            raise ValueError(f"{self.name}: {label} of shape {array.shape} is not contiguous")


@contextmanager
def rehearsal() -> Iterator[dict[Kernel, int]]:
    """Launches inside are noted instead of done: which kernels, with the most dynamic shared memory of each."""
    used: dict[Kernel, int] = {}
    Kernel._rehearsed = used
    try:
        yield used
    finally:
        Kernel._rehearsed = None
