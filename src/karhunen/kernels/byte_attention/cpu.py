"""Attention from bytes on a CPU: look-ups and additions in place of most of the arithmetic.

    keys, folded     F_j[byte] = ⟨q′, table_j[byte]⟩ once per block; a token's score is Σ_j F_j[byte_j]
    keys, direct     entries side by side in a tile of 64 tokens, then ⟨q′, tile⟩, where a block is too short to fold
    values           H_j[byte] += p_n · gain_n, a histogram of attention weight; mean = Σ_byte H_j[byte] · table_j[byte]

All query rows of a KV head (up to 8) lie side by side in one vector, so a look-up or an addition serves the group, and
each byte is read once for it. A pass takes four planes, whose tables stay in the first-level cache. The softmax is
online over spans of tokens; its reference moves only when a score exceeds it by `SLACK`, so the histograms are
hardly ever rescaled. Work is cut by (batch, KV head, rows, tokens); partials of token ranges are merged at the end.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numba import njit
from torch import Tensor

from karhunen.kernels import simd
from karhunen.kernels.byte_attention.inputs import (
    INVISIBLE,
    CodedTokens,
    Partial,
    merge_partials,
    require_agreement,
)
from karhunen.kernels.byte_attention.naive import additive
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.octets import Octets, octets_of
from karhunen.kernels.quads import Quads, quads_of
from karhunen.kernels.simd import (
    ROWS,
    add,
    byte,
    divide,
    entry,
    exp,
    fma,
    four_bytes,
    load,
    load_half,
    maximum,
    mul,
    splat,
    spread,
    store,
    subtract,
    sums_of_eight,
)

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
"""Against naive in float64: a score is a float32 sum of some 100 terms (error about 1e-6 of their magnitude), and a
softmax weight carries the score's absolute error as a relative one; means and log-sums are of order 1 to 10."""

SPAN = 512
"""Tokens of one softmax step: their scores of 8 rows take 16 KiB, half of a common first-level cache."""
TILE = 64
"""Tokens decoded at a time by the direct path: 64 columns of them take half of a common first-level cache."""
SLACK = 16.0
"""How far a score may exceed the softmax reference: e^16 times 2^20 tokens is far from float32's end."""

NO_GAIN, FLOAT_GAIN, HALF_GAIN, LEVEL_GAIN = range(4)


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    return simd.host_support()


