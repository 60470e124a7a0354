"""Vectors of float32 for Numba functions, as pieces of LLVM code.

Numba vectorises plain loops, but no float sums, since that would change their order. Here the order is chosen and
fixed: a sum over n elements runs in W lanes, the lanes are then added pairwise, always in the same tree. So a result
depends on its inputs only, never on the kernel or the shape of the call that formed it.

Addresses are int64; arrays behind them are float32 and need no alignment.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

W = 16 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 8
"""Float lanes of a vector."""

I64, F32, VOID = types.int64, types.float32, types.void
_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
VECTOR = ir.VectorType(_FLOAT, W)


def emits(returns: Any, *argument_types: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a Numba intrinsic of a function that is given a Lanes and LLVM values and returns an LLVM value or None."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typing(_context: Any, *_arguments: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Sequence[Any]) -> Any:
                result = emit(Lanes(builder), *values)
                return context.get_dummy_value() if result is None else result

            return returns(*argument_types), generate

        # Numba matches a call with the parameters that inspect sees; Lanes stands where Numba's context goes.
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        typing.__name__ = typing.__qualname__ = emit.__name__
        typing.__doc__ = emit.__doc__
        return intrinsic(typing)

    return wrap


class Lanes:
    """Builds LLVM code on vectors of W floats (or on single floats: the arithmetic is the same)."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    # ---- constants and memory
    def const(self, value: float, like: Any) -> ir.Constant:
        """`value` in every lane of a float or vector type."""
        if isinstance(like, ir.VectorType):
            return ir.Constant(like, [value] * like.count)
        return ir.Constant(like, value)

    def index(self, value: int) -> ir.Constant:
        return ir.Constant(_LONG, value)

    def splat(self, value: Any, count: int = W) -> Any:
        """A vector with one float in every lane."""
        kind = ir.VectorType(value.type, count)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT, 0))
        return self.b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), self._mask([0] * count))

    def pointer(self, address: Any, offset: Any, kind: Any) -> Any:
        """Pointer to float number `offset` behind an address."""
        offset = self.index(offset) if isinstance(offset, int) else offset
        at = self.b.add(address, self.b.shl(offset, self.index(2)))
        return self.b.inttoptr(at, ir.PointerType(kind))

    def load(self, address: Any, offset: Any = 0, kind: Any = VECTOR) -> Any:
        return self.b.load(self.pointer(address, offset, kind), align=4, typ=kind)

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        self.b.store(value, self.pointer(address, offset, value.type), align=4)

    def variable(self, value: Any) -> Any:
        """A stack slot that the optimiser turns into a register."""
        slot = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, slot)
        return slot

    def get(self, slot: Any) -> Any:
        return self.b.load(slot)

    def put(self, value: Any, slot: Any) -> None:
        self.b.store(value, slot)

    def loop(self, count: Any, start: Any = None) -> Any:
        """`with lanes.loop(n) as i:` runs i = start .. n - 1."""
        return _Loop(self.b, count, start)

    # ---- arithmetic
    def call(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        """An LLVM intrinsic that is overloaded on its first argument's type."""
        kind = arguments[0].type
        suffix = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        suffix += "f32" if element == _FLOAT else "i32"
        function = cgutils.get_or_insert_function(
            self.b.module,
            ir.FunctionType(kind if returns is None else returns, [a.type for a in arguments]),
            f"llvm.{name}.{suffix}",
        )
        return self.b.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("fma", a, b, c)

    def _mask(self, lanes: Sequence[int]) -> ir.Constant:
        return ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))

    def sums(self, vectors: Sequence[Any]) -> Any:
        """The lane sums of 2**i vectors, as one vector (a float for one). Lane i is always added to lane i + half."""
        vectors, lanes = list(vectors), W
        while lanes > 1:
            half = lanes // 2
            paired = len(vectors) > 1
            n_segments = vectors[0].type.count // lanes * (2 if paired else 1)
            low = self._mask([s * lanes + i for s in range(n_segments) for i in range(half)])
            high = self._mask([s * lanes + half + i for s in range(n_segments) for i in range(half)])
            second = vectors[1::2] if paired else [ir.Constant(vectors[0].type, ir.Undefined)]
            vectors = [
                self.b.fadd(self.b.shuffle_vector(a, b, low), self.b.shuffle_vector(a, b, high))
                for a, b in zip(vectors[::2], second, strict=True)
            ]
            lanes = half
        result = vectors[0]
        return self.b.extract_element(result, ir.Constant(_INT, 0)) if result.type.count == 1 else result

    def slice(self, vector: Any, start: int, count: int) -> Any:
        """Lanes start .. start + count."""
        return self.b.shuffle_vector(
            vector, ir.Constant(vector.type, ir.Undefined), self._mask(range(start, start + count))
        )

    def exp(self, x: Any) -> Any:
        """exp(x) for x <= 88, within 2 units in the last place; 0 below -87.3 (also for -inf)."""
        b, kind = self.b, x.type
        bounded = self.call("maxnum", x, self.const(-87.5, kind))
        n = self.call("rint", b.fmul(bounded, self.const(1.0 / math.log(2.0), kind)))
        r = self.fma(n, self.const(-0.693359375, kind), bounded)
        r = self.fma(n, self.const(2.12194440e-4, kind), r)
        p = self.const(1.9875691500e-4, kind)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.const(c, kind))
        p = b.fadd(self.fma(p, b.fmul(r, r), r), self.const(1.0, kind))
        whole = ir.VectorType(_INT, kind.count) if isinstance(kind, ir.VectorType) else _INT
        bits = b.add(b.fptosi(n, whole), self.const(127, whole))
        power = b.bitcast(b.shl(bits, self.const(23, whole)), kind)
        tiny = b.fcmp_ordered("<", x, self.const(-87.3, kind))
        return b.select(tiny, self.const(0.0, kind), b.fmul(p, power))


