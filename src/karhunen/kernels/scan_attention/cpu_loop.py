"""The loop of the CPU scan: every item of work, span by span of its tokens, group by group within a span."""

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from karhunen.kernels.scan.emit import claim, float_at, int_at, record_at, set_float, set_int, short_at
from karhunen.kernels.scan.tokens import GROUP_ENTRY, cap, largest, values, weights
from karhunen.kernels.scan_attention.cpu_block import (
    copy_codes,
    key_bytes,
    load_query,
    place_of,
    prepare_block,
    score_group,
    set_zero,
)
from karhunen.kernels.scan_attention.cpu_layers import (
    LAYER_SCRATCH_BYTES,
    add_layers,
    layer_scratch_at,
    score_layers,
    start_layers,
    weigh_layers,
)
from karhunen.kernels.scan_attention.cpu_record import MOST_ROWS, PROBLEM, SCRATCH, SPAN
from karhunen.kernels.sources import kept_on_disk, sources

NO_BLOCK = -(1 << 62)
SCRATCH_BYTES = SCRATCH.itemsize
LEAST = np.float32(-1e30)
"""A score at or below this is of a hidden token."""


@njit(nogil=True)
def _gather(shape, p, at, batch, head, group, key_first, n_planes, value_first, token, end, block):
    """Scores of the groups of one span from `token` on; (groups, next token, block prepared last)."""
    width = 16 * len(shape[1])
    pitch = 4 * (SPAN + width)
    n_value_planes = int_at(p.value_plane_start + 8 * group + 8) - value_first
    keys = p.key_codes + batch * p.key_batch + key_first * p.key_plane
    held = p.value_codes + batch * p.value_batch + value_first * p.value_plane
    n_groups, n_short = 0, 0
    while token < end and (n_groups + 1) * width <= SPAN and n_short < 2:
        position = p.first_position + token
        here = position // p.block if p.block else 0
        if here != block:
            prepare_block(shape, p, at, head, group, here)
            block = here
        offset = position - here * p.block if p.block else 0
        n = min(width, end - token)
        if p.block:
            n = min(n, p.block - offset)
        gains = p.key_gain + batch * p.key_gain_batch + group * p.key_gain_head + 4 * token if p.key_gain else 0
        out = at.scores + 4 * n_groups * width
        score_group(shape, p, at, group, keys + token, p.key_plane, n_planes, offset, n, gains, out, pitch)
        codes, stride = held + token, p.value_plane
        if n < width:
            codes, stride = at.value_codes + n_short * width * n_value_planes, width
            copy_codes(held + token, p.value_plane, n_value_planes, n, width, codes)
            n_short += 1
        set_int(at.groups + GROUP_ENTRY * n_groups, codes)
        set_int(at.groups + GROUP_ENTRY * n_groups + 8, stride)
        set_int(at.spans + 16 * n_groups, token)
        set_int(at.spans + 16 * n_groups + 8, n)
        token += n
        n_groups += 1
    return n_groups, token, block


@njit(nogil=True)
def _hide(n_rows, width, p, at, batch, n_groups, cursor):
    """The mask, the lanes behind a group's last token and the tokens that are named; where the search goes on."""
    pitch = 4 * (SPAN + width)
    for group in range(n_groups):
        token, n = int_at(at.spans + 16 * group), int_at(at.spans + 16 * group + 8)
        for row in range(n_rows):
            line = at.scores + row * pitch + 4 * group * width
            if p.mask:
                for i in range(n):
                    place = line + 4 * place_of(i, width)
                    set_float(place, float_at(place) + float_at(p.mask + batch * p.mask_batch + 4 * (token + i)))
            for i in range(n, width):
                set_float(line + 4 * place_of(i, width), np.float32(-np.inf))
    first, behind = int_at(at.spans), 0
    behind = int_at(at.spans + 16 * (n_groups - 1)) + int_at(at.spans + 16 * (n_groups - 1) + 8)
    i = cursor
    while i < p.n_hidden:
        token = short_at(p.hidden_tokens + 4 * i)
        if p.hidden_sorted and token >= behind:
            return i
        if first <= token < behind and short_at(p.hidden_rows + 4 * i) == batch:
            group = (token - first) // width
            while token >= int_at(at.spans + 16 * group) + int_at(at.spans + 16 * group + 8):
                group += 1
            place = at.scores + 4 * (group * width + place_of(token - int_at(at.spans + 16 * group), width))
            for row in range(n_rows):
                set_float(place + row * pitch, np.float32(-np.inf))
        i += 1
    return i if p.hidden_sorted else 0


