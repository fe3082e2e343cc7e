"""Layers of refinement in the CPU scan: what they add to the scores of a span's tokens, and to the values.

block by block    q′ in the coefficients, once for all layers, then in the columns of each
token by token    s_n += scale · Σ_columns q′ (low + high)
after softmax     the weights of a layer's tokens side by side, then its values as those of the base
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit

from karhunen.kernels.scan.emit import (
    F32,
    I8,
    I32,
    I64,
    Emitter,
    Shape,
    byte_at,
    float_at,
    hot,
    int_at,
    record_at,
    set_float,
    set_int,
    set_word,
    word_at,
)
from karhunen.kernels.scan.query import product
from karhunen.kernels.scan.tokens import GROUP_ENTRY, values
from karhunen.kernels.scan_attention.cpu_block import copy_codes, key_bytes, place_of, set_zero, turned_query
from karhunen.kernels.scan_attention.cpu_layer_record import HELD, LAYER, LAYER_SCRATCH, OCTET
from karhunen.kernels.scan_attention.cpu_record import SPAN

NO_BLOCK = -(1 << 62)
LAYER_BYTES, HELD_BYTES, LAYER_SCRATCH_BYTES = LAYER.itemsize, HELD.itemsize, LAYER_SCRATCH.itemsize

layer_at, held_at, layer_scratch_at = record_at(LAYER), record_at(HELD), record_at(LAYER_SCRATCH)


@hot
def add_score(
    e: Emitter, shape: Shape, codes: Any, stride: Any, octet_plane: Any, n_octets: Any, entries: Any, line: Any,
    query: Any, query_stride: Any, scale: Any, out: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[row] += scale · Σ over octets of ⟨q′, entries of one token's bytes⟩. `entries` are rows of `line` bytes,
    those of low look-ups, then those of high ones; strides are in bytes."""
    rows, (a, b) = shape.rows, shape.kind
    zero = e.constant(F32, OCTET, 0.0)
    wide = ir.VectorType(I32, OCTET)
    totals = [e.variable(zero.type, zero) for _ in range(rows)]
    with e.loop(n_octets) as octet:
        plane = e.load_one(I64, e.at(octet_plane, e.times(octet, 8)))
        byte = e.builder.zext(e.load_one(I8, e.at(codes, e.times(plane, stride))), I64)
        first = e.at(entries, e.times(octet, OCTET))
        low = e.builder.and_(byte, e.number(2**a - 1))
        entry = e.builder.sext(e.load(I8, OCTET, e.at(first, e.times(low, line))), wide)
        if b:
            high = e.at(e.builder.lshr(byte, e.number(8 - b)), 2**a)
            entry = e.builder.add(entry, e.builder.sext(e.load(I8, OCTET, e.at(first, e.times(high, line))), wide))
        number = e.builder.sitofp(entry, zero.type)
        for row in range(rows):
            factor = e.load(F32, OCTET, e.at(query, e.times(query_stride, row), e.times(octet, 4 * OCTET)))
            totals[row].set(e.fma(number, factor, totals[row].get()))
    factor = e.load_one(F32, scale)
    for row in range(rows):
        at = e.at(out, e.times(out_stride, row))
        added = e.builder.fmul(e.sum(totals[row].get()), factor)
        e.store_one(e.builder.fadd(e.load_one(F32, at), added), at)


@hot
def spread(
    e: Emitter, shape: Shape, query: Any, query_stride: Any, source: Any, factor: Any, n: Any, out: Any, out_stride: Any
) -> None:
    """out[row][i] = query[row][source[i]] · factor[i] for n columns; sources are int64, strides in bytes."""
    with e.loop(n) as i:
        at = e.times(e.load_one(I64, e.at(source, e.times(i, 8))), 4)
        size = e.load_one(F32, e.at(factor, e.times(i, 4)))
        for row in range(shape.rows):
            number = e.load_one(F32, e.at(query, e.times(query_stride, row), at))
            e.store_one(e.builder.fmul(number, size), e.at(out, e.times(out_stride, row), e.times(i, 4)))


