"""Attention to exact tokens on a CPU: the few of a window in one call, which merges them with the coded part."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from numba import cfunc, njit, types
from torch import Tensor

from karhunen.kernels.exact_attention import CodedPart
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import Shape, float_at, record_at, set_float
from karhunen.kernels.scan.exact import dots, mix, scale_by, soften
from karhunen.kernels.scan.tokens import largest
from karhunen.kernels.softmax import Partial
from karhunen.kernels.sources import kept_on_disk, sources

TOLERANCE = 2e-5
"""Against naive in float64, of the largest number compared: a score is a float32 sum of some 100 terms, and a weight
carries its error as a relative one."""

MOST_PIECES = 3
MOST_ROWS = 4
PIECE = 9  # numbers of each: tokens, keys, their strides by row of the batch, head and token, values and theirs
NUMBERS = (
    "batch", "heads", "rows", "d", "e", "query", "query_batch", "query_head", "query_row", "coded_mean",
    "coded_log_sum", "splits", "n_coded", "matrix", "matrix_head", "offset", "scores", "n_scores", "scale", "top",
    "mean", "log_sum",
)  # fmt: skip
PROBLEM = np.dtype([*((name, np.int64) for name in NUMBERS), ("pieces", np.int64, (MOST_PIECES * PIECE,))])
"""Sizes, strides in bytes, and addresses; 0: not there."""


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    return (True, isa.description()) if isa.widths() else (False, "no vector code is written for this processor")


def exact_attention(
    query: Float[Tensor, "b h r d"],
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    coded: CodedPart | None,
    *,
    scale: float,
) -> Partial:
    """As `naive.exact_attention`, in float32. ValueError on more than three pieces, and on shapes that do not fit."""
    if coded is None:
        return attend(query, pieces, scale=scale)
    mean = _flat(coded.partial.mean.detach()).clone()  # it is scaled in place
    log_sum = _flat(coded.partial.log_sum)
    rows, c = query.shape[:3], mean.shape[-1]
    if mean.shape != (*rows, c) or log_sum.shape != rows:
        raise ValueError(
            f"the coded part has means {tuple(mean.shape)} and log-sums {tuple(log_sum.shape)}; {(*rows, c)} and "
            f"{tuple(rows)} are wanted"
        )
    parts = Parts(mean.data_ptr(), log_sum.data_ptr(), 1, c)
    return attend(query, pieces, parts, coded.matrix, coded.offset, scale=scale)


@final
@dataclass(frozen=True)
class Parts:
    """Attention to ranges of the coded tokens, float32: where means [splits b h r c], which are overwritten, and
    log-sums [splits b h r] lie, for the rows of the query that they are merged for."""

    mean: int
    log_sum: int
    n_splits: int
    n_coefficients: int


def attend(
    query: Float[Tensor, "b h r d"],
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    coded: Parts | None = None,
    matrix: Float[Tensor, "h c e"] | None = None,
    offset: Float[Tensor, "h e"] | None = None,
    *,
    scale: float,
) -> Partial:
    """As `exact_attention`, from the parts of the coded tokens and the map from their coefficients to vectors."""
    if not 0 < len(pieces) <= MOST_PIECES:
        raise ValueError(f"{len(pieces)} pieces of exact tokens; 1 and at most {MOST_PIECES} are read in one call")
    b, h, r, d = query.shape
    e = pieces[0][1].shape[-1]
    query = _rows_of(query)
    mean, log_sum = torch.empty(b, h, r, e), torch.empty(b, h, r)
    kept: list[Tensor] = []  # what addresses point to lives until the call is over
    sides: list[int] = []
    n = 0
    for key, value in pieces:
        there = key.shape[2]
        if key.shape != (b, h, there, d) or value.shape != (b, h, there, e):
            raise ValueError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} of a piece do not fit the query "
                f"{tuple(query.shape)}; {(b, h, there, d)} and {(b, h, there, e)} are wanted"
            )
        keys, values = _rows_of(key), _rows_of(value)
        kept += [keys, values]
        n += there
        a, c = keys.stride(), values.stride()
        sides += [there, keys.data_ptr(), 4 * a[0], 4 * a[1], 4 * a[2]]
        sides += [values.data_ptr(), 4 * c[0], 4 * c[1], 4 * c[2]]
    sides += [0] * (PIECE * MOST_PIECES - len(sides))
    numbers = (0,) * 7
    if coded is not None:
        assert matrix is not None and offset is not None, "coded tokens come with their map to vectors"
        c = coded.n_coefficients
        if matrix.shape != (h, c, e) or offset.shape != (h, e):
            raise ValueError(
                f"the map {tuple(matrix.shape)} with offsets {tuple(offset.shape)} does not fit {h} heads of {c} "
                f"coefficients and values of {e}; {(h, c, e)} and {(h, e)} are wanted"
            )
        maps = _flat(matrix), _flat(offset)
        kept += maps
        numbers = (
            coded.mean, coded.log_sum, coded.n_splits, c, maps[0].data_ptr(), 4 * c * e, maps[1].data_ptr()
        )  # fmt: skip
    n_scores = -(-n // 16) * 16
    call = _Call.of(r, MOST_ROWS * n_scores + 32)
    s = query.stride()
    call.run(
        scale,
        (
            b, h, r, d, e, query.data_ptr(), 4 * s[0], 4 * s[1], 4 * s[2], *numbers, call.scratch_address + 128,
            n_scores, call.scratch_address, call.scratch_address + 4, mean.data_ptr(), log_sum.data_ptr(), *sides,
        ),
    )  # fmt: skip
    return Partial(mean, log_sum)


def _rows_of(x: Tensor) -> Tensor:
    """float32, the numbers of a vector side by side."""
    x = x if x.dtype == torch.float32 else x.detach().float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.detach().contiguous()


def _flat(x: Tensor) -> Tensor:
    """float32, contiguous."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.detach().float().contiguous()


