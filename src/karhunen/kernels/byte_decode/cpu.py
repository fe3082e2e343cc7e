"""Byte decoding on a CPU: a tile of tokens at a time, coefficient by coefficient, turned over at the end.

    codes [planes t] ─▶ tile [c 64]: each column's 256 entries lie side by side and are read for 64 tokens ─▶ [t c]

Entries in the order of columns would have each byte read another line of memory.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numba import njit
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.sources import kept_on_disk, sources

TILE = 64


def available() -> tuple[bool, str]:
    """Wherever Numba compiles."""
    return True, "Numba"


def byte_decode(
    codes: UInt8[Tensor, "b s t"], tables: ByteTables, *, n_threads: int | None = None
) -> Float[Tensor, "b h t c"]:
    """As `naive.byte_decode`, number for number. `n_threads`: torch's own number if None."""
    b, _, t = codes.shape
    out = torch.empty(b, tables.n_heads, t, tables.n_coefficients)
    if not out.numel():
        return out
    flat = _flat(tables)
    n_items = b * tables.n_heads * -(-t // TILE)
    n_workers = min(n_threads or torch.get_num_threads(), n_items)
    source, target = codes.numpy(), out.numpy()

    def run(first: int) -> None:
        _decode(source, *flat, first, n_workers, np.empty((tables.n_coefficients, TILE), np.float32), target)

    others = [_pool(n_workers).submit(run, first) for first in range(1, n_workers)]
    run(0)
    for other in others:
        other.result()
    return out


def _flat(tables: ByteTables) -> tuple[np.ndarray, ...]:
    if "byte_decode" not in tables.prepared:
        tables.prepared["byte_decode"] = (
            tables.entries.float().T.contiguous().numpy(),
            tables.coefficient.to(torch.int64).contiguous().numpy(),
            np.array(tables.column_start, np.int64),
            np.array(tables.plane_start, np.int64),
        )
    return tables.prepared["byte_decode"]


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, n_workers - 1), thread_name_prefix="karhunen-byte-decode")


def _compiled(made_of: str):
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @kept_on_disk(njit, nogil=True)
    def _decode(codes, entries, coefficient, column_start, plane_start, first, step, tile, out):
        """Items first, first + step, … of (batch, head, tile of tokens)."""
        if not made_of:
            return
        b, h, t, c = out.shape
        n_tiles = -(-t // TILE)
        for item in range(first, b * h * n_tiles, step):
            batch, head, begin = item // (h * n_tiles), item // n_tiles % h, item % n_tiles * TILE
            end = min(begin + TILE, t)
            tile[:] = 0
            for plane in range(plane_start[head], plane_start[head + 1]):
                named = codes[batch, plane, begin:end]
                for column in range(column_start[plane], column_start[plane + 1]):
                    row, meant = tile[coefficient[column]], entries[column]
                    for n in range(end - begin):
                        row[n] += meant[named[n]]
            target = out[batch, head, begin:end]
            for n in range(end - begin):
                for i in range(c):
                    target[n, i] = tile[i, n]

    return _decode


_decode = _compiled(sources())
