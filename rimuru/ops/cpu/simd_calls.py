"""What Numba code needs beyond arrays: calling a kernel by its address, atomics, memory at an address."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic

WORKER_SIGNATURE = types.void(types.int64, types.int64)
"""worker(context, index); see simd_launch.py."""

intrinsic: Any = _intrinsic  # Numba binds the first parameter itself, which type checkers cannot know
_IS_X86 = llvm.get_default_triple().split("-")[0] in ("x86_64", "i686", "amd64")


@intrinsic
def call(typing: Any, address: Any, args: Any) -> Any:
    """call(address, (a, b, ...)): the kernel void(int64, ...) at an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arguments = cgutils.unpack_tuple(builder, values[1])
        function_type = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(arguments))
        builder.call(builder.inttoptr(values[0], function_type.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(args))), codegen


@intrinsic
def fetch_add(typing: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at an address; the value before. Orders memory both ways."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange(typing: Any, address: Any, value: Any) -> Any:
    """Atomically replace the int64 at an address; the value before."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_atomic(typing: Any, address: Any) -> Any:
    """The int64 at an address, and all that its writer wrote before it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _IS_X86:
            function_type = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _pointer_to(element: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


i64_pointer = _pointer_to(types.int64)
i32_pointer = _pointer_to(types.int32)
f32_pointer = _pointer_to(types.float32)
f64_pointer = _pointer_to(types.float64)
u8_pointer = _pointer_to(types.uint8)


@njit(cache=True, nogil=True, fastmath=False)
def i64_at(address: int, n: int) -> np.ndarray:
    """int64 [n] at an address."""
    return carray(i64_pointer(address), (n,))


@njit(cache=True, nogil=True, fastmath=False)
def i32_at(address: int, n: int) -> np.ndarray:
    """int32 [n] at an address."""
    return carray(i32_pointer(address), (n,))


@njit(cache=True, nogil=True, fastmath=False)
def f32_at(address: int, n: int) -> np.ndarray:
    """float32 [n] at an address."""
    return carray(f32_pointer(address), (n,))


@njit(cache=True, nogil=True, fastmath=False)
def f64_at(address: int, n: int) -> np.ndarray:
    """float64 [n] at an address."""
    return carray(f64_pointer(address), (n,))


@njit(cache=True, nogil=True, fastmath=False)
def u8_at(address: int, n: int) -> np.ndarray:
    """uint8 [n] at an address."""
    return carray(u8_pointer(address), (n,))