@final
class _Call:
    """A thread's standing call for so many rows: its record, its memory, its compiled functions."""

    def __init__(self, n_rows: int, n_scratch: int) -> None:
        self.scratch = np.empty(n_scratch, np.float32)
        self.scratch_address = self.scratch.ctypes.data
        self._problem = np.zeros(len(NUMBERS) + PIECE * MOST_PIECES, np.int64)
        self._address = self._problem.ctypes.data
        counts = {min(n_rows, MOST_ROWS), n_rows % MOST_ROWS or MOST_ROWS}
        self._functions = [_compiled(Shape(count, isa.widths()[0]).token, sources()).ctypes for count in counts]

    @classmethod
    def of(cls, n_rows: int, n_scratch: int) -> "_Call":
        """Made at a thread's first use, and where it needs more memory."""
        calls: dict[int, _Call] = _kept.__dict__.setdefault("held", {})
        found = calls.get(n_rows)
        if found is None or len(found.scratch) < n_scratch:
            found = calls[n_rows] = cls(n_rows, n_scratch)
        return found

    def run(self, scale: float, numbers: tuple[int, ...]) -> None:
        """Compute what `numbers`, a whole record, says."""
        self.scratch[0] = scale
        self._problem[:] = numbers
        for function in self._functions:
            function(self._address)


_kept = threading.local()


@cache
def _compiled(token: tuple[tuple[int, ...], ...], made_of: str) -> Any:
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @kept_on_disk(cfunc, types.void(types.int64))
    def attend(problem):
        if made_of:
            _attend(token, problem)

    return attend


problem_at = record_at(PROBLEM)


@njit(nogil=True)
def _log_sum(p, row):
    """Of all parts of one row."""
    n, most = p.batch * p.heads * p.rows, -np.inf
    for split in range(p.splits):
        most = max(most, np.float64(float_at(p.coded_log_sum + 4 * (split * n + row))))
    if most == -np.inf:
        return most
    total = 0.0
    for split in range(p.splits):
        total += np.exp(np.float64(float_at(p.coded_log_sum + 4 * (split * n + row))) - most)
    return most + np.log(total)


