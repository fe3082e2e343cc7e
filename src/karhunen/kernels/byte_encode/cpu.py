"""Byte encoding on a CPU: a tile of tokens at a time, plane by plane, all of its tokens against an entry at once."""

from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numba import cfunc, njit, types
from torch import Tensor

from karhunen.kernels.byte_encode.naive import require_agreement
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.scan import isa
from karhunen.kernels.scan.emit import Shape, byte_at, claim, float_at, int_at, record_at, set_byte, set_float
from karhunen.kernels.scan.search import TILE, nearest_entries
from karhunen.kernels.sources import kept_on_disk, sources
from karhunen.kernels.threads import run_together

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "batch", "heads", "tokens", "coefficients", "planes", "source", "codes", "plane_start", "column_start",
            "column", "entries", "half_norms", "refined", "scratch", "scratch_bytes", "items", "next_worker",
            "next_item",
        )
    ]
)  # fmt: skip
"""Sizes, addresses, and what workers claim."""


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    return (True, isa.description()) if isa.widths() else (False, "no vector code is written for this processor")


def byte_encode(
    coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, n_threads: int | None = None
) -> UInt8[Tensor, "b s t"]:
    """As `naive.byte_encode`, byte for byte. `n_threads`: torch's own number if None."""
    require_agreement(coefficients, tables)
    b, h, t, c = coefficients.shape
    source = coefficients.detach().float().contiguous()
    codes = torch.empty(b, tables.n_planes, t, dtype=torch.uint8)
    if not codes.numel():
        return codes
    laid_out = _SearchTables.of(tables)
    n_items = b * h * -(-t // TILE)
    n_workers = max(1, min(n_threads or torch.get_num_threads(), n_items))
    scratch_bytes = 4 * TILE * c + 2 * TILE
    scratch = np.empty(n_workers * scratch_bytes, np.uint8)
    arrays = laid_out.arrays()
    job = np.array(
        [
            b, h, t, c, tables.n_planes, source.data_ptr(), codes.data_ptr(), *(x.ctypes.data for x in arrays),
            scratch.ctypes.data, scratch_bytes, n_items, 0, 0,
        ],
        np.int64,
    )  # fmt: skip
    run_together(_compiled_for(isa.widths()[0]), job.ctypes.data, n_workers)
    return codes


@final
@dataclass(frozen=True)
class _SearchTables:
    """Tables as the search reads them: a plane's entries row by row, and whether a later plane codes what it leaves."""

    plane_start: np.ndarray
    column_start: np.ndarray
    column: np.ndarray
    entries: np.ndarray  # float32 [plane][256][columns of the plane]
    half_norms: np.ndarray
    refined: np.ndarray

    @classmethod
    def of(cls, tables: ByteTables) -> "_SearchTables":
        """Made at first use."""
        if "byte_encode" not in tables.prepared:
            planes = [tables.plane(j) for j in range(tables.n_planes)]
            refined = np.zeros(tables.n_planes, np.int64)
            for head in range(tables.n_heads):
                later: set[int] = set()
                for j in reversed(range(tables.plane_start[head], tables.plane_start[head + 1])):
                    mine = set(planes[j][1].tolist())
                    refined[j] = bool(mine & later)
                    later |= mine
            tables.prepared["byte_encode"] = cls(
                np.array(tables.plane_start, np.int64),
                np.array(tables.column_start, np.int64),
                tables.coefficient.long().contiguous().cpu().numpy(),
                np.concatenate([np.zeros(0, np.float32), *(x.float().cpu().numpy().ravel() for x, _ in planes)]),
                tables.half_norms.contiguous().view(-1).cpu().numpy(),
                refined,
            )
        return tables.prepared["byte_encode"]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order of JOB."""
        return self.plane_start, self.column_start, self.column, self.entries, self.half_norms, self.refined


job_at = record_at(JOB)


@njit(nogil=True)
def _load_tile(p, source, n, tile):
    """The coefficients of `n` tokens, each coefficient's side by side; the last token again behind them."""
    for token in range(TILE):
        line = source + 4 * p.coefficients * min(token, n - 1)
        for c in range(p.coefficients):
            set_float(tile + 4 * (c * TILE + token), float_at(line + 4 * c))


@njit(nogil=True)
def _lowest(p, tile, columns, n_columns, entries, half_norms, token):
    """The entry of one token for which the search found none: distances are infinite, or no numbers."""
    code, smallest = 255, np.float32(np.inf)
    for entry in range(256):
        distance = float_at(half_norms + 4 * entry)
        for k in range(n_columns):
            x = float_at(tile + 4 * (int_at(columns + 8 * k) * TILE + token))
            distance = distance - x * float_at(entries + 4 * (entry * n_columns + k))
        if distance < smallest or (distance == smallest and entry < code):
            smallest, code = distance, entry
    return code


@njit(nogil=True)
def _encode_tile(shape, p, batch, head, begin, n, tile):
    found = tile + 4 * TILE * p.coefficients
    _load_tile(p, p.source + 4 * p.coefficients * ((batch * p.heads + head) * p.tokens + begin), n, tile)
    for plane in range(int_at(p.plane_start + 8 * head), int_at(p.plane_start + 8 * head + 8)):
        first = int_at(p.column_start + 8 * plane)
        n_columns = int_at(p.column_start + 8 * plane + 8) - first
        columns, entries, norms = p.column + 8 * first, p.entries + 1024 * first, p.half_norms + 1024 * plane
        nearest_entries(shape, tile, columns, n_columns, entries, norms, found)
        out = p.codes + (batch * p.planes + plane) * p.tokens + begin
        for token in range(n):
            code = byte_at(found + token)
            if byte_at(found + TILE):
                code = _lowest(p, tile, columns, n_columns, entries, norms, token)
            set_byte(out + token, code)
            if int_at(p.refined + 8 * plane):
                for k in range(n_columns):
                    place = tile + 4 * (int_at(columns + 8 * k) * TILE + token)
                    set_float(place, float_at(place) - float_at(entries + 4 * (code * n_columns + k)))


@njit(nogil=True)
def _work(shape, job):
    """Items (batch, head, tile of tokens), one after the other as they are claimed."""
    p = job_at(job)
    tile = p.scratch + claim(job + NEXT_WORKER) * p.scratch_bytes
    n_tiles = -(-p.tokens // TILE)
    while True:
        item = claim(job + NEXT_ITEM)
        if item >= p.items:
            return
        batch, head, begin = item // (p.heads * n_tiles), item // n_tiles % p.heads, item % n_tiles * TILE
        _encode_tile(shape, p, batch, head, begin, min(TILE, p.tokens - begin), tile)


NEXT_WORKER, NEXT_ITEM = (int(JOB.fields[name][1]) for name in ("next_worker", "next_item"))  # type: ignore[index]


@cache
def _compiled_for(width: int) -> Any:
    return _compiled(Shape(1, width).token, sources()).ctypes


def _compiled(token: tuple[tuple[int, ...], ...], made_of: str) -> Any:
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @kept_on_disk(cfunc, types.void(types.int64))
    def encode(job):
        if made_of:
            _work(token, job)

    return encode
