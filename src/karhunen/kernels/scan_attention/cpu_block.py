"""One block of the CPU scan: the query in its frame, and the scores of its groups."""

import numpy as np
from numba import njit

from karhunen.kernels.scan.emit import byte_at, float_at, int_at, set_byte, set_float
from karhunen.kernels.scan.query import mirror, product, turn, whole_numbers
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
def turned_query(token, p, at, block):
    """Address of the rows as a block of positions sees them."""
    if p.block == 0:
        return at.query
    pitch = 4 * p.n_order
    turn(token, at.query, pitch, p.angles + block * p.angles_row, p.n_pairs, at.turned)
    for row in range(len(token[0])):
        for i in range(2 * p.n_pairs, p.n_order):
            set_float(at.turned + row * pitch + 4 * i, float_at(at.query + row * pitch + 4 * i))
    return at.turned


@njit(nogil=True)
def prepare_block(token, p, at, head, group, block):
    """q′ in whole numbers, steps and bases of the scores, and the mean's term by offset."""
    n_rows, pitch, line = len(token[0]), 4 * p.n_order, 4 * p.matrix_width
    query = turned_query(token, p, at, block)
    product(token, query, pitch, p.n_order, p.matrix + head * p.matrix_head, p.matrix_width, at.frames, line)
    least = p.key_least + group * p.key_least_head
    whole_numbers(token, at.frames, line, p.key_width, least, at.whole, at.steps, at.bases)
    scale = np.float32(p.scale)
    for row in range(n_rows):
        common = np.float32(0)
        if p.has_common:
            common = float_at(at.frames + row * line + 4 * p.key_width) * scale
        set_float(at.steps + 4 * row, float_at(at.steps + 4 * row) * scale)
        set_float(at.bases + 4 * row, float_at(at.bases + 4 * row) * scale + common)
        set_float(at.commons + 4 * row, common)
    if p.has_mean:
        turn(token, query, pitch, p.turned_mean + head * 8 * p.n_pairs, p.n_pairs, at.by_mean)
        wide, half = p.basis_width, 4 * p.n_pairs
        product(token, at.by_mean, pitch, p.n_pairs, p.basis, wide, at.even, 4 * wide)
        product(token, at.by_mean + half, pitch, p.n_pairs, p.basis + half * wide, wide, at.odd, 4 * wide)
        n_groups = p.basis_tokens // (16 * len(token[1]))
        mirror(token, at.even, at.odd, 4 * wide, n_groups, at.bias, 4 * p.basis_tokens)


@njit(nogil=True)
def place_of(i, width):
    """Where token i of a group stands among its scores: `tokens.place`, compiled."""
    half, j = width // 2, i // 2
    return i % 2 * half + j % 8 // 4 * (half // 2) + j // 8 * 4 + j % 4


@njit(nogil=True)
def key_bytes(token):
    """Of a column's tables."""
    return 32 if len(token[2]) == 1 else 128 if len(token[2]) == 2 else 256


@njit(nogil=True)
def score_group(token, p, at, group, codes, stride, n_planes, offset, n, gains, out, pitch):
    """Scores of the `n` tokens of a group that stands `offset` tokens into its block."""
    n_rows, width = len(token[0]), 16 * len(token[1])
    columns = p.key_columns + group * p.key_columns_head
    tables = p.key_bytes + key_bytes(token) * int_at(p.key_first_column + 8 * group)
    bias, bias_pitch = at.bias, 0
    if p.has_mean:
        bias, bias_pitch = at.bias + 4 * offset, 4 * p.basis_tokens
        if offset % width:
            _shift_bias(n_rows, width, p, at, offset, n)
            bias, bias_pitch = at.shifted, 4 * width
    if n < width:
        copy_codes(codes, stride, n_planes, n, width, at.key_codes)
        codes, stride = at.key_codes, width
    if gains == 0:
        scores(
            token, codes, stride, n_planes, columns, tables, at.whole, 2 * p.key_width, at.steps, at.bases, bias,
            bias_pitch, at.scale, out, pitch,
        )  # fmt: skip
        return
    set_zero(at.gained, width)
    scores(
        token, codes, stride, n_planes, columns, tables, at.whole, 2 * p.key_width, at.steps, at.bases, at.gained, 0,
        at.scale, out, pitch,
    )  # fmt: skip
    for row in range(n_rows):
        common = float_at(at.commons + 4 * row)
        for i in range(n):
            place = place_of(i, width)
            score = (float_at(out + row * pitch + 4 * place) - common) * float_at(gains + 4 * i) + common
            added = float_at(bias + row * bias_pitch + 4 * place) * float_at(at.scale)
            set_float(out + row * pitch + 4 * place, score + added)


@njit(nogil=True)
def _shift_bias(n_rows, width, p, at, offset, n):
    """The mean's term of tokens from an offset that no group of the basis begins at."""
    for row in range(n_rows):
        for i in range(n):
            j = offset + i
            source = at.bias + 4 * (row * p.basis_tokens + j // width * width + place_of(j % width, width))
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
