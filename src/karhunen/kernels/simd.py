"""Float vectors for Numba: `float32x4` and `float32x8` as values that live in registers.

LLVM turns a Numba loop into vector code only where it can prove it may, and a look-up into a table of codewords is
where it cannot. These intrinsics say directly what is meant: a `Vector` is LLVM's `<n x float>`, so the same code
becomes AVX2 on x86 and two NEON registers on ARM.

    v = load(8, array, i)          eight floats of a contiguous float32 array, from element i
    v = fma(splat(8, x), w, v)     one multiply-add per lane
    store(array, i, v)

The number of lanes is a literal, or a tuple of that length (`ROWS[4]`): a tuple carries its length in its type, so one
function serves every width and is compiled once for each. Nothing here checks bounds. `array` is a contiguous float32
NumPy array; an address is a byte address.
"""

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

F32 = ir.FloatType()
F16 = ir.HalfType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)


ROWS = {lanes: (0,) * lanes for lanes in (1, 2, 4, 8)}
"""Tuples that stand for a number of lanes in a call from Python."""


class Vector(types.Type):
    """The Numba type of `lanes` float32 values in one register."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A `Vector` is held as LLVM's own vector type."""

    def __init__(self, manager, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(F32, vector.lanes))


def host_support() -> tuple[bool, str]:
    """Whether this processor converts half floats in hardware; without it LLVM calls a routine Numba does not link."""
    features = llvmlite.binding.get_host_cpu_features()
    triple = llvmlite.binding.get_process_triple()
    if triple.startswith(("aarch64", "arm64")):
        return True, "NEON"
    if triple.startswith("x86_64"):
        missing = [name for name in ("avx2", "fma", "f16c") if not features.get(name)]
        return (False, f"this processor lacks {', '.join(missing)}") if missing else (True, "AVX2, FMA, F16C")
    return False, f"no vector code is written for {triple}"


@intrinsic(prefer_literal=True)
def splat(typingctx, lanes, x):
    """Every lane holds x."""
    vector = Vector(_count(lanes))

    def codegen(context, builder, signature, args):
        x = context.cast(builder, args[1], signature.args[1], types.float32)
        return _splat(builder, x, vector.lanes)

    return vector(lanes, x), codegen


@intrinsic(prefer_literal=True)
def load(typingctx, lanes, array, i):
    """Lanes from array[i], array[i + 1], …"""
    vector = Vector(_count(lanes))

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[1], args[1], args[2], F32)
        return _load(builder, pointer, ir.VectorType(F32, vector.lanes), 4)

    return vector(lanes, array, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_half(typingctx, lanes, address):
    """Lanes from consecutive float16 values at a byte address."""
    vector = Vector(_count(lanes))

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[1], ir.VectorType(F16, vector.lanes).as_pointer())
        half = builder.load(pointer)
        half.align = 2
        return builder.fpext(half, ir.VectorType(F32, vector.lanes))

    return vector(lanes, types.int64), codegen


@intrinsic
def spread(typingctx, rows, array, i):
    """Eight lanes of tokens by rows: lane k is array[i + k // rows]."""
    n_rows = _count(rows)

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[1], args[1], args[2], F32)
        if n_rows == 8:
            return _splat(builder, builder.load(pointer), 8)
        tokens = _load(builder, pointer, ir.VectorType(F32, 8 // n_rows), 4)
        return _shuffle(builder, tokens, tokens, [k // n_rows for k in range(8)])

    return Vector(8)(rows, array, types.int64), codegen


@intrinsic
def store(typingctx, array, i, v):
    """array[i], array[i + 1], … take the lanes of v."""

    def codegen(context, builder, signature, args):
        pointer = _element(context, builder, signature.args[0], args[0], args[1], F32)
        pointer = builder.bitcast(pointer, ir.VectorType(F32, v.lanes).as_pointer())
        builder.store(args[2], pointer).align = 4
        return context.get_dummy_value()

    return types.void(array, types.int64, v), codegen


@intrinsic
def byte(typingctx, address):
    """The unsigned byte at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(pointer), I64)

    return types.int64(types.int64), codegen


@intrinsic
def single(typingctx, address):
    """The float32 at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], F32.as_pointer()))

    return types.float32(types.int64), codegen


@intrinsic
def four_bytes(typingctx, address):
    """The four bytes from an address, the first in the lowest bits."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I32.as_pointer())
        value = builder.load(pointer)
        value.align = 1
        return builder.zext(value, I64)

    return types.int64(types.int64), codegen


@intrinsic
def add(typingctx, a, b):
    """a + b, lane by lane."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return a(a, b), codegen


@intrinsic
def mul(typingctx, a, b):
    """a · b, lane by lane."""

    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return a(a, b), codegen


@intrinsic
def divide(typingctx, a, b):
    """a / b, lane by lane."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(*args)

    return a(a, b), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a · b + c, lane by lane, rounded once."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma", *args)

    return a(a, b, c), codegen


@intrinsic
def maximum(typingctx, a, b):
    """The larger of a and b, lane by lane."""

    def codegen(context, builder, signature, args):
        return _larger(builder, *args)

    return a(a, b), codegen


@intrinsic
def subtract(typingctx, a, b):
    """a - b, lane by lane."""

    def codegen(context, builder, signature, args):
        return builder.fsub(*args)

    return a(a, b), codegen


@intrinsic
def exp(typingctx, x):
    """e to the power of each lane, to 2 units in the last place; 0 below -87."""

    def codegen(context, builder, signature, args):
        lanes = x.lanes
        floats, ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)

        def constant(value):
            return _constant(floats, lanes, value)

        below = builder.fcmp_ordered("<", args[0], constant(-87.0))
        clipped = builder.select(builder.fcmp_ordered(">", args[0], constant(88.0)), constant(88.0), args[0])
        clipped = builder.select(below, constant(-87.0), clipped)
        # x = n ln 2 + r, |r| <= ln 2 / 2: adding 1.5 * 2^23 rounds n to the nearest integer, kept in the low bits.
        shift = constant(12582912.0)
        shifted = _call(builder, "llvm.fma", clipped, constant(1.4426950408889634), shift)
        n = builder.fsub(shifted, shift)
        r = _call(builder, "llvm.fma", n, constant(-0.693359375), clipped)
        r = _call(builder, "llvm.fma", n, constant(2.12194440e-4), r)
        power = constant(1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            power = _call(builder, "llvm.fma", power, r, constant(coefficient))
        exponent = builder.shl(builder.bitcast(shifted, ints), _constant(ints, lanes, 23))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, ints), exponent), floats)
        return builder.select(below, constant(0.0), scaled)

    return x(x), codegen


def _count(lanes):
    return lanes.literal_value if isinstance(lanes, types.IntegerLiteral) else lanes.count


def _element(context, builder, array_type, array, i, element):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(builder.bitcast(data, element.as_pointer()), [i])


def _load(builder, pointer, vector, align):
    value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    value.align = align
    return value


def _call(builder, name, *args):
    vector = args[0].type
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * len(args)), f"{name}.v{vector.count}f32"
    )
    return builder.call(function, args)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _constant(vector, lanes, value):
    return ir.Constant(vector, [value] * lanes)


def _splat(builder, x, lanes):
    empty = ir.Constant(ir.VectorType(F32, lanes), ir.Undefined)
    first = builder.insert_element(empty, x, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, _constant(ir.VectorType(I32, lanes), lanes, 0))


def _shuffle(builder, a, b, lanes):
    mask = ir.Constant(ir.VectorType(I32, len(tuple(lanes))), [ir.Constant(I32, lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)