@njit(nogil=True)
def start_layers(n_rows, p, mine, batch, token):
    """Nothing is summed yet; columns of the first token that has each layer from `token` on."""
    heat = p.heat + batch * p.heat_batch
    for index in range(p.n_layers):
        layer = layer_at(p.layers + index * LAYER_BYTES)
        held = held_at(p.held + (batch * p.n_layers + index) * HELD_BYTES)
        n = 0
        for i in range(p.heat_first + token):
            n += byte_at(heat + i) >= held.least
        set_int(mine.columns + 8 * index, n)
        set_zero(mine.sums + 4 * n_rows * layer.sums_at, n_rows * layer.value_width)
        set_zero(mine.mass + 4 * n_rows * index, n_rows)


@njit(nogil=True)
def _name(width, p, at, mine, batch, n_groups):
    """Where in the span the tokens of each layer stand, and how many they are."""
    for index in range(p.n_layers):
        set_int(mine.counts + 8 * index, 0)
    held = p.held + batch * p.n_layers * HELD_BYTES
    least = held_at(held).least
    for group in range(n_groups):
        token, n = int_at(at.spans + 16 * group), int_at(at.spans + 16 * group + 8)
        heat = p.heat + batch * p.heat_batch + p.heat_first + token
        for i in range(n):
            found = byte_at(heat + i)
            if found < least:
                continue
            for index in range(p.n_layers):
                if found < held_at(held + index * HELD_BYTES).least:
                    break
                count = int_at(mine.counts + 8 * index)
                set_int(mine.places + 8 * (index * SPAN + count), group * width + i)
                set_int(mine.counts + 8 * index, count + 1)


@njit(nogil=True)
def score_layers(shape, p, at, mine, batch, head, group, n_groups):
    """Add to the scores of a span."""
    n_rows, width = len(shape[0]), 16 * len(shape[1])
    pitch, row_bytes = 4 * (SPAN + width), 4 * p.n_order
    _name(width, p, at, mine, batch, n_groups)
    for index in range(p.n_layers):
        n = int_at(mine.counts + 8 * index)
        if n == 0:
            return
        layer = layer_at(p.layers + index * LAYER_BYTES)
        held = held_at(p.held + (batch * p.n_layers + index) * HELD_BYTES)
        codes = held.codes + int_at(mine.columns + 8 * index)
        first = int_at(layer.octet_start + 8 * group)
        n_octets = int_at(layer.octet_start + 8 * group + 8) - first
        entries = layer.key_rows + group * layer.key_rows_group
        source, factor = layer.source + group * 8 * layer.key_width, layer.factor + group * 4 * layer.key_width
        line, wide, block, slot = 4 * layer.key_width, 4 * layer.coefficients, NO_BLOCK, mine.coefficients
        for k in range(n):
            place = int_at(mine.places + 8 * (index * SPAN + k))
            i, lane = place // width, place % width
            here = (p.first_position + int_at(at.spans + 16 * i) + lane) // p.block if p.block else 0
            if here != block:
                if index == 0:
                    slot = mine.coefficients + i * n_rows * wide
                    turned, matrix = turned_query(shape, p, at, here), layer.matrix + head * layer.matrix_head
                    product(shape, turned, row_bytes, p.n_order, matrix, layer.coefficients, slot, wide)
                else:
                    slot = int_at(mine.slots + 8 * i)
                spread(shape, slot, wide, source, factor, layer.key_width, mine.query, line)
                block = here
            if index == 0:
                set_int(mine.slots + 8 * i, slot)  # tokens of a later layer have this one, so their groups are there
            add_score(
                shape, codes + k, held.plane, layer.octet_plane + 8 * first, n_octets, entries, layer.key_width,
                mine.query, line, at.scale, at.scores + 4 * (i * width + place_of(lane, width)), pitch,
            )  # fmt: skip


