"""The two scans: scores of a group of tokens from their bytes, and values weighed by those scores.

    a byte's column   low[byte mod 2^a] + high[byte div 2^(8 − b)]: two look-ups and an addition for a vector of tokens
    scores            pairs of columns meet pairs of q′ in one product, 32 bits for each token and row
    values            a column meets the tokens' weights, evens and odds apart, 32 bits for each column and row

A group is as many tokens as a vector has bytes. Bytes widen to words as evens and odds, and words of two columns join
as pairs within each 16 bytes; a group's scores lie in the order that this gives (`place`), and nothing is put back.
"""

from typing import Any

from karhunen.kernels.scan.emit import F32, I8, I16, I32, I64, Emitter, Shape, hot

GROUP_ENTRY = 16  # bytes: where a group's first plane lies, and how far apart its planes are


def place(i: int, width: int) -> int:
    """Where token i of a group stands among its scores."""
    half, j = width // 2, i // 2
    return i % 2 * half + j % 8 // 4 * (half // 2) + j // 8 * 4 + j % 4


def column_bytes(kind: tuple[int, int]) -> int:
    """Of a column's tables, one after the other."""
    return 2 ** kind[0] + (2 ** kind[1] if kind[1] else 0)


class _Tables:
    """How bytes become a column: indices made once for a plane, tables once for a column."""

    def __init__(self, e: Emitter, width: int, kind: tuple[int, int]) -> None:
        self.e, self.width, self.kind = e, width, kind

    def indices(self, codes: Any) -> list[Any]:
        e, (a, b) = self.e, self.kind
        low = codes if a == 8 else e.builder.and_(codes, e.constant(I8, self.width, 2**a - 1))
        if not b:
            return [e.table_index(low, 2**a)]
        high = e.builder.lshr(codes, e.constant(I8, self.width, 8 - b))
        return [e.table_index(low, 2**a), e.table_index(high, 2**b)]

    def load(self, address: Any) -> list[list[Any]]:
        a, b = self.kind
        found = [self.e.table(address, 2**a, self.width)]
        return [*found, self.e.table(self.e.at(address, 2**a), 2**b, self.width)] if b else found

    def decode(self, tables: list[list[Any]], indices: list[Any]) -> Any:
        found = [self.e.lookup(table, index) for table, index in zip(tables, indices, strict=True)]
        return found[0] if len(found) == 1 else self.e.builder.add(*found)


def _words(e: Emitter, column: Any) -> tuple[Any, Any]:
    """Evens and odds of unsigned bytes."""
    half = column.type.count // 2
    both = e.builder.bitcast(column, e.constant(I16, half, 0).type)
    return e.builder.and_(both, e.constant(I16, half, 255)), e.builder.lshr(both, e.constant(I16, half, 8))


def _paired(e: Emitter, a: Any, b: Any) -> list[Any]:
    """Words of two columns side by side: the first and the second four of every eight."""
    n = a.type.count
    lanes = [
        [x for first in range(0, n, 8) for k in range(4) for x in (first + part + k, n + first + part + k)]
        for part in (0, 4)
    ]
    return [e.shuffle(a, b, lane) for lane in lanes]


