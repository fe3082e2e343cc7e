"""Scores of attention from bytes on a CPU, for all query rows of a KV head side by side.

F_j[byte] = ⟨q′, table_j[byte]⟩ once per block,    score of a token = Σ_j F_j[byte_j]
"""

import numpy as np
from numba import njit

from karhunen.kernels import simd
from karhunen.kernels.byte_attention.cpu_inputs import HALF_GAIN, LEVEL_GAIN, NO_GAIN, SPAN
from karhunen.kernels.simd import (
    add,
    byte,
    fma,
    four_bytes,
    load,
    load_half,
    mul,
    splat,
    spread,
    store,
)


@njit(nogil=True)
def load_query(problem, tables, batch, head, first_row, n_rows, block, query):
    """q′ as folding reads it: [quad][4][eight lanes], lane k of row k % n_rows."""
    for lane in range(8):
        frame = frame_of(problem, batch, head, first_row + lane % n_rows, block)
        for i in range(4 * (tables.head_quads[head + 1] - tables.head_quads[head])):
            query[8 * i + lane] = problem.q_frames[frame + i]


@njit(nogil=True)
def frame_of(problem, batch, head, row, block):
    """Where the q′ of a row begins; rows past the last repeat it."""
    row = (batch * problem.h + head) * problem.q + min(row, problem.q - 1)
    return (row * problem.n + block) * problem.q_frame_stride


