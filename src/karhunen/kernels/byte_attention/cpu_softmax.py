"""The online softmax of attention from bytes on a CPU: scores of a span become weights relative to a reference."""

import numpy as np
from numba import njit

from karhunen.kernels.simd import add, divide, exp, load, maximum, mul, splat, spread, store, subtract
from karhunen.kernels.softmax import INVISIBLE

SLACK = 16.0
"""How far a score may exceed the softmax reference: e^16 times 2^20 tokens is far from float32's end."""


@njit(nogil=True)
def cap(scores, n_scores, softcap):
    """s becomes c · tanh(s / c) = c − 2c / (e^(2s/c) + 1)."""
    top, inverse, minus_two, one = splat(8, softcap), splat(8, 2 / softcap), splat(8, -2 * softcap), splat(8, 1.0)
    for i in range(0, n_scores, 8):
        shrunk = divide(minus_two, add(exp(mul(load(8, scores, i), inverse)), one))
        store(scores, i, add(top, shrunk))


@njit(nogil=True)
def hide_masked(rows, problem, batch, span, span_end, scores):
    """Add the mask of each token."""
    n_rows = len(rows)
    for n in range(span, span_end):
        at = (n - span) * n_rows
        store(scores, at, add(load(rows, scores, at), splat(rows, problem.mask[batch * problem.t + n])))


@njit(nogil=True)
def hide_early(problem, batch, first_row, n_rows, span, span_end, scores):
    """No row sees what stands before its first visible token."""
    for row in range(first_row, min(problem.q, first_row + n_rows)):
        for n in range(span, min(span_end, problem.first_visible[batch * problem.q + row])):
            scores[(n - span) * n_rows + row - first_row] = -np.inf


@njit(nogil=True)
def move_reference(n_rows, scores, n_scores, histogram, scratch):
    """Where a row's largest score outgrew its reference, take that, and shrink what was summed relative to the old."""
    most = splat(8, INVISIBLE)
    for i in range(0, n_scores, 8):
        most = maximum(load(8, scores, i), most)
    store(scratch.largest, 0, most)
    moved = False
    for row in range(n_rows):
        largest = scratch.largest[row]
        for lane in range(row, 8, n_rows):
            largest = max(largest, scratch.largest[lane])
        before = scratch.reference[row]
        change = np.float32(1)
        if largest > before + SLACK:
            change = np.float32(np.exp(np.float64(before) - largest))
            moved = moved or scratch.total[row] > 0
            scratch.total[row] *= change
        else:
            largest = before
        for lane in range(row, 8, n_rows):
            scratch.reference[lane] = largest
            scratch.lanes[lane] = change
    if moved:
        factor = load(8, scratch.lanes, 0)
        for i in range(0, len(histogram), 8):
            store(histogram, i, mul(load(8, histogram, i), factor))


@njit(nogil=True)
def weigh_tokens(rows, n_scores, scratch):
    """Scores become softmax weights times gains; the weights alone add to the totals."""
    n_rows = len(rows)
    scores = scratch.scores
    reference = load(8, scratch.reference, 0)
    summed = splat(8, 0.0)
    for i in range(0, n_scores, 8):
        weight = exp(subtract(load(8, scores, i), reference))
        summed = add(summed, weight)
        store(scores, i, mul(weight, spread(rows, scratch.gains, i // n_rows)))
    store(scratch.lanes, 0, summed)
    for lane in range(8):
        scratch.total[lane % n_rows] += scratch.lanes[lane]