@njit(nogil=True)
def _gather(p, row, whole):
    """The means of all parts of one row become their share of the whole, in the first part's place."""
    n = p.batch * p.heads * p.rows
    first = p.coded_mean + 4 * row * p.n_coded
    for split in range(p.splits):
        share = np.exp(np.float64(float_at(p.coded_log_sum + 4 * (split * n + row))) - whole)
        mine = p.coded_mean + 4 * (split * n + row) * p.n_coded
        for i in range(p.n_coded):
            held = float_at(first + 4 * i) if split else np.float32(0)
            set_float(first + 4 * i, held + np.float32(share) * float_at(mine + 4 * i))


@njit(nogil=True)
def _attend(shape, address):
    """Chunks of so many rows: scores, softmax, mean; then the coded part's share."""
    p, n_rows = problem_at(address), len(shape[0])
    pitch, line = 4 * p.n_scores, 4 * p.e
    n_chunks = -(-p.rows // 4)
    for item in range(p.batch * p.heads * n_chunks):
        batch, head, first = item // (p.heads * n_chunks), item // n_chunks % p.heads, item % n_chunks * 4
        if min(4, p.rows - first) != n_rows:
            continue
        query = p.query + batch * p.query_batch + head * p.query_head + first * p.query_row
        n = 0
        for i in range(3):
            piece = p.pieces[9 * i : 9 * i + 9]
            keys = piece[1] + batch * piece[2] + head * piece[3]
            dots(shape, query, p.query_row, keys, piece[4], piece[0], p.d, p.scale, p.scores + 4 * n, pitch)
            n += piece[0]
        out = p.mean + (batch * p.heads * p.rows + head * p.rows + first) * line
        index = (batch * p.heads + head) * p.rows + first
        for row in range(n_rows):
            for i in range(n, p.n_scores):
                set_float(p.scores + row * pitch + 4 * i, np.float32(-np.inf))
            for i in range(p.e):
                set_float(out + row * line + 4 * i, np.float32(0))
        for row in range(n_rows):
            largest(shape, p.scores + row * pitch, p.n_scores, p.top)
            top = float_at(p.top)
            if n == 0:
                set_float(p.top, np.float32(0))
            soften(shape, p.scores + row * pitch, p.n_scores, p.top, p.top + 4)
            total = np.float64(float_at(p.top + 4))
            whole = top + np.log(total) if total > 0 else -np.inf
            exact, part = 1.0 / total if total > 0 else 0.0, 0.0
            if p.coded_log_sum:
                coded = _log_sum(p, index + row)
                most = max(whole, coded)
                if most > -np.inf:
                    merged = most + np.log(np.exp(whole - most) + np.exp(coded - most))
                    exact *= np.exp(whole - merged)
                    part = np.exp(coded - merged)
                    whole = merged
            set_float(p.log_sum + 4 * (index + row), np.float32(whole))
            set_float(p.top, np.float32(exact))
            scale_by(shape, p.scores + row * pitch, p.n_scores, p.top)
            set_float(p.top + 8 + 4 * row, np.float32(part))
            if part > 0:
                _gather(p, index + row, whole)
        n = 0
        for i in range(3):
            piece = p.pieces[9 * i : 9 * i + 9]
            values = piece[5] + batch * piece[6] + head * piece[7]
            mix(shape, p.scores + 4 * n, pitch, values, piece[8], piece[0], p.e, out, line)
            n += piece[0]
        if p.coded_log_sum:
            for row in range(n_rows):
                part = float_at(p.top + 8 + 4 * row)
                for i in range(0 if part > 0 else p.n_coded):
                    set_float(p.coded_mean + 4 * ((index + row) * p.n_coded + i), np.float32(0))
                for i in range(p.e):
                    place = out + row * line + 4 * i
                    set_float(place, float_at(place) + part * float_at(p.offset + 4 * (head * p.e + i)))
            mix(
                shape, p.coded_mean + 4 * index * p.n_coded, 4 * p.n_coded, p.matrix + head * p.matrix_head, line,
                p.n_coded, p.e, out, line,
            )  # fmt: skip