@njit(nogil=True)
def weigh_layers(shape, p, at, mine, batch, group):
    """Move the sums and masses of all layers on by a span whose weights are there."""
    n_rows, width = len(shape[0]), 16 * len(shape[1])
    pitch = 2 * (SPAN + width)
    for index in range(p.n_layers):
        n = int_at(mine.counts + 8 * index)
        layer = layer_at(p.layers + index * LAYER_BYTES)
        held = held_at(p.held + (batch * p.n_layers + index) * HELD_BYTES)
        first = int_at(layer.value_plane_start + 8 * group)
        n_planes = int_at(layer.value_plane_start + 8 * group + 8) - first
        column = int_at(mine.columns + 8 * index)
        codes = held.codes + (layer.key_planes + first) * held.plane + column
        n_groups = -(-n // width)
        for i in range(n_groups):
            source, stride = codes + i * width, held.plane
            if column + (i + 1) * width > held.n:
                copy_codes(source, stride, n_planes, held.n - column - i * width, width, mine.codes)
                source, stride = mine.codes, width
            set_int(mine.groups + GROUP_ENTRY * i, source)
            set_int(mine.groups + GROUP_ENTRY * i + 8, stride)
        for row in range(n_rows):
            total = _side_by_side(width, at.weights + row * pitch, mine, mine.weights + row * pitch, index, n, n_groups)
            mass = mine.mass + 4 * (n_rows * index + row)
            unit, shrink = float_at(at.unit + 4 * row), float_at(at.shrink + 4 * row)
            set_float(mass, float_at(mass) * shrink + np.float32(total) * unit)
        columns, sums = layer.value_columns + group * layer.value_columns_head, mine.sums + 4 * n_rows * layer.sums_at
        tables = layer.value_bytes + key_bytes(shape) * int_at(layer.value_first_column + 8 * group)
        for plane in range(n_planes):
            start = int_at(columns + 8 * plane)
            values(
                shape, mine.groups, n_groups, plane, tables + key_bytes(shape) * start,
                int_at(columns + 8 * plane + 8) - start, mine.weights, pitch, at.unit, at.shrink, sums + 4 * start,
                4 * layer.value_width,
            )  # fmt: skip
        set_int(mine.columns + 8 * index, column + n)


@njit(nogil=True)
def _lane(i, width):
    """Where token i stands among weights: evens of a group, then odds."""
    return i // width * width + i % 2 * (width // 2) + i % width // 2


@njit(nogil=True)
def _side_by_side(width, source, mine, target, index, n, n_groups):
    """The weights of one row for the tokens of one layer, as `values` takes them; their sum."""
    for k in range(n_groups * width // 4):
        set_int(target + 8 * k, 0)
    total, places = 0, mine.places + 8 * index * SPAN
    for k in range(n):
        weight = word_at(source + 2 * _lane(int_at(places + 8 * k), width))
        set_word(target + 2 * _lane(k, width), weight)
        total += weight
    return total


@njit(nogil=True)
def add_layers(p, mine, group, n_rows, row, divisor, out):
    """Add the means of all layers to one row's value coefficients."""
    for index in range(p.n_layers):
        layer = layer_at(p.layers + index * LAYER_BYTES)
        begin = int_at(layer.value_first_column + 8 * group)
        n_planes = int_at(layer.value_plane_start + 8 * group + 8) - int_at(layer.value_plane_start + 8 * group)
        n_columns = int_at(layer.value_columns + group * layer.value_columns_head + 8 * n_planes)
        sums = mine.sums + 4 * (n_rows * layer.sums_at + row * layer.value_width)
        mass = float_at(mine.mass + 4 * (n_rows * index + row))
        for i in range(n_columns):
            column = begin + i
            found = float_at(sums + 4 * i) + float_at(layer.value_offset + 4 * column) * mass
            place = out + 4 * int_at(layer.value_coefficient + 8 * column)
            set_float(place, float_at(place) + found * float_at(layer.value_scale + 4 * column) / divisor)
