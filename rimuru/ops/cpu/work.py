"""How verbs hand their arguments to workers (see simd_launch.py).

    context int64: [counter of work items | (address, rows, elements from one row to the next) per array | numbers]

A worker sees every array as [rows, elements from one row to the next]: views of wider arrays need no code of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from rimuru.ops.cpu.code_cache import code_cache
from rimuru.ops.cpu.simd_calls import WORKER_SIGNATURE, f32_pointer, f64_at, i32_pointer, u8_pointer
from rimuru.ops.cpu.simd_launch import address_of, launch

NO_FLOATS = np.empty((0, 1), np.float32)
"""Stands for an array that is not given."""
FIELDS = 128
"""Length of a context at most."""


class Worker:
    """A worker(context, index) that is compiled when it is first used: a model pays only for the verbs it calls."""

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function = function
        self._compiled: Any = None

    @property
    def address(self) -> int:
        if self._compiled is None:
            with code_cache():
                make = cfunc(WORKER_SIGNATURE, cache=True, error_model="numpy")
                self._compiled = make(self._function)
        return self._compiled.address


def run(worker: Worker, arrays: Sequence[np.ndarray], numbers: Sequence[int | float], parallel: bool) -> None:
    """Run a worker on arrays (1-D ones contiguous, 2-D ones contiguous in the last axis) and numbers.

    A Python float is passed by its float64 bits, see `real`.
    """
    fields = [0]
    for array in arrays:
        row = 1 if array.ndim == 1 else array.strides[0] // array.itemsize
        fields += (address_of(array), array.shape[0], row)
    for number in numbers:
        fields.append(struct.unpack("q", struct.pack("d", number))[0] if isinstance(number, float) else number)
    context = np.array(fields, np.int64)
    launch(worker.address, address_of(context), parallel)


@njit(cache=True, nogil=True, fastmath=False)
def matrix(c, place):  # type: ignore[no-untyped-def]
    """float32 [rows, row stride]: the array number `place` of a context."""
    return carray(f32_pointer(c[1 + 3 * place]), (c[2 + 3 * place], c[3 + 3 * place]))


@njit(cache=True, nogil=True, fastmath=False)
def vector(c, place):  # type: ignore[no-untyped-def]
    """float32 [n]: a 1-D array of a context."""
    return carray(f32_pointer(c[1 + 3 * place]), (c[2 + 3 * place],))


@njit(cache=True, nogil=True, fastmath=False)
def integers(c, place):  # type: ignore[no-untyped-def]
    """int32 [rows, row stride] of a context; a 1-D array is one column."""
    return carray(i32_pointer(c[1 + 3 * place]), (c[2 + 3 * place], c[3 + 3 * place]))


@njit(cache=True, nogil=True, fastmath=False)
def flags(c, place):  # type: ignore[no-untyped-def]
    """uint8 [n]: a 1-D array of bools of a context."""
    return carray(u8_pointer(c[1 + 3 * place]), (c[2 + 3 * place],))


@njit(cache=True, nogil=True, fastmath=False)
def real(context, place):  # type: ignore[no-untyped-def]
    """The float at int64 number `place` behind a context's address, as float32."""
    return np.float32(f64_at(context + place * 8, 1)[0])