def byte_attention(
    q_frames: Float[Tensor, "b h q n c"],
    keys: CodedTokens,
    values: CodedTokens,
    *,
    key_bias: Float[Tensor, "b h q n"] | None = None,
    offset_bias: Float[Tensor, "b h q n k"] | None = None,
    block_tokens: int | None = None,
    first_offset: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    first_visible: Int[Tensor, "b q"] | None = None,
    n_threads: int | None = None,
    folded: bool | None = None,
) -> Partial:
    """As `naive.byte_attention`, in float32. `n_threads`: torch's own number if None; `folded`: by `repays_folding`."""
    require_agreement(q_frames, keys, values, key_bias, offset_bias, block_tokens, first_offset, mask, first_visible)
    b, h, q, n, c = q_frames.shape
    t, c_value = keys.n_tokens, values.tables.n_coefficients
    n_threads = n_threads or torch.get_num_threads()
    rows = ROWS[next(lanes for lanes in (1, 2, 4, 8) if lanes >= min(q, 8))]
    n_chunks = -(-q // len(rows))
    n_splits = token_splits(b * h * n_chunks, t, n_threads)
    if folded is None:
        folded = repays_folding(keys.tables, len(rows), min(block_tokens or t, -(-t // n_splits)))

    key_side, value_side = _side(keys), _side(values)
    frame_rows, frame_stride = _in_columns(q_frames, keys.tables)
    bias_rows, bias_stride = (np.zeros(0, np.float32), 0) if offset_bias is None else _rows_of(offset_bias)
    nothing = np.zeros(0, np.float32)
    problem = _Problem(
        h=h, q=q, t=t, n=n, c=c, c_value=c_value, n_chunks=n_chunks, n_splits=n_splits,
        block_tokens=block_tokens or 0, first_offset=first_offset, folded=folded,
        scale=scale, softcap=softcap or 0.0,
        q_frames=frame_rows,
        q_frame_stride=frame_stride,
        key_bias=nothing if key_bias is None else _flat(key_bias),
        offset_bias=nothing if offset_bias is None else bias_rows,
        offset_bias_stride=bias_stride,
        mask=nothing if mask is None else _flat(additive(mask, torch.float32)),
        first_visible=np.zeros(0, np.int64) if first_visible is None else _flat(first_visible, torch.int64),
    )  # fmt: skip
    mean = torch.empty(n_splits, b, h, q, c_value)
    log_sum = torch.empty(n_splits, b, h, q)

    def run(first: int, step: int) -> None:
        _attend(
            rows, problem, key_side, value_side, _scratch(rows, key_side, value_side.tables, folded),
            first, step, b * h * n_chunks * n_splits, mean.view(-1).numpy(), log_sum.view(-1).numpy(),
        )  # fmt: skip

    n_workers = min(n_threads, b * h * n_chunks * n_splits)
    others = [_pool(n_workers).submit(run, first, n_workers) for first in range(1, n_workers)]
    run(0, max(n_workers, 1))
    for other in others:
        other.result()
    if n_splits == 1:
        return Partial(mean=mean[0], log_sum=log_sum[0])
    return merge_partials([Partial(mean=mean[i], log_sum=log_sum[i]) for i in range(n_splits)])


def token_splits(n_items: int, t: int, n_threads: int) -> int:
    """Token ranges per (batch, head, rows): the fewest that keep threads evenly busy, none shorter than 4 spans."""
    most = max(1, t // (4 * SPAN))
    if n_threads == 1 or most == 1:
        return 1

    def idle(splits: int) -> float:
        return -(-n_items * splits // n_threads) * n_threads / (n_items * splits)

    candidates = range(1, min(most, 4 * n_threads) + 1)
    return next((splits for splits in candidates if idle(splits) <= 1.1), candidates[-1])


def repays_folding(tables: ByteTables, n_rows: int, fold_tokens: int) -> bool:
    """Whether tables folded with the query every `fold_tokens` tokens cost less than multiplying each token's entries.

    In nanoseconds as measured on a busy AVX2 core; only ratios matter. Folding multiplies 256 entries of each quad.
    """
    prepared = quads_of(tables)
    n_quads = len(prepared.quad_plane)
    fold = n_quads * (65.0 if n_rows == 1 else 250.0)
    look_up = tables.n_planes * (0.27 + 0.03 * n_rows) * fold_tokens
    multiply = n_quads * (0.6 + 0.13 * n_rows) * fold_tokens
    return fold + look_up < multiply


class _Problem(NamedTuple):
    h: int
    q: int
    t: int
    n: int
    c: int
    c_value: int
    n_chunks: int
    n_splits: int
    block_tokens: int  # 0: one frame for all tokens
    first_offset: int
    folded: bool
    scale: float
    softcap: float  # 0: none
    q_frames: np.ndarray  # a row per block and query row, `q_frame_stride` apart; in the order of the columns
    q_frame_stride: int
    key_bias: np.ndarray  # empty: none; so the next three
    offset_bias: np.ndarray  # a row per block and query row, `offset_bias_stride` apart
    offset_bias_stride: int
    mask: np.ndarray
    first_visible: np.ndarray


class _Side(NamedTuple):
    """Where one side's bytes lie; strides in bytes, so one compilation serves every slice of a buffer."""

    codes: int
    batch_stride: int
    plane_stride: int
    gain_kind: int
    gain: int
    gain_batch_stride: int
    gain_head_stride: int
    gain_levels: np.ndarray
    tables: Quads
    octets: Octets


class _Scratch(NamedTuple):
    """One worker's memory, made by the caller and filled by the kernel: no compiled code allocates."""

    query: np.ndarray  # q' of one block, in the order of the quads
    folded: np.ndarray  # [plane][256][row]
    histogram: np.ndarray  # [plane][256][row]
    sums: np.ndarray  # [quad][4][row]
    scores: np.ndarray  # [token of a span][row], then weights
    gains: np.ndarray  # [token of a span]
    bias: np.ndarray  # eight lanes, lane k of row k % n_rows; so the next three
    reference: np.ndarray
    largest: np.ndarray
    lanes: np.ndarray
    total: np.ndarray  # [row], float64
    frames: np.ndarray  # [8], where the q' of row k % n_rows begins
    tile: np.ndarray  # [token of a tile, and eight more][column, and eight more]


def _scratch(rows: tuple[int, ...], key_side: _Side, values: Quads, folded: bool) -> _Scratch:
    n_rows, keys = len(rows), key_side.tables
    stride = 0 if folded else -(-int(key_side.octets.n_columns.max(initial=0)) // 8) * 8 + 8
    tile = torch.zeros(TILE * stride + 8 * stride).numpy()  # aligned; rows past the last token are read
    last = (np.empty(n_rows), np.empty(8, np.int64), tile)
    sizes = (
        int(np.diff(keys.head_quads).max()) * 4 * n_rows,
        int(np.diff(keys.plane_start).max()) * 256 * n_rows,
        int(np.diff(values.plane_start).max()) * 256 * n_rows,
        int(np.diff(values.head_quads).max()) * 4 * n_rows,
        (SPAN + 8) * n_rows + 8,
        SPAN + 8,
        *[8] * 4,
    )
    return _Scratch(*(np.empty(size, np.float32) for size in sizes), *last)


def _in_columns(q_frames: Tensor, tables: ByteTables) -> tuple[np.ndarray, int]:
    """Frames in the order of each head's columns, as rows some stride apart; a copy only where the order differs.

    Eight floats past the last row may be read, for tables that are zero there, so a row may end with its neighbour's.
    """
    if tables.in_order:
        return _rows_of(q_frames, 8)
    starts = [tables.column_start[plane] for plane in tables.plane_start]
    widest = max(stop - start for start, stop in pairwise(starts))
    made = q_frames.new_zeros(*q_frames.shape[:-1], widest, dtype=torch.float32)
    for head, (start, stop) in enumerate(pairwise(starts)):
        made[:, head, ..., : stop - start] = q_frames[:, head].index_select(-1, tables.coefficient[start:stop].long())
    return _rows_of(made, 8)


def _rows_of(tensor: Tensor, spare: int = 0) -> tuple[np.ndarray, int]:
    """All vectors of the last axis, their distance in floats, and `spare` readable floats after the last."""
    tensor = tensor.detach().float()
    n, width, stride = tensor[..., 0].numel(), tensor.shape[-1], tensor.stride(-2)
    steps = [size * step for size, step in zip(tensor.shape[1:-1], tensor.stride()[1:-1], strict=True)]
    end = tensor.storage_offset() + (n - 1) * stride + width + spare
    if tensor.stride(-1) != 1 or list(tensor.stride()[:-2]) != steps or 4 * end > tensor.untyped_storage().nbytes():
        tensor = torch.nn.functional.pad(tensor, (0, spare)).contiguous()
        stride = width + spare
    return tensor.as_strided(((n - 1) * stride + width + spare,), (1,)).numpy(), stride


def _flat(tensor: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return tensor.detach().to(dtype).contiguous().view(-1).numpy()


def _side(side: CodedTokens) -> _Side:
    codes, gain = side.codes, side.gain
    for name, tensor in (("codes", codes), ("gain", gain)):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} have stride {tensor.stride(-1)} along the token axis; neighbours are wanted")
    kinds = {None: NO_GAIN, torch.float32: FLOAT_GAIN, torch.float16: HALF_GAIN, torch.uint8: LEVEL_GAIN}
    kind = kinds.get(None if gain is None else gain.dtype)
    if kind is None:
        raise TypeError(
            f"gains are {gain.dtype if gain is not None else None}; float16, float32 or bytes with levels are read"
        )
    size = 0 if gain is None else gain.element_size()
    return _Side(
        codes=codes.data_ptr(),
        batch_stride=codes.stride(0),
        plane_stride=codes.stride(1),
        gain_kind=kind,
        gain=0 if gain is None else gain.data_ptr(),
        gain_batch_stride=0 if gain is None else gain.stride(0) * size,
        gain_head_stride=0 if gain is None else gain.stride(1) * size,
        gain_levels=np.zeros(0, np.float32) if side.gain_levels is None else _flat(side.gain_levels),
        tables=quads_of(side.tables),
        octets=octets_of(side.tables),
    )


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen-byte-attention")


@njit(cache=True, nogil=True)
def _attend(rows, problem, keys, values, scratch, first_item, step, n_items, mean, log_sum):
    """Items first_item, first_item + step, … of (batch, head, chunk of rows, token range)."""
    n_rows = len(rows)
    per_batch = problem.n_splits * problem.n_chunks * problem.h
    for item in range(first_item, n_items, step):
        split = item % problem.n_splits
        chunk = item // problem.n_splits % problem.n_chunks
        head = item // (problem.n_splits * problem.n_chunks) % problem.h
        batch = item // per_batch
        _read_tokens(rows, problem, keys, values, batch, head, chunk, split, scratch)
        _weigh_entries(rows, values.tables, head, scratch)
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


@njit(cache=True, nogil=True)
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
        _load_gains(keys, batch, head, span, span_end - span, problem.scale, scratch.gains)
        if not problem.folded:
            _score_direct(rows, problem, keys, batch, head, first_row, span, span_end, scratch)
        start = span
        while start < span_end:
            here, stop = _block_end(problem, start, span_end)
            if here != block:
                block = here
                _load_bias(problem, batch, head, first_row, n_rows, block, scratch.bias)
                if problem.folded:
                    _load_query(problem, keys.tables, batch, head, first_row, n_rows, block, scratch.query)
                    _fold(rows, keys.tables, head, scratch.query, scratch.folded)
            out = (start - span) * n_rows
            if problem.folded:
                _score_folded(rows, keys, batch, head, start, stop, scratch.folded, scores, out)
            _scale(rows, scratch.gains, start - span, stop - start, scratch.bias, scores, out)
            if len(problem.offset_bias):
                _add_offset_bias(problem, batch, head, first_row, n_rows, block, start, stop, scores, out)
            start = stop

        if problem.softcap > 0:
            _cap(scores, n_scores, problem.softcap)
        if len(problem.mask):
            _hide_masked(rows, problem, batch, span, span_end, scores)
        if len(problem.first_visible):
            _hide_early(problem, batch, first_row, n_rows, span, span_end, scores)
        store(scores, n_scores, splat(8, -np.inf))
        _move_reference(n_rows, scores, n_scores, histogram, scratch)
        _load_gains(values, batch, head, span, span_end - span, 1.0, scratch.gains)
        _weigh_tokens(rows, n_scores, scratch)
        _count(rows, values, batch, head, span, span_end, scores, histogram)


@njit(cache=True, nogil=True)
def _block_end(problem, start, span_end):
    """The block of token `start`, and where that block or the span ends."""
    if problem.block_tokens == 0:
        return 0, span_end
    block = (start + problem.first_offset) // problem.block_tokens
    return block, min(span_end, (block + 1) * problem.block_tokens - problem.first_offset)


@njit(cache=True, nogil=True)
def _scale(rows, gains, first, n_tokens, bias, scores, out):
    """Scores of one block times gain, plus bias."""
    n_rows = len(rows)
    n_scores = n_tokens * n_rows
    constant = load(8, bias, 0)
    for i in range(0, n_scores // 8 * 8, 8):
        gain = spread(rows, gains, first + i // n_rows)
        store(scores, out + i, fma(load(8, scores, out + i), gain, constant))
    for i in range(n_scores // 8 * 8, n_scores):
        scores[out + i] = scores[out + i] * gains[first + i // n_rows] + bias[i % 8]


@njit(cache=True, nogil=True)
def _add_offset_bias(problem, batch, head, first_row, n_rows, block, start, stop, scores, out):
    scale = np.float32(problem.scale)
    offset = start + problem.first_offset - block * problem.block_tokens
    for r in range(min(n_rows, problem.q - first_row)):
        row = ((batch * problem.h + head) * problem.q + first_row + r) * problem.n + block
        at = row * problem.offset_bias_stride + offset
        for i in range(stop - start):
            scores[out + i * n_rows + r] += scale * problem.offset_bias[at + i]


@njit(cache=True, nogil=True)
def _earliest(problem, batch, first_row, n_rows):
    earliest = problem.t
    for row in range(first_row, min(problem.q, first_row + n_rows)):
        earliest = min(earliest, problem.first_visible[batch * problem.q + row])
    return max(earliest, 0)


@njit(cache=True, nogil=True)
def _load_gains(side, batch, head, first, n_tokens, scale, gains):
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


@njit(cache=True, nogil=True)
def _load_bias(problem, batch, head, first_row, n_rows, block, bias):
    if not len(problem.key_bias):
        return
    for lane in range(8):
        row = first_row + lane % n_rows
        if row < problem.q:
            value = problem.key_bias[((batch * problem.h + head) * problem.q + row) * problem.n + block]
            bias[lane] = value * np.float32(problem.scale)


@njit(cache=True, nogil=True)
def _load_query(problem, tables, batch, head, first_row, n_rows, block, query):
    """q′ as folding reads it: [quad][4][row]; 0 where a quad is padded."""
    left, right = tables.head_quads[head], tables.head_quads[head + 1]
    for r in range(n_rows):
        frame = _frame(problem, batch, head, first_row + r, block)
        for i in range(4 * (right - left)):
            query[i * n_rows + r] = problem.q_frames[frame + tables.column[4 * left + i]]


@njit(cache=True, nogil=True)
def _frame(problem, batch, head, row, block):
    """Where the row of a block begins; rows past the last repeat it."""
    row = (batch * problem.h + head) * problem.q + min(row, problem.q - 1)
    return (row * problem.n + block) * problem.q_frame_stride


@njit(cache=True, nogil=True)
def _fold(rows, tables, head, query, folded):
    """Each entry's product with q′, for every row: [plane][256][row]."""
    n_rows = len(rows)
    first_plane, first_quad = tables.plane_start[head], tables.head_quads[head]
    for plane in range(first_plane, tables.plane_start[head + 1]):
        out = (plane - first_plane) * 256 * n_rows
        for quad in range(tables.plane_quads[plane], tables.plane_end[plane]):
            fresh = quad == tables.plane_quads[plane]
            q = (quad - first_quad) * 4 * n_rows
            column = quad * 1024
            if n_rows == 1:
                a, b, c, d = splat(8, query[q]), splat(8, query[q + 1]), splat(8, query[q + 2]), splat(8, query[q + 3])
                for i in range(0, 256, 8):
                    x = splat(8, 0.0) if fresh else load(8, folded, out + i)
                    x = fma(load(8, tables.columns, column + i), a, x)
                    x = fma(load(8, tables.columns, column + 256 + i), b, x)
                    x = fma(load(8, tables.columns, column + 512 + i), c, x)
                    store(folded, out + i, fma(load(8, tables.columns, column + 768 + i), d, x))
            else:
                e, f = load(rows, query, q), load(rows, query, q + n_rows)
                g, h = load(rows, query, q + 2 * n_rows), load(rows, query, q + 3 * n_rows)
                for i in range(256):
                    at = column + 4 * i
                    y = splat(rows, 0.0) if fresh else load(rows, folded, out + i * n_rows)
                    y = fma(splat(rows, tables.entries[at]), e, y)
                    y = fma(splat(rows, tables.entries[at + 1]), f, y)
                    y = fma(splat(rows, tables.entries[at + 2]), g, y)
                    store(folded, out + i * n_rows, fma(splat(rows, tables.entries[at + 3]), h, y))


@njit(cache=True, nogil=True)
def _score_folded(rows, keys, batch, head, start, stop, folded, scores, out):
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


@njit(cache=True, nogil=True)
def _score_direct(rows, problem, keys, batch, head, first_row, span, span_end, scratch):
    """Scores of a span: a tile of tokens at a time becomes columns of floats, which meet the query of their block."""
    n_rows = len(rows)
    octets = keys.octets
    left, right = octets.head_octets[head], octets.head_octets[head + 1]
    n_columns = octets.n_columns[head]
    stride = scratch.tile.size // (TILE + 8)
    n_vectors = (n_columns + 7) // 8
    for n in range(TILE):
        store(scratch.tile, n * stride + n_columns, splat(8, 0.0))
    start = span
    while start < span_end:
        block, stop = _block_end(problem, start, span_end)
        stop = min(stop, start + TILE)
        address = keys.codes + batch * keys.batch_stride + start
        _decode(octets.entries, octets.plane, octets.column, left, right, address, keys.plane_stride, stop - start,
                stride, scratch.tile)  # fmt: skip
        for r in range(8):
            scratch.frames[r] = _frame(problem, batch, head, first_row + r % n_rows, block)
        _multiply(rows, problem.q_frames, scratch.frames, scratch.tile, stride, n_vectors, stop - start,
                  scratch.scores, (start - span) * n_rows)  # fmt: skip
        start = stop


@njit(cache=True, nogil=True)
def _decode(entries, plane, column, left, right, address, plane_stride, n_tokens, stride, tile):
    """Each plane's entries over the zeros that padded the one before."""
    for octet in range(left, right):
        codes = address + plane[octet] * plane_stride
        table, to = octet * 2048, column[octet]
        for n in range(n_tokens):
            store(tile, n * stride + to, entry(entries, table + 8 * byte(codes + n)))


@njit(cache=True, nogil=True)
def _multiply(rows, query, frames, tile, stride, n_vectors, n_tokens, scores, out):
    """Eight (token, row) sums at once: sum i is of token i // n_rows and row i % n_rows; equal loads become one."""
    n_rows = len(rows)
    per_step = 8 // n_rows
    f, g, h, i = frames[0], frames[1], frames[2], frames[3]
    j, k, o, p = frames[4], frames[5], frames[6], frames[7]
    for n in range(0, n_tokens, per_step):
        zero = splat(8, 0.0)
        s, t, u, v, w, x, y, z = zero, zero, zero, zero, zero, zero, zero, zero
        at = n * stride
        for c in range(0, 8 * n_vectors, 8):
            s = fma(load(8, tile, at + c + 0 // n_rows * stride), load(8, query, f + c), s)
            t = fma(load(8, tile, at + c + 1 // n_rows * stride), load(8, query, g + c), t)
            u = fma(load(8, tile, at + c + 2 // n_rows * stride), load(8, query, h + c), u)
            v = fma(load(8, tile, at + c + 3 // n_rows * stride), load(8, query, i + c), v)
            w = fma(load(8, tile, at + c + 4 // n_rows * stride), load(8, query, j + c), w)
            x = fma(load(8, tile, at + c + 5 // n_rows * stride), load(8, query, k + c), x)
            y = fma(load(8, tile, at + c + 6 // n_rows * stride), load(8, query, o + c), y)
            z = fma(load(8, tile, at + c + 7 // n_rows * stride), load(8, query, p + c), z)
        store(scores, out + n * n_rows, sums_of_eight(s, t, u, v, w, x, y, z))


@njit(cache=True, nogil=True)
def _cap(scores, n_scores, softcap):
    """s becomes c · tanh(s / c) = c − 2c / (e^(2s/c) + 1)."""
    top, inverse, minus_two, one = splat(8, softcap), splat(8, 2 / softcap), splat(8, -2 * softcap), splat(8, 1.0)
    for i in range(0, n_scores, 8):
        shrunk = divide(minus_two, add(exp(mul(load(8, scores, i), inverse)), one))
        store(scores, i, add(top, shrunk))


@njit(cache=True, nogil=True)
def _hide_masked(rows, problem, batch, span, span_end, scores):
    n_rows = len(rows)
    for n in range(span, span_end):
        at = (n - span) * n_rows
        store(scores, at, add(load(rows, scores, at), splat(rows, problem.mask[batch * problem.t + n])))


@njit(cache=True, nogil=True)
def _hide_early(problem, batch, first_row, n_rows, span, span_end, scores):
    for row in range(first_row, min(problem.q, first_row + n_rows)):
        for n in range(span, min(span_end, problem.first_visible[batch * problem.q + row])):
            scores[(n - span) * n_rows + row - first_row] = -np.inf


@njit(cache=True, nogil=True)
def _move_reference(n_rows, scores, n_scores, histogram, scratch):
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


@njit(cache=True, nogil=True)
def _weigh_tokens(rows, n_scores, scratch):
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


@njit(cache=True, nogil=True)
def _count(rows, values, batch, head, span, span_end, weights, histogram):
    """Add each token's weights to the bin of its byte in every plane."""
    n_rows = len(rows)
    low = 255 * n_rows
    first = values.tables.plane_start[head]
    n_planes = values.tables.plane_start[head + 1] - first
    n_tokens = span_end - span
    whole = n_tokens // 4 * 4
    stride = values.plane_stride
    address = values.codes + batch * values.batch_stride + first * stride + span
    for plane in range(0, n_planes // 4 * 4, 4):
        a = address + plane * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        f = plane * 256 * n_rows
        g, h, i = f + 256 * n_rows, f + 512 * n_rows, f + 768 * n_rows
        for n in range(0, whole, 4):
            w, x = four_bytes(a + n) * n_rows, four_bytes(b + n) * n_rows
            y, z = four_bytes(c + n) * n_rows, four_bytes(d + n) * n_rows
            for k in range(4):
                weight = load(rows, weights, (n + k) * n_rows)
                _add_to(rows, histogram, f + ((w >> (8 * k)) & low), weight)
                _add_to(rows, histogram, g + ((x >> (8 * k)) & low), weight)
                _add_to(rows, histogram, h + ((y >> (8 * k)) & low), weight)
                _add_to(rows, histogram, i + ((z >> (8 * k)) & low), weight)
        for n in range(whole, n_tokens):
            weight = load(rows, weights, n * n_rows)
            _add_to(rows, histogram, f + byte(a + n) * n_rows, weight)
            _add_to(rows, histogram, g + byte(b + n) * n_rows, weight)
            _add_to(rows, histogram, h + byte(c + n) * n_rows, weight)
            _add_to(rows, histogram, i + byte(d + n) * n_rows, weight)
    for plane in range(n_planes // 4 * 4, n_planes):
        for n in range(n_tokens):
            at = (plane * 256 + byte(address + plane * stride + n)) * n_rows
            _add_to(rows, histogram, at, load(rows, weights, n * n_rows))


@njit(cache=True, nogil=True)
def _add_to(rows, histogram, at, weight):
    store(histogram, at, add(load(rows, histogram, at), weight))


@njit(cache=True, nogil=True)
def _weigh_entries(rows, tables, head, scratch):
    """Histograms of weights times the tables, for every row: [quad of the head][4][row]."""
    n_rows = len(rows)
    first_plane, first_quad = tables.plane_start[head], tables.head_quads[head]
    histogram, sums, lanes = scratch.histogram, scratch.sums, scratch.lanes
    sums[:] = 0
    for plane in range(first_plane, tables.plane_start[head + 1]):
        bins = (plane - first_plane) * 256 * n_rows
        for quad in range(tables.plane_quads[plane], tables.plane_end[plane]):
            at, out = quad * 1024, (quad - first_quad) * 4 * n_rows
            if n_rows == 1:
                a, b, c, d = splat(8, 0.0), splat(8, 0.0), splat(8, 0.0), splat(8, 0.0)
                for i in range(0, 256, 8):
                    weight = load(8, histogram, bins + i)
                    a = fma(load(8, tables.columns, at + i), weight, a)
                    b = fma(load(8, tables.columns, at + 256 + i), weight, b)
                    c = fma(load(8, tables.columns, at + 512 + i), weight, c)
                    d = fma(load(8, tables.columns, at + 768 + i), weight, d)
                zero = splat(8, 0.0)
                store(lanes, 0, sums_of_eight(a, b, c, d, zero, zero, zero, zero))
                sums[out : out + 4] = lanes[:4]
            else:
                e, f, g, h = splat(rows, 0.0), splat(rows, 0.0), splat(rows, 0.0), splat(rows, 0.0)
                for i in range(256):
                    weights = load(rows, histogram, bins + i * n_rows)
                    e = fma(splat(rows, tables.entries[at + 4 * i]), weights, e)
                    f = fma(splat(rows, tables.entries[at + 4 * i + 1]), weights, f)
                    g = fma(splat(rows, tables.entries[at + 4 * i + 2]), weights, g)
                    h = fma(splat(rows, tables.entries[at + 4 * i + 3]), weights, h)
                store(sums, out, e)
                store(sums, out + n_rows, f)
                store(sums, out + 2 * n_rows, g)
                store(sums, out + 3 * n_rows, h)