class _Loop:
    """Context manager over cgutils.for_range that yields the index itself."""

    def __init__(self, builder: Any, count: Any, start: Any) -> None:
        self._range = cgutils.for_range(builder, count, start=start)

    def __enter__(self) -> Any:
        return self._range.__enter__().index

    def __exit__(self, *problem: Any) -> None:
        self._range.__exit__(*problem)


# ---- single floats


@emits(F32, F32, F32, F32)
def fma(lanes: Lanes, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; loops over it become vector code."""
    return lanes.fma(a, b, c)


@emits(F32, F32)
def exp(lanes: Lanes, x: Any) -> Any:
    """exp(x), see Lanes.exp; loops over it become vector code."""
    return lanes.exp(x)


# ---- rows in memory


@emits(types.CPointer(F32), I64)
def floats(lanes: Lanes, address: Any) -> Any:
    """The address as a pointer for `numba.carray`."""
    return lanes.b.inttoptr(address, ir.PointerType(_FLOAT))


@emits(types.CPointer(types.uint16), I64)
def halves(lanes: Lanes, address: Any) -> Any:
    """The address as a pointer to 16-bit words for `numba.carray`."""
    return lanes.b.inttoptr(address, ir.PointerType(ir.IntType(16)))


def _row_sum(lanes: Lanes, n: Any, vector_term: Callable[[Any, Any], Any], term: Callable[[Any, Any], Any]) -> Any:
    """Sum of n terms: four vectors of partial sums, then one, then the rest one by one; the order depends on n only."""
    b = lanes.b
    zero = lanes.const(0.0, VECTOR)
    parts = [lanes.variable(zero) for _ in range(4)]
    n_wide = b.sdiv(n, lanes.index(4 * W))
    with lanes.loop(n_wide) as i:
        for j, part in enumerate(parts):
            at = b.add(b.mul(i, lanes.index(4 * W)), lanes.index(j * W))
            lanes.put(vector_term(at, lanes.get(part)), part)
    n_vectors = b.sdiv(n, lanes.index(W))
    with lanes.loop(n_vectors, b.mul(n_wide, lanes.index(4))) as i:
        lanes.put(vector_term(b.mul(i, lanes.index(W)), lanes.get(parts[0])), parts[0])
    first = b.fadd(lanes.get(parts[0]), lanes.get(parts[1]))
    total = lanes.sums([b.fadd(first, b.fadd(lanes.get(parts[2]), lanes.get(parts[3])))])
    result = lanes.variable(total)
    with lanes.loop(n, b.mul(n_vectors, lanes.index(W))) as i:
        lanes.put(term(i, lanes.get(result)), result)
    return lanes.get(result)


@emits(F32, I64, I64, I64)
def dot(lanes: Lanes, x: Any, y: Any, n: Any) -> Any:
    """Sum of x[i] * y[i] over n floats at two addresses."""

    def term(kind: Any) -> Callable[[Any, Any], Any]:
        return lambda at, part: lanes.fma(lanes.load(x, at, kind), lanes.load(y, at, kind), part)

    return _row_sum(lanes, n, term(VECTOR), term(_FLOAT))


@emits(F32, I64, I64)
def largest(lanes: Lanes, x: Any, n: Any) -> Any:
    """The largest of n floats at an address; -inf for none, NaN only where all are."""
    b = lanes.b
    best = lanes.variable(lanes.const(float("-inf"), VECTOR))
    n_vectors = b.sdiv(n, lanes.index(W))
    with lanes.loop(n_vectors) as i:
        lanes.put(lanes.call("maxnum", lanes.get(best), lanes.load(x, b.mul(i, lanes.index(W)))), best)
    result = lanes.variable(lanes.call("vector.reduce.fmax", lanes.get(best), returns=_FLOAT))
    with lanes.loop(n, b.mul(n_vectors, lanes.index(W))) as i:
        lanes.put(lanes.call("maxnum", lanes.get(result), lanes.load(x, i, _FLOAT)), result)
    return lanes.get(result)


@emits(I64, I64)
def take_number(lanes: Lanes, counter: Any) -> Any:
    """The int64 at an address, which is then one more: each number goes to one thread."""
    place = lanes.b.inttoptr(counter, ir.PointerType(_LONG))
    return lanes.b.atomic_rmw("add", place, lanes.index(1), "monotonic")
