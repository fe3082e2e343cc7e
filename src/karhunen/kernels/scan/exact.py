"""Exact tokens on a CPU: dot products of rows with keys, softmax in place, and weighted sums of values.

All rows of a head meet a key while it is in a register; sizes that are no multiple of sixteen end in single numbers.
"""

from typing import Any

from karhunen.kernels.scan.emit import F32, Emitter, Shape, hot

LANES = 16


@hot
def dots(
    e: Emitter, shape: Shape, query: Any, query_stride: Any, keys: Any, key_stride: Any, n: Any, d: Any, scale: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[row][token] = ⟨query[row], keys[token]⟩ times the float at `scale`; strides in bytes."""
    factor = e.load_one(F32, scale)
    zero = e.constant(F32, LANES, 0.0)
    n_vectors = e.builder.udiv(d, e.number(LANES))
    left = e.builder.sub(d, e.times(n_vectors, LANES))
    with e.loop(n) as token:
        key = e.at(keys, e.times(token, key_stride))
        totals = [e.variable(zero.type, zero) for _ in range(shape.rows)]
        with e.loop(n_vectors) as i:
            part = e.load(F32, LANES, e.at(key, e.times(i, 4 * LANES)))
            for row in range(shape.rows):
                mine = e.load(F32, LANES, e.at(query, e.times(query_stride, row), e.times(i, 4 * LANES)))
                totals[row].set(e.fma(mine, part, totals[row].get()))
        for row in range(shape.rows):
            total = e.variable(F32, e.sum(totals[row].get()))
            with e.loop(left) as i:
                at = e.times(e.at(e.times(n_vectors, LANES), i), 4)
                mine = e.load_one(F32, e.at(query, e.times(query_stride, row), at))
                product = e.builder.fmul(mine, e.load_one(F32, e.at(key, at)))
                total.set(e.builder.fadd(total.get(), product))
            scaled = e.builder.fmul(total.get(), factor)
            e.store_one(scaled, e.at(out, e.times(out_stride, row), e.times(token, 4)))


@hot
def soften(e: Emitter, shape: Shape, scores: Any, n: Any, top: Any, total: Any) -> None:
    """Scores of one row become e^(score − top); their sum at `total`. `top` is the address of a float; n a multiple of
    sixteen."""
    most = e.splat(e.load_one(F32, top), LANES)
    zero = e.constant(F32, LANES, 0.0)
    summed = e.variable(zero.type, zero)
    with e.loop(e.builder.udiv(n, e.number(LANES))) as i:
        at = e.at(scores, e.times(i, 4 * LANES))
        weight = e.exp(e.builder.fsub(e.load(F32, LANES, at), most))
        summed.set(e.builder.fadd(summed.get(), weight))
        e.store(weight, at)
    e.store_one(e.sum(summed.get()), total)


@hot
def mix(
    e: Emitter, shape: Shape, weights: Any, weight_stride: Any, values: Any, value_stride: Any, n: Any, width: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[row] += Σ weights[row][token] · values[token], `width` numbers of each; strides in bytes."""
    done = e.number(0)
    for tiles in (4, 1):
        step = LANES * tiles
        count = e.builder.udiv(e.builder.sub(width, done), e.number(step))
        with e.loop(count) as i:
            column = e.times(e.at(done, e.times(i, step)), 4)
            places = [
                [e.at(out, e.times(out_stride, row), column, 4 * LANES * tile) for tile in range(tiles)]
                for row in range(shape.rows)
            ]
            kind = e.constant(F32, LANES, 0.0).type
            totals = [[e.variable(kind, e.load(F32, LANES, at)) for at in row] for row in places]
            with e.loop(n) as token:
                line = e.at(values, column, e.times(token, value_stride))
                parts = [e.load(F32, LANES, e.at(line, 4 * LANES * tile)) for tile in range(tiles)]
                for row in range(shape.rows):
                    at = e.at(weights, e.times(weight_stride, row), e.times(token, 4))
                    weight = e.splat(e.load_one(F32, at), LANES)
                    for total, part in zip(totals[row], parts, strict=True):
                        total.set(e.fma(weight, part, total.get()))
            for row in range(shape.rows):
                for total, at in zip(totals[row], places[row], strict=True):
                    e.store(total.get(), at)
        done = e.at(done, e.times(count, step))
    with e.loop(e.builder.sub(width, done)) as i:
        column = e.times(e.at(done, i), 4)
        for row in range(shape.rows):
            place = e.at(out, e.times(out_stride, row), column)
            total = e.variable(F32, e.load_one(F32, place))
            with e.loop(n) as token:
                weight = e.load_one(F32, e.at(weights, e.times(weight_stride, row), e.times(token, 4)))
                value = e.load_one(F32, e.at(values, column, e.times(token, value_stride)))
                total.set(e.builder.fadd(total.get(), e.builder.fmul(weight, value)))
            e.store_one(total.get(), place)


@hot
def scale_by(e: Emitter, shape: Shape, numbers: Any, n: Any, factor: Any) -> None:
    """n floats times the float at `factor`."""
    by = e.load_one(F32, factor)
    wide = e.splat(by, LANES)
    count = e.builder.udiv(n, e.number(LANES))
    with e.loop(count) as i:
        at = e.at(numbers, e.times(i, 4 * LANES))
        e.store(e.builder.fmul(e.load(F32, LANES, at), wide), at)
    with e.loop(e.builder.sub(n, e.times(count, LANES))) as i:
        at = e.at(numbers, e.times(e.at(e.times(count, LANES), i), 4))
        e.store_one(e.builder.fmul(e.load_one(F32, at), by), at)