@hot
def scores(
    e: Emitter, shape: Shape, codes: Any, stride: Any, n_planes: Any, columns: Any,
    tables: Any, query: Any, query_stride: Any, steps: Any, bases: Any, bias: Any, bias_stride: Any, scale: Any,
    out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[row] = steps[row] · ⟨q′, columns⟩ + bases[row] + scale · bias[row], of one group; floats, strides in bytes.

    `columns` is where each plane's columns begin (int64, one more than planes), an even number; `query` is int16."""
    rows, width, kind = shape
    quarter = width // 4
    reader = _Tables(e, width, kind)
    zero = e.constant(I32, quarter, 0)
    words = e.constant(I16, width // 2, 0).type
    totals = [[e.variable(zero.type, zero) for _ in range(4)] for _ in range(rows)]
    with e.loop(n_planes) as plane:
        indices = reader.indices(e.load(I8, width, e.at(codes, e.times(plane, stride))))
        line = e.at(columns, e.times(plane, 8))
        first, last = (e.load_one(I64, e.at(line, 8 * i)) for i in range(2))
        with e.loop(e.builder.udiv(e.builder.sub(last, first), e.number(2))) as i:
            column = e.at(first, e.times(i, 2))
            at = e.at(tables, e.times(column, column_bytes(kind)))
            pair = [reader.decode(reader.load(e.at(at, column_bytes(kind) * k)), indices) for k in range(2)]
            (even_a, odd_a), (even_b, odd_b) = (_words(e, one) for one in pair)
            parts = [*_paired(e, even_a, even_b), *_paired(e, odd_a, odd_b)]
            for row in range(rows):
                two = e.load_one(I32, e.at(query, e.times(query_stride, row), e.times(column, 2)))
                factor = e.builder.bitcast(e.splat(two, quarter), words)
                for total, part in zip(totals[row], parts, strict=True):
                    total.set(e.multiply_words(total.get(), factor, part))
    factor = e.splat(e.load_one(F32, scale), quarter)
    for row in range(rows):
        step, base = (e.splat(e.load_one(F32, e.at(x, 4 * row)), quarter) for x in (steps, bases))
        for k in range(4):
            at = 4 * quarter * k
            base_here = e.fma(e.load(F32, quarter, e.at(bias, e.times(bias_stride, row), at)), factor, base)
            found = e.fma(e.builder.sitofp(totals[row][k].get(), step.type), step, base_here)
            e.store(found, e.at(out, e.times(out_stride, row), at))


@hot
def values(
    e: Emitter, shape: Shape, groups: Any, n_groups: Any, plane: Any, tables: Any,
    n_columns: Any, weights: Any, weight_stride: Any, unit: Any, shrink: Any, sums: Any, sums_stride: Any,
) -> None:  # fmt: skip
    """sums[row][column] = sums · shrink[row] + unit[row] · Σ weight · column, for the columns of one plane.

    `groups` has address and plane stride of each group; `weights` are int16 [row][group]."""
    done = e.number(0)
    wide = shape.width == 64 and column_bytes(shape.kind) <= 128
    for tile in (4, 2, 1) if wide else (2, 1):
        n = e.builder.udiv(e.builder.sub(n_columns, done), e.number(tile))
        with e.loop(n) as i:
            _columns(
                e, shape, tile, groups, n_groups, plane, tables, e.at(done, e.times(i, tile)), weights,
                weight_stride, unit, shrink, sums, sums_stride,
            )  # fmt: skip
        done = e.at(done, e.times(n, tile))


def _columns(
    e: Emitter, shape: Shape, tile: int, groups: Any, n_groups: Any, plane: Any,
    tables: Any, first: Any, weights: Any, weight_stride: Any, unit: Any, shrink: Any, sums: Any, sums_stride: Any,
) -> None:  # fmt: skip
    rows, width, kind = shape
    half = width // 2
    zero = e.constant(I32, width // 4, 0)
    reader = _Tables(e, width, kind)
    totals = [[e.variable(zero.type, zero) for _ in range(tile)] for _ in range(rows)]
    loaded = [reader.load(e.at(tables, e.times(e.at(first, k), column_bytes(kind)))) for k in range(tile)]
    with e.loop(n_groups) as group:
        entry = e.at(groups, e.times(group, GROUP_ENTRY))
        codes = e.at(e.load_one(I64, entry), e.times(plane, e.load_one(I64, e.at(entry, 8))))
        indices = reader.indices(e.load(I8, width, codes))
        at = e.at(weights, e.times(group, 2 * width))
        weight = [
            [e.load(I16, half, e.at(at, e.times(weight_stride, row), width * odd)) for odd in range(2)]
            for row in range(rows)
        ]
        for k in range(tile):
            parts = _words(e, reader.decode(loaded[k], indices))
            for row in range(rows):
                for odd in range(2):
                    totals[row][k].set(e.multiply_words(totals[row][k].get(), weight[row][odd], parts[odd]))
    for row in range(rows):
        step, less = (e.load_one(F32, e.at(x, 4 * row)) for x in (unit, shrink))
        for k in range(tile):
            at = e.at(sums, e.times(sums_stride, row), e.times(e.at(first, k), 4))
            found = e.builder.sitofp(e.reduce("add", totals[row][k].get()), F32)
            before = e.builder.fmul(e.load_one(F32, at), less)
            e.store_one(e.builder.fadd(before, e.builder.fmul(found, step)), at)


@hot
def weights(e: Emitter, shape: Shape, scores: Any, n_groups: Any, top: Any, out: Any, total: Any) -> None:
    """Of one row: e^(score − top) in steps of 1/32767, int16 to `out`; at `total` their sum as float before rounding,
    then the sum of the steps. `top` is the address of a float that no score exceeds."""
    lanes = shape.width // 2
    most = e.splat(e.load_one(F32, top), lanes)
    zero = e.constant(F32, lanes, 0.0)
    summed = e.variable(zero.type, zero)
    counted = e.variable(e.constant(I32, lanes, 0).type, e.constant(I32, lanes, 0))
    quarter = lanes // 2
    together = [
        k for first in range(0, quarter, 4) for part in (0, quarter) for k in range(part + first, part + first + 4)
    ]
    with e.loop(e.times(n_groups, 2)) as i:
        weight = e.exp(e.builder.fsub(e.load(F32, lanes, e.at(scores, e.times(i, 4 * lanes))), most))
        summed.set(e.builder.fadd(summed.get(), weight))
        words = e.builder.fptosi(
            e.fma(weight, e.constant(F32, lanes, 32767.0), e.constant(F32, lanes, 0.5)), counted.get().type
        )
        counted.set(e.builder.add(counted.get(), words))
        narrow = e.builder.trunc(words, e.constant(I16, lanes, 0).type)
        e.store(e.shuffle(narrow, narrow, together), e.at(out, e.times(i, 2 * lanes)))
    e.store_one(e.sum(summed.get()), total)
    e.store_one(e.builder.sitofp(e.reduce("add", counted.get()), F32), e.at(total, 4))


@hot
def cap(e: Emitter, shape: Shape, scores: Any, n: Any, top: Any) -> None:
    """s becomes c · tanh(s / c) = c − 2c / (e^(2s/c) + 1) for n scores; c is the float at `top`."""
    lanes = 16
    most = e.splat(e.load_one(F32, top), lanes)
    one, two = e.constant(F32, lanes, 1.0), e.constant(F32, lanes, 2.0)
    limit = e.constant(F32, lanes, 80.0)
    with e.loop(e.builder.udiv(n, e.number(lanes))) as i:
        at = e.at(scores, e.times(i, 64))
        twice = e.builder.fdiv(e.builder.fmul(two, e.load(F32, lanes, at)), most)
        bounded = e.builder.select(e.builder.fcmp_ordered(">", twice, limit), limit, twice)
        shrunk = e.builder.fdiv(e.builder.fmul(two, most), e.builder.fadd(e.exp(bounded), one))
        e.store(e.builder.fsub(most, shrunk), at)


@hot
def largest(e: Emitter, shape: Shape, scores: Any, n: Any, out: Any) -> None:
    """The largest of n floats, a multiple of 16 of them."""
    lanes = 16
    least = e.constant(F32, lanes, -3.0e38)
    found = e.variable(least.type, least)
    with e.loop(e.builder.udiv(n, e.number(lanes))) as i:
        found.set(e.maximum(e.load(F32, lanes, e.at(scores, e.times(i, 64))), found.get()))
    e.store_one(e.reduce("fmax", found.get()), out)