@njit(nogil=True)
def fold(rows, tables, head, query, folded):
    """Each entry's product with q′, for every row: [plane][256][row]; 8 / n_rows entries at a time."""
    n_rows = len(rows)
    first_plane, first_quad, columns = tables.plane_start[head], tables.head_quads[head], tables.columns
    for plane in range(first_plane, tables.plane_start[head + 1]):
        out = (plane - first_plane) * 256 * n_rows
        for quad in range(tables.plane_quads[plane], tables.plane_end[plane]):
            fresh = quad == tables.plane_quads[plane]
            q, at = (quad - first_quad) * 32, quad * 1024
            a, b, c, d = load(8, query, q), load(8, query, q + 8), load(8, query, q + 16), load(8, query, q + 24)
            for i in range(0, 256, 8 // n_rows):
                x = splat(8, 0.0) if fresh else load(8, folded, out + i * n_rows)
                x = fma(spread(rows, columns, at + i), a, x)
                x = fma(spread(rows, columns, at + 256 + i), b, x)
                x = fma(spread(rows, columns, at + 512 + i), c, x)
                store(folded, out + i * n_rows, fma(spread(rows, columns, at + 768 + i), d, x))


@njit(nogil=True)
def score_folded(rows, keys, batch, head, start, stop, folded, scores, out):
    """Scores of tokens start … stop: a look-up and an addition per byte, four planes a pass, four tokens a word."""
    n_rows = len(rows)
    low = 255 * n_rows
    first = keys.tables.plane_start[head]
    n_planes = keys.tables.plane_start[head + 1] - first
    n_tokens = stop - start
    whole = n_tokens // 4 * 4
    stride = keys.plane_stride
    address = keys.codes + batch * keys.batch_stride + first * stride + start
    for plane in range(0, n_planes // 4 * 4, 4):
        a = address + plane * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        f = plane * 256 * n_rows
        g, h, i = f + 256 * n_rows, f + 512 * n_rows, f + 768 * n_rows
        for n in range(0, whole, 4):
            w, x = four_bytes(a + n) * n_rows, four_bytes(b + n) * n_rows
            y, z = four_bytes(c + n) * n_rows, four_bytes(d + n) * n_rows
            for k in range(4):
                at = out + (n + k) * n_rows
                u = splat(rows, 0.0) if plane == 0 else load(rows, scores, at)
                u = add(u, load(rows, folded, f + ((w >> (8 * k)) & low)))
                u = add(u, load(rows, folded, g + ((x >> (8 * k)) & low)))
                v = add(load(rows, folded, h + ((y >> (8 * k)) & low)), load(rows, folded, i + ((z >> (8 * k)) & low)))
                store(scores, at, add(u, v))
        for n in range(whole, n_tokens):
            at = out + n * n_rows
            u = splat(rows, 0.0) if plane == 0 else load(rows, scores, at)
            u = add(u, load(rows, folded, f + byte(a + n) * n_rows))
            u = add(u, load(rows, folded, g + byte(b + n) * n_rows))
            v = add(load(rows, folded, h + byte(c + n) * n_rows), load(rows, folded, i + byte(d + n) * n_rows))
            store(scores, at, add(u, v))
    if n_planes < 4:
        for n in range(n_tokens):
            store(scores, out + n * n_rows, splat(rows, 0.0))
    for plane in range(n_planes // 4 * 4, n_planes):
        for n in range(n_tokens):
            at = out + n * n_rows
            entry = load(rows, folded, plane * 256 * n_rows + byte(address + plane * stride + n) * n_rows)
            store(scores, at, add(load(rows, scores, at), entry))


@njit(nogil=True)
def scale(rows, gains, first, n_tokens, bias, scores, out):
    """Scores of one block times gain, plus bias."""
    n_rows = len(rows)
    n_scores = n_tokens * n_rows
    constant = load(8, bias, 0)
    for i in range(0, n_scores // 8 * 8, 8):
        gain = spread(rows, gains, first + i // n_rows)
        store(scores, out + i, fma(load(8, scores, out + i), gain, constant))
    for i in range(n_scores // 8 * 8, n_scores):
        scores[out + i] = scores[out + i] * gains[first + i // n_rows] + bias[i % 8]


@njit(nogil=True)
def add_offset_bias(rows, problem, batch, head, first_row, block, start, stop, scores, out):
    """Each token's bias, whose rows lie side by side in memory."""
    factor = splat(rows, problem.scale)
    offset = start + problem.first_offset - block * problem.block_tokens
    at = ((batch * problem.h + head) * problem.n + block) * problem.block_tokens + offset
    at = at * problem.offset_bias_rows + first_row
    for i in range(stop - start):
        to = out + i * len(rows)
        bias = load(rows, problem.offset_bias, at + i * problem.offset_bias_rows)
        store(scores, to, fma(bias, factor, load(rows, scores, to)))


@njit(nogil=True)
def load_gains(side, batch, head, first, n_tokens, scale, gains):
    """Gains of a span, times scale; eight more are set, for vectors that reach past the end."""
    address = side.gain + batch * side.gain_batch_stride + head * side.gain_head_stride
    whole = n_tokens // 8 * 8
    factor = splat(8, scale)
    if side.gain_kind == NO_GAIN:
        for n in range(0, n_tokens + 8, 8):
            store(gains, min(n, SPAN), factor)
        return
    if side.gain_kind == LEVEL_GAIN:
        for n in range(n_tokens):
            gains[n] = side.gain_levels[byte(address + first + n)] * np.float32(scale)
    elif side.gain_kind == HALF_GAIN:
        for n in range(0, whole, 8):
            store(gains, n, mul(load_half(8, address + 2 * (first + n)), factor))
        for n in range(whole, n_tokens):
            store(gains, n, mul(load_half(1, address + 2 * (first + n)), splat(1, scale)))
    else:
        for n in range(n_tokens):
            gains[n] = simd.single(address + 4 * (first + n)) * np.float32(scale)
    store(gains, n_tokens, splat(8, 0.0))


@njit(nogil=True)
def load_bias(problem, batch, head, first_row, n_rows, block, bias):
    """Of each lane's row, times scale; 0 stays where there is none."""
    if not len(problem.key_bias):
        return
    for lane in range(8):
        row = first_row + lane % n_rows
        if row < problem.q:
            value = problem.key_bias[((batch * problem.h + head) * problem.q + row) * problem.n + block]
            bias[lane] = value * np.float32(problem.scale)
