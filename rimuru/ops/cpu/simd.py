"""A small vector language over LLVM IR, for the inner loops that NumPy and plain Numba cannot express.

A kernel is a Python function that receives a `Kernel` and emits code through values (`V`) with ordinary operators:

    def emit(k, source, target, n_vectors):
        with k.loop(n_vectors) as i:
            x = k.load(source + i * 64, I32X16)
            k.store((x >> 4) & 0x0F0F0F0F, target + i * 64)

Addresses are 64-bit integers and loads need no alignment. Integer lanes wrap. Float operations are done one by one in
the order written (no reassociation, no hidden fused multiply-add), so a result is the same on every processor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I1 = ir.IntType(1)
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16 = ir.HalfType()
F32 = ir.FloatType()
I8X16 = ir.VectorType(I8, 16)
I8X32 = ir.VectorType(I8, 32)
I8X64 = ir.VectorType(I8, 64)
I32X4 = ir.VectorType(I32, 4)
I32X8 = ir.VectorType(I32, 8)
I32X16 = ir.VectorType(I32, 16)
F32X8 = ir.VectorType(F32, 8)
F32X16 = ir.VectorType(F32, 16)


@dataclass(frozen=True, slots=True)
class Isa:
    """The instructions that kernels may use beyond what plain LLVM vectors compile to."""

    name: str
    dot_lanes: int
    """Lanes of one integer dot instruction (u8 x s8 -> i32); 0 = none."""
    avx2: bool
    byte_shuffle: bool
    tile_tokens: int
    """Tokens of a register tile in matrix products."""


GENERIC = Isa("generic", 0, False, False, 2)


def choose_isa(features: dict[str, bool]) -> Isa:
    """The best variant for a processor with these LLVM feature names."""
    if features.get("avx512vnni") and features.get("avx512bw") and features.get("avx512vl"):
        return Isa("avx512vnni", 16, True, True, 4)
    if features.get("avxvnni"):
        return Isa("avxvnni", 8, True, True, 2)
    if features.get("avx2"):
        return Isa("avx2", 0, True, True, 2)
    return GENERIC


def _lanes(type_: ir.Type) -> int:
    return type_.count if isinstance(type_, ir.VectorType) else 1


def _element(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _like(type_: ir.Type, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, type_.count) if isinstance(type_, ir.VectorType) else element


def _suffix(type_: ir.Type) -> str:
    element = {F32: "f32", I8: "i8", I32: "i32", I64: "i64"}[_element(type_)]
    return f"v{type_.count}{element}" if isinstance(type_, ir.VectorType) else element


class V:
    """A value of a kernel: a scalar or a vector. A Python number in an operation stands for all lanes."""

    __slots__ = ("k", "x")

    def __init__(self, k: Kernel, x: Any) -> None:
        self.k = k
        self.x = x

    @property
    def type(self) -> Any:
        return self.x.type

    @property
    def _is_float(self) -> bool:
        return _element(self.type) in (F32, F16)

    def _other(self, other: V | int | float) -> Any:
        return other.x if isinstance(other, V) else self.k.const(other, self.type).x

    def _binary(self, op: str, other: V | int | float) -> V:
        return V(self.k, getattr(self.k.b, op)(self.x, self._other(other)))

    def __add__(self, other: V | int | float) -> V:
        return self._binary("fadd" if self._is_float else "add", other)

    def __sub__(self, other: V | int | float) -> V:
        return self._binary("fsub" if self._is_float else "sub", other)

    def __mul__(self, other: V | int | float) -> V:
        return self._binary("fmul" if self._is_float else "mul", other)

    def __truediv__(self, other: V | int | float) -> V:
        return self._binary("fdiv", other)

    def __floordiv__(self, other: V | int) -> V:
        return self._binary("udiv", other)

    def __mod__(self, other: V | int) -> V:
        return self._binary("urem", other)

    def __and__(self, other: V | int) -> V:
        return self._binary("and_", other)

    def __or__(self, other: V | int) -> V:
        return self._binary("or_", other)

    def __xor__(self, other: V | int) -> V:
        return self._binary("xor", other)

    def __lshift__(self, other: V | int) -> V:
        return self._binary("shl", other)

    def __rshift__(self, other: V | int) -> V:
        return self._binary("lshr", other)

    def sar(self, other: V | int) -> V:
        """Shift right, copying the sign."""
        return self._binary("ashr", other)

    def rotl(self, other: V | int) -> V:
        """Rotate left lane by lane."""
        return self.k.intrinsic("llvm.fshl", self.type, self, self, V(self.k, self._other(other)))

    def __neg__(self) -> V:
        return V(self.k, self.k.b.fneg(self.x)) if self._is_float else self.k.const(0, self.type) - self

    def compare(self, op: str, other: V | int | float) -> V:
        """Lane by lane; unsigned for integers, ordered for floats."""
        compare = self.k.b.fcmp_ordered if self._is_float else self.k.b.icmp_unsigned
        return V(self.k, compare(op, self.x, self._other(other)))

    def select(self, yes: V | int | float, no: V) -> V:
        """yes where this comparison holds, else no."""
        return V(self.k, self.k.b.select(self.x, no._other(yes), no.x))

    def bitcast(self, type_: ir.Type) -> V:
        return V(self.k, self.k.b.bitcast(self.x, type_))

    def zext(self, element: ir.Type) -> V:
        return V(self.k, self.k.b.zext(self.x, _like(self.type, element)))

    def sext(self, element: ir.Type) -> V:
        return V(self.k, self.k.b.sext(self.x, _like(self.type, element)))

    def trunc(self, element: ir.Type) -> V:
        return V(self.k, self.k.b.trunc(self.x, _like(self.type, element)))

    def to_f32(self) -> V:
        """Float of signed integers (rounded to nearest even) or of halves (exact)."""
        target = _like(self.type, F32)
        return V(self.k, self.k.b.fpext(self.x, target) if self._is_float else self.k.b.sitofp(self.x, target))

    def to_i32_saturating(self) -> V:
        """Signed integers of whole floats; out of range saturates, NaN gives 0."""
        name = f"llvm.fptosi.sat.{_suffix(_like(self.type, I32))}.{_suffix(self.type)}"
        return self.k.call_named(name, _like(self.type, I32), self)

    def pick(self, index: Sequence[int], other: V | None = None) -> V:
        """Lanes by constant index out of this vector followed by `other`."""
        mask = ir.Constant(ir.VectorType(I32, len(index)), list(index))
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.x
        return V(self.k, self.k.b.shuffle_vector(self.x, second, mask))

    def concat(self, other: V) -> V:
        n = _lanes(self.type)
        return self.pick(range(2 * n), other)

    def twice(self) -> V:
        """This vector, and once more."""
        n = _lanes(self.type)
        return self.pick([*range(n), *range(n)])

    def low(self) -> V:
        return self.pick(range(_lanes(self.type) // 2))

    def high(self) -> V:
        n = _lanes(self.type)
        return self.pick(range(n // 2, n))

    def padded(self) -> V:
        """This vector, then as many zero lanes."""
        return self.concat(self.k.const(0, self.type))

    def lane(self, i: int) -> V:
        return V(self.k, self.k.b.extract_element(self.x, ir.Constant(I32, i)))

    def splat(self, n: int) -> V:
        """This scalar in n lanes."""
        return self.k.vector([self]).pick([0] * n)


class Var:
    """A value that changes in loops."""

    __slots__ = ("k", "slot")

    def __init__(self, k: Kernel, initial: V) -> None:
        self.k = k
        with k.b.goto_entry_block():
            self.slot = k.b.alloca(initial.type)
        self.set(initial)

    def get(self) -> V:
        return V(self.k, self.k.b.load(self.slot))

    def set(self, value: V) -> None:
        self.k.b.store(value.x, self.slot)


class Kernel:
    """One function under construction."""

    def __init__(self, module: ir.Module, name: str, n_args: int, isa: Isa) -> None:
        self.module = module
        self.isa = isa
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * n_args), name)
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        # a block of its own for the body: stack slots go to the end of "entry", which only jumps here
        body = self.function.append_basic_block("body")
        self.b.branch(body)
        self.b.position_at_end(body)
        self.args = [V(self, arg) for arg in self.function.args]

    # ---- values
    def const(self, value: int | float | Sequence[int], type_: ir.Type) -> V:
        element = _element(type_)
        values = list(value) if isinstance(value, Sequence) else [value] * _lanes(type_)
        if isinstance(element, ir.IntType):
            values = [int(v) & ((1 << element.width) - 1) for v in values]
        else:
            values = [struct.unpack("<f", struct.pack("<f", v))[0] for v in values]
        return V(self, ir.Constant(type_, values if isinstance(type_, ir.VectorType) else values[0]))

    def i64(self, value: int) -> V:
        return self.const(value, I64)

    def vector(self, scalars: Sequence[V]) -> V:
        """A vector of scalars of one type."""
        out: Any = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
        for i, scalar in enumerate(scalars):
            out = self.b.insert_element(out, scalar.x, ir.Constant(I32, i))
        return V(self, out)

    def var(self, initial: V) -> Var:
        return Var(self, initial)

    def intrinsic(self, name: str, type_: ir.Type, *args: V) -> V:
        """An LLVM intrinsic that is overloaded on its result type."""
        return self.call_named(f"{name}.{_suffix(type_)}", type_, *args)

    def call_named(self, name: str, result: ir.Type, *args: V) -> V:
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return V(self, self.b.call(function, [a.x for a in args]))

    def fma(self, a: V, b: V, c: V) -> V:
        """a * b + c with one rounding."""
        return self.intrinsic("llvm.fma", a.type, a, b, c)

    # ---- memory
    def _pointer(self, address: V, type_: ir.Type) -> Any:
        return self.b.inttoptr(address.x, type_.as_pointer())

    def load(self, address: V, type_: ir.Type) -> V:
        return V(self, self.b.load(self._pointer(address, type_), align=1))

    def store(self, value: V, address: V) -> None:
        self.b.store(value.x, self._pointer(address, value.type), align=1)

    def load_f32_head(self, address: V, n: V) -> V:
        """The first n < 16 floats at an address, then zeros; reads nothing behind them."""
        lanes = self.const(list(range(16)), I32X16)
        mask = lanes.compare("<", n.trunc(I32).splat(16))
        pointer = V(self, self._pointer(address, F32X16))
        zeros = self.const(0.0, F32X16)
        return self.call_named("llvm.masked.load.v16f32.p0", F32X16, pointer, self.const(4, I32), mask, zeros)

    def constants(self, name: str, values: Sequence[int], element: ir.Type) -> V:
        """Address of a table that is a part of the code."""
        table = self.module.globals.get(name)
        if table is None:
            type_ = ir.ArrayType(element, len(values))
            table = ir.GlobalVariable(self.module, type_, name)
            table.global_constant, table.linkage, table.align = True, "internal", 64
            table.initializer = ir.Constant(type_, [int(v) & ((1 << element.width) - 1) for v in values])
        return V(self, self.b.ptrtoint(table, I64))

    def scratch(self, n_bytes: int) -> V:
        """Address of n_bytes of stack."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(I8, n_bytes))
            slot.align = 64
        return V(self, self.b.ptrtoint(slot, I64))

    def prefetch(self, address: V) -> None:
        """Ask for the cache line at an address, which need not be readable."""
        pointer = V(self, self._pointer(address, I8))
        self.call_named("llvm.prefetch.p0", ir.VoidType(), pointer, *(self.const(n, I32) for n in (0, 3, 1)))

    # ---- control
    @contextmanager
    def loop(self, n: V, start: V | None = None, step: int = 1) -> Iterator[V]:
        """for i in range(start, n, step)."""
        counter = self.var(self.i64(0) if start is None else start)
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "loop", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        i = counter.get()
        self.b.cbranch(self.b.icmp_signed("<", i.x, n.x), body, end)
        self.b.position_at_end(body)
        yield i
        counter.set(i + step)
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def when(self, condition: V) -> Iterator[None]:
        with self.b.if_then(condition.x):
            yield

    def finish(self) -> None:
        self.b.ret_void()

    # ---- operations that processors have instructions for
    def dot4(self, acc: V, u8: V, s8: V) -> V:
        """acc + the sum of 4 products of unsigned bytes of u8 and signed bytes of s8, per i32 lane of 16. Exact."""
        if self.isa.dot_lanes == 16:
            return self.call_named("llvm.x86.avx512.vpdpbusd.512", I32X16, acc, u8, s8)
        if self.isa.dot_lanes == 8:
            halves = [
                self.call_named("llvm.x86.avx512.vpdpbusd.256", I32X8, *(getattr(v, half)() for v in (acc, u8, s8)))
                for half in ("low", "high")
            ]
            return halves[0].concat(halves[1])
        if self.isa.avx2:
            return self._dot4_avx2(acc, u8, s8)
        for shift in (0, 8, 16, 24):
            acc = acc + ((u8 >> shift) & 255) * (s8 << (24 - shift)).sar(24)
        return acc

    def _dot4_avx2(self, acc: V, u8: V, s8: V) -> V:
        # pmaddubsw saturates for weights above 127, so bytes are widened to 16 bits: even ones, then odd ones
        i16x16, i16x32 = ir.VectorType(I16, 16), ir.VectorType(I16, 32)
        w, a = u8.bitcast(i16x32), s8.bitcast(i16x32)
        for wide_w, wide_a in ((w & 255, (a << 8).sar(8)), (w >> 8, a.sar(8))):
            halves = []
            for lanes in (range(16), range(16, 32)):
                pair = (wide_w.pick(lanes), wide_a.pick(lanes))
                assert pair[0].type == i16x16
                halves.append(self.call_named("llvm.x86.avx2.pmadd.wd", I32X8, *pair))
            acc = acc + halves[0].concat(halves[1])
        return acc

    def table16(self, nibbles: V, table: Sequence[int]) -> V:
        """table[nibble] for every byte (0 to 15) of 16 i32 lanes."""
        index = nibbles.bitcast(I8X64)
        if self.isa.byte_shuffle:
            if self.isa.dot_lanes == 16:
                name, size = "llvm.x86.avx512.pshuf.b.512", 64
            else:
                name, size = "llvm.x86.avx2.pshuf.b", 32
            type_ = ir.VectorType(I8, size)
            values = self.const(list(table) * (size // 16), type_)
            parts = [self.call_named(name, type_, values, index.pick(range(i, i + size))) for i in range(0, 64, size)]
            return (parts[0] if size == 64 else parts[0].concat(parts[1])).bitcast(I32X16)
        level = [self.const(entry, I8X64) for entry in table]
        for bit in (1, 2, 4, 8):
            odd = (index & bit).compare("!=", 0)
            level = [odd.select(level[i + 1], level[i]) for i in range(0, len(level), 2)]
        return level[0].bitcast(I32X16)


Emitter = Callable[..., None]
"""Emits the body of a kernel: called with the Kernel and its arguments, all I64."""