@njit(nogil=True)
def _add_log_gains(width, p, at, line, batch, group, n_groups):
    """Scores of one row with the logarithm of each value's gain: weights that carry the gain."""
    gains = p.value_gain + batch * p.value_gain_batch + group * p.value_gain_head
    for g in range(n_groups):
        token, n = int_at(at.spans + 16 * g), int_at(at.spans + 16 * g + 8)
        for i in range(n):
            place = line + 4 * (g * width + place_of(i, width))
            set_float(place, float_at(place) + np.log(float_at(gains + 4 * (token + i))))


@njit(nogil=True)
def _weigh(shape, p, at, batch, group, n_groups):
    """Scores of a span become int16 weights relative to its largest; references, totals and masses move on.

    `total` sums the softmax's weights, `mass` what values are multiplied with: the rounded weights, gains in them."""
    width = 16 * len(shape[1])
    n, pitch = n_groups * width, 4 * (SPAN + width)
    for row in range(len(shape[0])):
        line, out = at.scores + row * pitch, at.weights + row * (pitch // 2)
        largest(shape, line, n, at.top)
        most = float_at(at.top)
        before = float_at(at.reference + 4 * row)
        after = max(before, most)
        if most <= LEAST:
            set_float(at.top, np.float32(0))
            most, after = np.float32(0), before
        shrink = np.exp(before - after) if before > LEAST else np.float32(0)
        weights(shape, line, n_groups, at.top, out, at.summed)
        grown = np.exp(most - after) if after > LEAST else np.float32(0)
        total = float_at(at.summed) * grown
        if p.value_gain:
            _add_log_gains(width, p, at, line, batch, group, n_groups)
            largest(shape, line, n, at.top)
            most = float_at(at.top)
            if most <= LEAST:
                most = np.float32(0)
                set_float(at.top, most)
            weights(shape, line, n_groups, at.top, out, at.summed)
            grown = np.exp(most - after) if after > LEAST else np.float32(0)
        unit = grown / np.float32(32767)
        mass = float_at(at.summed + 4) * unit
        set_float(at.unit + 4 * row, unit)
        set_float(at.shrink + 4 * row, shrink)
        set_float(at.reference + 4 * row, after)
        set_float(at.total + 4 * row, float_at(at.total + 4 * row) * shrink + total)
        set_float(at.mass + 4 * row, float_at(at.mass + 4 * row) * shrink + mass)


@njit(nogil=True)
def _read_item(shape, p, at, mine, batch, head, first_row, split):
    """Sums of one item: (batch, head, rows, range of tokens)."""
    n_rows, width = len(shape[0]), 16 * len(shape[1])
    group = 0 if p.joined else head
    key_first = int_at(p.key_plane_start + 8 * group)
    n_planes = int_at(p.key_plane_start + 8 * group + 8) - key_first
    value_first = int_at(p.value_plane_start + 8 * group)
    n_value_planes = int_at(p.value_plane_start + 8 * group + 8) - value_first
    columns = p.value_columns + group * p.value_columns_head
    tables = p.value_bytes + key_bytes(shape) * int_at(p.value_first_column + 8 * group)
    unit = SPAN if p.block == 0 else -(-SPAN // p.block) * p.block
    late = p.first_position % p.block if p.block else 0
    share = -(-(p.tokens + late) // (p.splits * unit)) * unit
    token = max(0, split * share - late)
    end = min(p.tokens, (split + 1) * share - late)

    load_query(n_rows, p, at, batch, head, first_row)
    set_zero(at.sums, n_rows * p.value_width)
    if not p.has_mean:
        set_zero(at.bias, width)
    for row in range(n_rows):
        set_float(at.reference + 4 * row, np.float32(-np.inf))
        set_float(at.total + 4 * row, np.float32(0))
        set_float(at.mass + 4 * row, np.float32(0))
    if p.n_layers:
        start_layers(n_rows, p, mine, batch, token)
    set_float(at.scale, np.float32(p.scale))
    set_float(at.softcap, np.float32(p.softcap))
    pitch, block, cursor = 4 * (SPAN + width), NO_BLOCK, 0
    while token < end:
        n_groups, token, block = _gather(
            shape, p, at, batch, head, group, key_first, n_planes, value_first, token, end, block
        )
        if p.n_layers:
            score_layers(shape, p, at, mine, batch, head, group, n_groups)
        if p.softcap > 0:
            for row in range(n_rows):
                cap(shape, at.scores + row * pitch, n_groups * width, at.softcap)
        cursor = _hide(n_rows, width, p, at, batch, n_groups, cursor)
        _weigh(shape, p, at, batch, group, n_groups)
        if p.n_layers:
            weigh_layers(shape, p, at, mine, batch, group)
        for plane in range(n_value_planes):
            first = int_at(columns + 8 * plane)
            n_columns = int_at(columns + 8 * plane + 8) - first
            values(
                shape, at.groups, n_groups, plane, tables + key_bytes(shape) * first, n_columns, at.weights, pitch // 2,
                at.unit, at.shrink, at.sums + 4 * first, 4 * p.value_width,
            )  # fmt: skip


@njit(nogil=True)
def _write_item(n_rows, p, at, mine, batch, head, first_row, split):
    """Means in value coefficients, and logarithms of the softmax's denominators."""
    group = 0 if p.joined else head
    begin = int_at(p.value_first_column + 8 * group)
    n_columns = int_at(p.value_columns + group * p.value_columns_head + 8 * (
        int_at(p.value_plane_start + 8 * group + 8) - int_at(p.value_plane_start + 8 * group)
    ))  # fmt: skip
    for row in range(n_rows):
        index = ((split * p.batch + batch) * p.heads + head) * p.rows + first_row + row
        total, mass = float_at(at.total + 4 * row), float_at(at.mass + 4 * row)
        out = p.mean + 4 * index * p.n_coefficients
        set_zero(out, p.n_coefficients)
        reference = float_at(at.reference + 4 * row)
        seen = total > 0 and reference > LEAST
        set_float(p.log_sum + 4 * index, reference + np.log(total) if seen else np.float32(-np.inf))
        divisor = total if p.value_gain else mass
        if not seen or divisor <= 0:
            continue
        for i in range(n_columns):
            column = begin + i
            sums = float_at(at.sums + 4 * (row * p.value_width + i))
            sums = (sums + float_at(p.value_offset + 4 * column) * mass) * float_at(p.value_scale + 4 * column)
            place = out + 4 * int_at(p.value_coefficient + 8 * column)
            set_float(place, float_at(place) + sums / divisor)
        if p.n_layers:
            add_layers(p, mine, group, n_rows, row, divisor, out)


problem_at, scratch_at = record_at(PROBLEM), record_at(SCRATCH)


@njit(nogil=True)
def _work(shape, job):
    """Items (batch, head, chunk of rows, token range) that have so many rows, one after the other as they are claimed.

    `job` is the address of five int64: the problem's address, that of the workers' scratch, items, and two counters."""
    p = problem_at(int_at(job))
    worker = claim(job + 24)
    at = scratch_at(int_at(job + 8) + worker * SCRATCH_BYTES)
    mine = layer_scratch_at(p.layer_memory + worker * LAYER_SCRATCH_BYTES)
    n_rows, n_items = len(shape[0]), int_at(job + 16)
    while True:
        item = claim(job + 32)
        if item >= n_items:
            return
        split = item % p.splits
        chunk = item // p.splits % p.row_chunks
        head = item // (p.splits * p.row_chunks) % p.heads
        batch = item // (p.splits * p.row_chunks * p.heads)
        first_row = chunk * MOST_ROWS
        if min(MOST_ROWS, p.rows - first_row) == n_rows:
            _read_item(shape, p, at, mine, batch, head, first_row, split)
            _write_item(n_rows, p, at, mine, batch, head, first_row, split)


@cache
def compiled(token: tuple[tuple[int, ...], ...]) -> Any:
    """The loop for one shape, as ctypes calls it; kept on disk for these sources (karhunen.kernels.sources)."""
    return _compiled(token, sources()).ctypes


def _compiled(token: tuple[tuple[int, ...], ...], made_of: str) -> Any:
    @kept_on_disk(cfunc, types.void(types.int64))
    def attend(job):
        if made_of:
            _work(token, job)

    return attend
