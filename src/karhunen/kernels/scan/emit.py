"""Vector code written out: what a hot loop needs of LLVM, in the words of the processor.

A hot loop holds a dozen accumulators in registers, and how many depends on the rows and on the processor. Such loops
are unrolled here, in Python, while Numba compiles the function that calls them: each `hot` function becomes an
intrinsic whose body is emitted once for each shape.

    @hot
    def total(e, shape, address, n):      # e: Emitter; shape: Shape; the others: LLVM values
        ...

Every address is a byte address, an int64. Nothing here checks bounds.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from karhunen.kernels.scan import isa

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()


class Emitter:
    """A builder with vectors: `e.load(F32, 16, address)`, `e.lookup(table, index)`, `with e.loop(n) as i:`."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def number(self, value: int) -> Any:
        """An int64 constant."""
        return ir.Constant(I64, value)

    def constant(self, element: Any, lanes: int, value: float) -> Any:
        """The same constant in every lane."""
        return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)

    def at(self, base: Any, *terms: Any) -> Any:
        """The sum of addresses and offsets; Python numbers are constants."""
        total = base
        for term in terms:
            total = self.builder.add(total, self.number(term) if isinstance(term, int) else term)
        return total

    def times(self, a: Any, b: Any) -> Any:
        """The product of two int64."""
        a, b = (self.number(x) if isinstance(x, int) else x for x in (a, b))
        return self.builder.mul(a, b)

    def load(self, element: Any, lanes: int, address: Any) -> Any:
        """Consecutive lanes."""
        kind = ir.VectorType(element, lanes)
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()))
        value.align = 1
        return value

    def store(self, value: Any, address: Any) -> None:
        """A vector to consecutive bytes."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 1

    def load_one(self, element: Any, address: Any) -> Any:
        """One number."""
        value = self.builder.load(self.builder.inttoptr(address, element.as_pointer()))
        value.align = 1
        return value

    def store_one(self, value: Any, address: Any) -> None:
        """One number."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 1

    def splat(self, value: Any, lanes: int) -> Any:
        """One number in every lane."""
        empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, value, ir.Constant(I32, 0))
        return self.shuffle(first, first, [0] * lanes)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Lanes of `a` and, counted on, of `b`."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
        return self.builder.shuffle_vector(a, b, mask)

    def repeat16(self, address: Any, width: int) -> Any:
        """Sixteen bytes, over and over."""
        sixteen = self.load(I8, 16, address)
        return sixteen if width == 16 else self.shuffle(sixteen, sixteen, list(range(16)) * (width // 16))

    def table_index(self, index: Any, n_entries: int) -> "Index":
        """What look-ups of `n_entries` bytes need of an index of 0 … n_entries − 1, made once for many tables."""
        width = index.type.count
        if n_entries > 16 and isa.wide_lookups(width):
            return Index(n_entries, [index])
        low = self.builder.and_(index, self.constant(I8, width, 15))
        if n_entries == 16:
            return Index(16, [low])
        part = self.builder.lshr(index, self.constant(I8, width, 4))
        away = self.constant(I8, width, -128)  # a look-up of 16 gives zero where the top bit is set
        parts = [self.builder.icmp_unsigned("==", part, self.constant(I8, width, k)) for k in range(n_entries // 16)]
        return Index(n_entries, [self.builder.select(here, low, away) for here in parts])

    def table(self, address: Any, n_entries: int, width: int) -> list[Any]:
        """The registers of a table of bytes."""
        if n_entries > 16 and isa.wide_lookups(width) == 64:
            return [self.load(I8, 64, self.at(address, start)) for start in range(0, max(n_entries, 64), 64)]
        return [self.repeat16(self.at(address, start), width) for start in range(0, n_entries, 16)]

    def lookup(self, table: list[Any], index: "Index") -> Any:
        """table[index] for every lane."""
        kind = index.parts[0].type
        if len(index.parts) == len(table) and index.n_entries <= 16 * len(table) and kind.count != 64:
            return self._lookup16(table, index)
        if index.n_entries == 16 or len(index.parts) > 1:
            return self._lookup16(table, index)
        if kind.count == 64:
            return self._permute(table, index.parts[0])
        return self._table_lookup(table, index.parts[0])

    def _lookup16(self, table: list[Any], index: "Index") -> Any:
        found = None
        for part, where in zip(table, index.parts, strict=True):
            one = self._call(isa.lookup(where.type.count), where.type, [part, where])
            found = one if found is None else self.builder.or_(found, one)
        return found

    def _permute(self, table: list[Any], index: Any) -> Any:
        if len(table) == 1:
            return self._call("llvm.x86.avx512.permvar.qi.512", index.type, [table[0], index])
        halves = [
            self._call("llvm.x86.avx512.vpermi2var.qi.512", index.type, [table[k], index, table[k + 1]])
            for k in range(0, len(table), 2)
        ]
        if len(halves) == 1:
            return halves[0]
        upper = self.builder.icmp_signed("<", index, self.constant(I8, 64, 0))
        return self.builder.select(upper, halves[1], halves[0])

    def _table_lookup(self, table: list[Any], index: Any) -> Any:
        """NEON: 64 entries at a time; an index past a table leaves what was found before."""
        found = self._call("llvm.aarch64.neon.tbl4.v16i8", index.type, [*table[:4], index])
        for first in range(4, len(table), 4):
            moved = self.builder.sub(index, self.constant(I8, 16, 16 * first))
            found = self._call("llvm.aarch64.neon.tbx4.v16i8", index.type, [found, *table[first : first + 4], moved])
        return found

    def multiply_words(self, total: Any, a: Any, b: Any) -> Any:
        """`total` plus products of int16, two to a lane; which two is the processor's choice, the sum over all lanes
        is not."""
        fused = isa.fused_words(a.type.count)
        if fused is not None:
            halves = [self.builder.bitcast(x, total.type) for x in (a, b)]
            return self._call(fused, total.type, [total, *halves])
        pairs = isa.paired_words(a.type.count)
        if pairs is not None:
            return self.builder.add(total, self._call(pairs, total.type, [a, b]))
        n = a.type.count // 2
        for part in (range(n), range(n, 2 * n)):
            wide = [self.builder.sext(self.shuffle(x, x, list(part)), total.type) for x in (a, b)]
            total = self.builder.add(total, self.builder.mul(*wide))
        return total

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c."""
        return self._named("fma", a, b, c)

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger, lane by lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x: Any) -> Any:
        """e to the power of each lane, to 2 units in the last place; 0 below -87."""
        lanes = x.type.count
        below = self.builder.fcmp_ordered("<", x, self.constant(F32, lanes, -87.0))
        x = self.builder.select(below, self.constant(F32, lanes, -87.0), x)
        # x = n ln 2 + r, |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds n to the nearest integer, kept in the low bits
        shift = self.constant(F32, lanes, 12582912.0)
        shifted = self.fma(x, self.constant(F32, lanes, 1.4426950408889634), shift)
        n = self.builder.fsub(shifted, shift)
        r = self.fma(n, self.constant(F32, lanes, -0.693359375), x)
        r = self.fma(n, self.constant(F32, lanes, 2.12194440e-4), r)
        power = self.constant(F32, lanes, 1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            power = self.fma(power, r, self.constant(F32, lanes, coefficient))
        bits = ir.VectorType(I32, lanes)
        exponent = self.builder.shl(self.builder.bitcast(shifted, bits), self.constant(I32, lanes, 23))
        scaled = self.builder.bitcast(self.builder.add(self.builder.bitcast(power, bits), exponent), power.type)
        return self.builder.select(below, self.constant(F32, lanes, 0.0), scaled)

    def absolute(self, a: Any) -> Any:
        """The size of each lane."""
        return self._named("fabs", a)

    def reduce(self, what: str, value: Any) -> Any:
        """`add` or `fmax` over the lanes."""
        element = value.type.element
        suffix = {I32: "i32", F32: "f32"}[element]
        name = f"llvm.vector.reduce.{what}.v{value.type.count}{suffix}"
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(element, [value.type]), name)
        return self.builder.call(function, [value])

    def sum(self, value: Any) -> Any:
        """Over the lanes, halved again and again: one order on every machine."""
        n = value.type.count
        while n > 1:
            n //= 2
            low = self.shuffle(value, value, list(range(n)))
            value = self.builder.fadd(low, self.shuffle(value, value, list(range(n, 2 * n))))
        return self.builder.extract_element(value, ir.Constant(I32, 0))

    @contextmanager
    def loop(self, n: Any) -> Iterator[Any]:
        """i = 0 … n − 1."""
        with cgutils.for_range(self.builder, n if not isinstance(n, int) else self.number(n), intp=I64) as found:
            yield found.index

    def variable(self, kind: Any, value: Any) -> "Variable":
        """A register that a loop changes."""
        made = Variable(self.builder, cgutils.alloca_once(self.builder, kind))
        made.set(value)
        return made

    def _named(self, name: str, *args: Any) -> Any:
        kind = args[0].type
        return self._call(f"llvm.{name}.v{kind.count}f32", kind, list(args))

    def _call(self, name: str, result: Any, args: list[Any]) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)


class Index:
    """An index as look-ups take it: itself, or one for each sixteen entries, out of reach where others are meant."""

    def __init__(self, n_entries: int, parts: list[Any]) -> None:
        self.n_entries, self.parts = n_entries, parts


class Variable:
    """A place that LLVM keeps in a register."""

    def __init__(self, builder: Any, place: Any) -> None:
        self._builder, self._place = builder, place

    def get(self) -> Any:
        """What it holds."""
        return self._builder.load(self._place)

    def set(self, value: Any) -> None:
        """Hold this from here on."""
        self._builder.store(value, self._place)


class Shape(NamedTuple):
    """What a hot function is compiled for: query rows read together, bytes of a vector, and the kind of the tables:
    entries of their two look-ups as powers of two (0: one look-up)."""

    rows: int
    width: int
    kind: tuple[int, int] = (4, 4)

    @property
    def token(self) -> tuple[tuple[int, ...], ...]:
        """What stands for it in a call: tuples, whose lengths compiled code is specialized for."""
        return (0,) * self.rows, (0,) * (self.width // 16), (0,) * (KINDS.index(self.kind) + 1)


KINDS = ((4, 4), (6, 6), (8, 0))
"""Tables that are read. (a, b): 2^a entries by a byte's lowest a bits, 2^b by its highest b, added; (8, 0): all 256."""


def hot(body: Callable[..., None]) -> Any:
    """A function `(token, *numbers)` that compiled code may call; `token` is a shape's, the numbers are int64."""

    def typing(typingctx: Any, token: Any, *numbers: Any) -> Any:
        rows, width, kind = (part.count for part in token.types)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            body(Emitter(builder), Shape(rows, 16 * width, KINDS[kind - 1]), *args[1:])
            return context.get_dummy_value()

        return types.void(token, *(types.int64 for _ in numbers)), codegen

    typing.__name__ = typing.__qualname__ = body.__name__
    named = list(inspect.signature(body).parameters.values())[1:]
    first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typing.__signature__ = inspect.Signature([first, *named])  # type: ignore[attr-defined]  # Numba counts these
    return intrinsic(typing)


def _reader(name: str, element: Any, kind: Any, about: str) -> Any:
    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = Emitter(builder).load_one(element, args[0])
            if element is I32:
                return builder.sext(value, I64)
            return builder.zext(value, I64) if element in (I8, I16) else value

        return kind(types.int64), codegen

    typing.__name__, typing.__doc__ = name, about
    return intrinsic(typing)


def _writer(name: str, element: Any, kind: Any, about: str) -> Any:
    def typing(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.trunc(args[1], element) if element in (I8, I16) else args[1]
            Emitter(builder).store_one(value, args[0])
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    typing.__name__, typing.__doc__ = name, about
    return intrinsic(typing)


float_at = _reader("float_at", F32, types.float32, "The float32 at an address.")
double_at = _reader("double_at", ir.DoubleType(), types.float64, "The float64 at an address.")
int_at = _reader("int_at", I64, types.int64, "The int64 at an address.")
short_at = _reader("short_at", I32, types.int64, "The int32 at an address, as int64.")
word_at = _reader("word_at", I16, types.int64, "The unsigned 16-bit number at an address.")
byte_at = _reader("byte_at", I8, types.int64, "The unsigned byte at an address.")
set_float = _writer("set_float", F32, types.float32, "Put a float32 at an address.")
set_double = _writer("set_double", ir.DoubleType(), types.float64, "Put a float64 at an address.")
set_int = _writer("set_int", I64, types.int64, "Put an int64 at an address.")
set_word = _writer("set_word", I16, types.int64, "Put the lowest 16 bits of a number at an address.")
set_byte = _writer("set_byte", I8, types.int64, "Put a byte at an address.")


def record_at(dtype: Any) -> Any:
    """A function that takes the record of this dtype at an address."""
    record = from_dtype(dtype)

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), codegen

    typing.__name__ = "record_at"
    return intrinsic(typing)


@intrinsic
def claim(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, which is one more afterwards, whoever else asks."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "seq_cst")

    return types.int64(types.int64), codegen
