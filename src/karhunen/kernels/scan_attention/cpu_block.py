"""One block of the CPU scan: the query in its frame, folded with the tables, and the scores of its groups."""

import numpy as np
from numba import njit

from karhunen.kernels.scan.emit import byte_at, float_at, int_at, set_byte, set_float
from karhunen.kernels.scan.query import LEVELS, ROW_BYTES, digits, fold, product, turn
from karhunen.kernels.scan.tokens import scores


@njit(nogil=True)
def load_query(n_rows, p, at, batch, head, first_row):
    """The rows of one item, in the order in which they turn."""
    for row in range(n_rows):
        source = p.query + batch * p.query_batch + head * p.query_head + (first_row + row) * p.query_row
        for i in range(p.n_order):
            place = int_at(p.order + 8 * i)
            value = np.float32(0) if place < 0 else float_at(source + 4 * place)
            set_float(at.query + 4 * (row * p.n_order + i), value)


@njit(nogil=True)
def prepare_block(rows, vector, p, at, head, group, block, n_planes):
    """Digits, steps and bases of the scores, and the mean's term by offset."""
    n_rows, pitch, line = len(rows), 4 * p.n_order, 4 * p.matrix_width
    query = at.query
    if p.block:
        query = at.turned
        turn(rows, vector, at.query, pitch, p.angles + block * p.angles_row, p.n_pairs, query)
        for row in range(n_rows):
            for i in range(2 * p.n_pairs, p.n_order):
                set_float(query + row * pitch + 4 * i, float_at(at.query + row * pitch + 4 * i))
    product(rows, vector, query, pitch, p.n_order, p.matrix + head * p.matrix_head, p.matrix_width, at.frames, line)
    columns = p.key_columns + group * p.key_columns_head
    tables = p.key_rows + ROW_BYTES * int_at(p.key_first_column + 8 * group)
    fold(rows, vector, at.frames, line, tables, columns, n_planes, at.folded, at.top)
    scale = np.float32(p.scale)
    for row in range(n_rows):
        most = float_at(at.top + 4 * row)
        common = float_at(at.frames + row * line + 4 * p.key_width) * scale
        set_float(at.factors + 4 * row, np.float32(LEVELS) / most if most > 0 else np.float32(0))
        set_float(at.steps + 4 * row, most / np.float32(LEVELS) * scale)
        set_float(at.bases + 4 * row, common - np.float32(2 * n_planes) * most * scale)
        set_float(at.commons + 4 * row, common)
    digits(rows, vector, at.folded, n_planes, at.factors, at.digits)
    if p.has_mean:
        turn(rows, vector, query, pitch, p.turned_mean + head * 8 * p.n_pairs, p.n_pairs, at.by_mean)
        for row in range(n_rows):
            for i in range(2 * p.n_pairs):
                place = at.by_mean + row * pitch + 4 * i
                set_float(place, float_at(place) * scale)
        wide = p.basis_width
        product(rows, vector, at.by_mean, pitch, 2 * p.n_pairs, p.basis, wide, at.bias, 4 * wide)


@njit(nogil=True)
def place_of(i, width):
    """Where token i of a group stands: evens first."""
    return i // 2 + (i % 2) * (width // 2)


@njit(nogil=True)
def score_group(rows, vector, p, at, codes, stride, n_planes, offset, n, gains, out, pitch):
    """Scores of the `n` tokens of a group that stands `offset` tokens into its block."""
    n_rows, width = len(rows), 16 * len(vector)
    bias, bias_pitch = at.bias, 0
    if p.has_mean:
        bias, bias_pitch = at.bias + 4 * offset, 4 * p.basis_width
        if offset % width:
            _shift_bias(n_rows, width, p, at, offset, n)
            bias, bias_pitch = at.shifted, 4 * width
    if n < width:
        copy_codes(codes, stride, n_planes, n, width, at.key_codes)
        codes, stride = at.key_codes, width
    if gains == 0:
        scores(
            rows, vector, codes, stride, n_planes, at.digits, at.steps, at.bases, bias, bias_pitch, out, pitch
        )  # fmt: skip
        return
    set_zero(at.gained, width)
    scores(rows, vector, codes, stride, n_planes, at.digits, at.steps, at.bases, at.gained, 0, out, pitch)
    for row in range(n_rows):
        common = float_at(at.commons + 4 * row)
        for i in range(n):
            place = place_of(i, width)
            score = (float_at(out + row * pitch + 4 * place) - common) * float_at(gains + 4 * i) + common
            set_float(out + row * pitch + 4 * place, score + float_at(bias + row * bias_pitch + 4 * place))


@njit(nogil=True)
def _shift_bias(n_rows, width, p, at, offset, n):
    """The mean's term of tokens from an offset that no group of the basis begins at."""
    for row in range(n_rows):
        for i in range(n):
            j = offset + i
            source = at.bias + 4 * (row * p.basis_width + j // width * width + place_of(j % width, width))
            set_float(at.shifted + 4 * (row * width + place_of(i, width)), float_at(source))
        for i in range(n, width):
            set_float(at.shifted + 4 * (row * width + place_of(i, width)), np.float32(0))


@njit(nogil=True)
def copy_codes(source, stride, n_planes, n, width, target):
    """A group of fewer tokens in a place of its own: nothing past them is read."""
    for plane in range(n_planes):
        for i in range(width):
            set_byte(target + plane * width + i, byte_at(source + plane * stride + i) if i < n else 0)


@njit(nogil=True)
def set_zero(address, n):
    """n floats."""
    for i in range(n):
        set_float(address + 4 * i, np.float32(0))
