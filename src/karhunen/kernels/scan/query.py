"""What becomes of a query before it meets the bytes of a block: turned, taken into the coefficients, rounded.

turned   R(−n₀) q, pair by pair                                      [row][first | second | rest]
product  q′ = turned · A, and coefficients of the mean's term · its basis
whole    q′ in steps of its largest / 32767, int16
"""

from typing import Any

from llvmlite import ir

from karhunen.kernels.scan.emit import F32, I16, I32, Emitter, Shape, hot

ROUNDER = 12582912.0
"""1.5 · 2^23: added and taken away, it leaves a float's nearest integer."""
TURN_LANES = 8


@hot
def turn(e: Emitter, shape: Shape, query: Any, stride: Any, angles: Any, n_pairs: Any, out: Any) -> None:
    """Pairs (x, y) become (x cos + y sin, y cos − x sin). A row of `query` and `out`, `stride` bytes, is n_pairs first
    halves, as many second halves, and the rest, which stays; `angles` has cosines, then sines. Multiples of eight."""
    rows, half = shape.rows, e.times(n_pairs, 4)
    with e.loop(e.builder.udiv(n_pairs, e.number(TURN_LANES))) as i:
        at = e.times(i, 4 * TURN_LANES)
        cos = e.load(F32, TURN_LANES, e.at(angles, at))
        sin = e.load(F32, TURN_LANES, e.at(angles, half, at))
        for row in range(rows):
            begin = e.at(at, e.times(stride, row))
            x = e.load(F32, TURN_LANES, e.at(query, begin))
            y = e.load(F32, TURN_LANES, e.at(query, half, begin))
            e.store(e.fma(y, sin, e.builder.fmul(x, cos)), e.at(out, begin))
            minus = e.builder.fneg(e.builder.fmul(x, sin))
            e.store(e.fma(y, cos, minus), e.at(out, half, begin))


@hot
def product(
    e: Emitter, shape: Shape, x: Any, x_stride: Any, n: Any, matrix: Any, n_columns: Any, out: Any,
    out_stride: Any,
) -> None:  # fmt: skip
    """out[row] = x[row] · matrix, [n, n_columns] row by row; n_columns is a multiple of 16, strides are in bytes."""
    rows, width, lanes = shape.rows, shape.width, shape.width // 4
    wide = 4 if width == 64 else 16 // lanes
    step = lanes * wide
    n_wide = e.builder.udiv(n_columns, e.number(step))
    _product_tiles(e, rows, lanes, wide, x, x_stride, n, matrix, n_columns, out, out_stride, e.number(0), n_wide)
    if step > 16:
        first = e.times(n_wide, step)
        left = e.builder.udiv(e.builder.sub(n_columns, first), e.number(16))
        _product_tiles(e, rows, lanes, 1, x, x_stride, n, matrix, n_columns, out, out_stride, first, left)


def _product_tiles(
    e: Emitter, rows: int, lanes: int, tiles: int, x: Any, x_stride: Any, n: Any, matrix: Any, n_columns: Any, out: Any,
    out_stride: Any, first: Any, n_steps: Any,
) -> None:  # fmt: skip
    pitch = e.times(n_columns, 4)
    with e.loop(n_steps) as step:
        column = e.times(e.at(first, e.times(step, lanes * tiles)), 4)
        zero = e.constant(F32, lanes, 0.0)
        totals = [[e.variable(zero.type, zero) for _ in range(tiles)] for _ in range(rows)]
        with e.loop(n) as k:
            line = e.at(matrix, column, e.times(k, pitch))
            parts = [e.load(F32, lanes, e.at(line, 4 * lanes * tile)) for tile in range(tiles)]
            for row in range(rows):
                factor = e.splat(e.load_one(F32, e.at(x, e.times(x_stride, row), e.times(k, 4))), lanes)
                for total, part in zip(totals[row], parts, strict=True):
                    total.set(e.fma(factor, part, total.get()))
        for row in range(rows):
            for tile in range(tiles):
                e.store(totals[row][tile].get(), e.at(out, e.times(out_stride, row), column, 4 * lanes * tile))


@hot
def mirror(
    e: Emitter, shape: Shape, even: Any, odd: Any, stride: Any, n_groups: Any, out: Any, out_stride: Any
) -> None:
    """Terms of a block from its middle: the first half of a group's places are even + odd, and the second half of the
    group that lies opposite are even − odd, backwards.

    A token and the one opposite are as far from the middle, one is even and one odd, and places mirror as they do."""
    half = shape.width // 2
    backwards = list(range(half))[::-1]
    for row in range(shape.rows):
        with e.loop(n_groups) as group:
            at = e.at(e.times(group, 4 * half), e.times(stride, row))
            a, b = (e.load(F32, half, e.at(x, at)) for x in (even, odd))
            line = e.at(out, e.times(out_stride, row))
            e.store(e.builder.fadd(a, b), e.at(line, e.times(group, 8 * half)))
            opposite = e.builder.sub(e.builder.sub(n_groups, group), e.number(1))
            less = e.builder.fsub(a, b)
            e.store(e.shuffle(less, less, backwards), e.at(line, e.times(opposite, 8 * half), 4 * half))


@hot
def whole_numbers(
    e: Emitter, shape: Shape, query: Any, stride: Any, n: Any, least: Any, out: Any, steps: Any, sums: Any
) -> None:
    """q′ of each row as int16, n of them, a multiple of 16; the step at `steps`, at `sums` their sum times `least`.

    A row's largest is 32767 steps, or fewer where sums of products with 255 would leave 31 bits."""
    lanes = 16
    zero = e.constant(F32, lanes, 0.0)
    n_vectors = e.builder.udiv(n, e.number(lanes))
    words = e.constant(I16, lanes, 0).type
    for row in range(shape.rows):
        most, total = e.variable(zero.type, zero), e.variable(zero.type, zero)
        line = e.at(query, e.times(stride, row))
        with e.loop(n_vectors) as i:
            size = e.absolute(e.load(F32, lanes, e.at(line, e.times(i, 64))))
            most.set(e.maximum(size, most.get()))
            total.set(e.builder.fadd(size, total.get()))
        largest = e.builder.fmul(e.reduce("fmax", most.get()), ir.Constant(F32, 1 / 32767))
        summed = e.builder.fmul(e.sum(total.get()), ir.Constant(F32, 255 / (2.0**31 - 2.0**20)))
        step = e.builder.select(e.builder.fcmp_ordered(">", summed, largest), summed, largest)
        nothing = e.builder.fcmp_ordered("==", step, ir.Constant(F32, 0.0))
        safe = e.builder.select(nothing, ir.Constant(F32, 1.0), step)
        factor = e.splat(e.builder.fdiv(ir.Constant(F32, 1.0), safe), lanes)
        shift = e.constant(F32, lanes, ROUNDER)
        found = e.variable(zero.type, zero)
        with e.loop(n_vectors) as i:
            value = e.load(F32, lanes, e.at(line, e.times(i, 64)))
            rounded = e.builder.fsub(e.fma(value, factor, shift), shift)
            found.set(e.fma(rounded, e.load(F32, lanes, e.at(least, e.times(i, 64))), found.get()))
            whole = e.builder.fptosi(rounded, e.constant(I32, lanes, 0).type)
            at = e.at(out, e.times(e.at(e.times(n, row)), 2), e.times(i, 32))
            e.store(e.builder.trunc(whole, words), at)
        e.store_one(step, e.at(steps, 4 * row))
        e.store_one(e.builder.fmul(e.sum(found.get()), step), e.at(sums, 4 * row))
