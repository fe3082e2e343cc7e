"""The loop of attention from bytes on a CPU: every item of work, span by span of its tokens."""

import numpy as np
from numba import njit

from karhunen.kernels.byte_attention.cpu_inputs import SPAN
from karhunen.kernels.byte_attention.cpu_scores import (
    add_offset_bias,
    fold,
    load_bias,
    load_gains,
    load_query,
    scale,
    score_folded,
)
from karhunen.kernels.byte_attention.cpu_softmax import cap, hide_early, hide_masked, move_reference, weigh_tokens
from karhunen.kernels.byte_attention.cpu_values import count, weigh_entries
from karhunen.kernels.simd import splat, store
from karhunen.kernels.softmax import INVISIBLE
from karhunen.kernels.sources import kept_on_disk, sources


@njit(nogil=True)
def _read_tokens(rows, problem, keys, values, batch, head, chunk, split, scratch):
    """Fill the histograms of one item, and each row's sum of weights and the reference they are relative to."""
    n_rows = len(rows)
    first_row = chunk * n_rows
    per_split = -(-problem.t // (problem.n_splits * SPAN)) * SPAN
    begin = min(problem.t, split * per_split)
    end = min(problem.t, begin + per_split)
    if len(problem.first_visible):
        begin = max(begin, _earliest(problem, batch, first_row, n_rows))

    n_planes = values.tables.plane_start[head + 1] - values.tables.plane_start[head]
    histogram = scratch.histogram[: n_planes * 256 * n_rows]
    histogram[:] = 0
    scratch.total[:] = 0
    scratch.reference[:] = INVISIBLE
    scratch.bias[:] = 0
    scores = scratch.scores
    block = -1
    for span in range(begin, end, SPAN):
        span_end = min(end, span + SPAN)
        n_scores = (span_end - span) * n_rows
        load_gains(keys, batch, head, span, span_end - span, problem.scale, scratch.gains)
        start = span
        while start < span_end:
            here, stop = _block_end(problem, start, span_end)
            if here != block:
                block = here
                load_bias(problem, batch, head, first_row, n_rows, block, scratch.bias)
                load_query(problem, keys.tables, batch, head, first_row, n_rows, block, scratch.query)
                fold(rows, keys.tables, head, scratch.query, scratch.folded)
            out = (start - span) * n_rows
            score_folded(rows, keys, batch, head, start, stop, scratch.folded, scores, out)
            scale(rows, scratch.gains, start - span, stop - start, scratch.bias, scores, out)
            if len(problem.offset_bias):
                add_offset_bias(rows, problem, batch, head, first_row, block, start, stop, scores, out)
            start = stop

        if problem.softcap > 0:
            cap(scores, n_scores, problem.softcap)
        if len(problem.mask):
            hide_masked(rows, problem, batch, span, span_end, scores)
        if len(problem.first_visible):
            hide_early(problem, batch, first_row, n_rows, span, span_end, scores)
        store(scores, n_scores, splat(8, -np.inf))
        move_reference(n_rows, scores, n_scores, histogram, scratch)
        load_gains(values, batch, head, span, span_end - span, 1.0, scratch.gains)
        weigh_tokens(rows, n_scores, scratch)
        count(rows, values, batch, head, span, span_end, scores, histogram)


@njit(nogil=True)
def _block_end(problem, start, span_end):
    """The block of token `start`, and where that block or the span ends."""
    if problem.block_tokens == 0:
        return 0, span_end
    block = (start + problem.first_offset) // problem.block_tokens
    return block, min(span_end, (block + 1) * problem.block_tokens - problem.first_offset)


@njit(nogil=True)
def _earliest(problem, batch, first_row, n_rows):
    earliest = problem.t
    for row in range(first_row, min(problem.q, first_row + n_rows)):
        earliest = min(earliest, problem.first_visible[batch * problem.q + row])
    return max(earliest, 0)


def _compiled(made_of: str):
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @kept_on_disk(njit, nogil=True)
    def attend(rows, problem, keys, values, scratch, first_item, step, n_items, mean, log_sum):
        """Items first_item, first_item + step, … of (batch, head, chunk of rows, token range)."""
        if not made_of:
            return
        n_rows = len(rows)
        per_batch = problem.n_splits * problem.n_chunks * problem.h
        for item in range(first_item, n_items, step):
            split = item % problem.n_splits
            chunk = item // problem.n_splits % problem.n_chunks
            head = item // (problem.n_splits * problem.n_chunks) % problem.h
            batch = item // per_batch
            _read_tokens(rows, problem, keys, values, batch, head, chunk, split, scratch)
            weigh_entries(rows, values.tables, head, scratch)
            first_quad = values.tables.head_quads[head]
            n_columns = 4 * (values.tables.head_quads[head + 1] - first_quad)
            row = ((split * (n_items // per_batch) + batch) * problem.h + head) * problem.q + chunk * n_rows
            for r in range(min(n_rows, problem.q - chunk * n_rows)):
                total = scratch.total[r]
                log_sum[row + r] = scratch.reference[r] + np.log(total) if total > 0 else -np.inf
                inverse = np.float32(1 / total if total > 0 else 0.0)
                begin = (row + r) * problem.c_value
                mean[begin : begin + problem.c_value] = 0
                for i in range(n_columns):
                    c = values.tables.coefficient[4 * first_quad + i]
                    mean[begin + c] += scratch.sums[i * n_rows + r] * inverse

    return attend


attend = _compiled(sources())
