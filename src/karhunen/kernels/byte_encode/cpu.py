"""Byte encoding on a CPU: eight entries' distances to four tokens at once, a plane's table in the first-level cache.

The operations and their order are those of `naive.py` (multiply, round, subtract, round), so the bytes are the same;
a fused multiply-add would be faster and is not used.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numba import njit
from torch import Tensor

from karhunen.kernels import simd
from karhunen.kernels.byte_encode.naive import require_agreement
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.quads import quads_of
from karhunen.kernels.simd import load, mul, splat, store, subtract, where_less
from karhunen.kernels.sources import sources

TILE = 64
"""Tokens coded plane by plane before the next tile: their coefficients and one table stay in the first-level cache."""

TOKENS = 4
"""Tokens that meet eight entries at once: a column is loaded for all of them."""


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    return simd.host_support()


def byte_encode(
    coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, n_threads: int | None = None
) -> UInt8[Tensor, "b s t"]:
    """As `naive.byte_encode`, byte for byte. `n_threads`: torch's own number if None."""
    require_agreement(coefficients, tables)
    b, h, t, c = coefficients.shape
    source = coefficients.detach().float().contiguous().numpy()
    codes = torch.empty(b, tables.n_planes, t, dtype=torch.uint8)
    if "half_norms" not in tables.prepared:
        tables.prepared["half_norms"] = tables.half_norms.contiguous().view(-1).numpy()
    half_norms = tables.prepared["half_norms"]
    n_items = b * h * -(-t // TILE)
    n_workers = min(n_threads or torch.get_num_threads(), n_items)

    def run(first: int) -> None:
        left, lanes = np.empty((TILE, c), np.float32), np.empty(16 * TOKENS, np.float32)
        quads = quads_of(tables)
        x = np.empty(TOKENS * 4 * quads.most_quads, np.float32)
        _encode(source, quads, half_norms, left, x, lanes, first, max(n_workers, 1), codes.numpy())

    others = [_pool(n_workers).submit(run, first) for first in range(1, n_workers)]
    run(0)
    for other in others:
        other.result()
    return codes


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen-byte-encode")


@njit(nogil=True)
def _nearest(columns, half_norms, plane, start, end, x, lanes):
    """Of four tokens, in each of eight lanes: the smallest ½‖e‖² − ⟨x, e⟩, and which eight entries it is among."""
    far, none = splat(8, np.inf), splat(8, 0.0)
    best_a, best_b, best_c, best_d = far, far, far, far
    group_a, group_b, group_c, group_d = none, none, none, none
    for i in range(0, 256, 8):
        a = load(8, half_norms, plane * 256 + i)
        b, c, d = a, a, a
        for quad in range(start, end):
            at, to = quad * 1024 + i, 4 * TOKENS * (quad - start)
            for k in range(4):
                column = load(8, columns, at + 256 * k)
                a = subtract(a, mul(splat(8, x[to + TOKENS * k]), column))
                b = subtract(b, mul(splat(8, x[to + TOKENS * k + 1]), column))
                c = subtract(c, mul(splat(8, x[to + TOKENS * k + 2]), column))
                d = subtract(d, mul(splat(8, x[to + TOKENS * k + 3]), column))
        here = splat(8, i)
        group_a, best_a = where_less(a, best_a, here, group_a), where_less(a, best_a, a, best_a)
        group_b, best_b = where_less(b, best_b, here, group_b), where_less(b, best_b, b, best_b)
        group_c, best_c = where_less(c, best_c, here, group_c), where_less(c, best_c, c, best_c)
        group_d, best_d = where_less(d, best_d, here, group_d), where_less(d, best_d, d, best_d)
    store(lanes, 0, best_a)
    store(lanes, 8, best_b)
    store(lanes, 16, best_c)
    store(lanes, 24, best_d)
    store(lanes, 32, group_a)
    store(lanes, 40, group_b)
    store(lanes, 48, group_c)
    store(lanes, 56, group_d)


@njit(nogil=True)
def _lowest(lanes, first):
    """The lowest index of the smallest distance of one token; 255 where none is a number."""
    code, smallest = 255, np.float32(np.inf)
    for lane in range(8):
        distance, index = lanes[first + lane], np.int64(lanes[8 * TOKENS + first + lane]) + lane
        if distance < smallest or (distance == smallest and index < code):
            smallest, code = distance, index
    return code


def _compiled(made_of: str):
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @njit(cache=True, nogil=True)
    def _encode(source, tables, half_norms, left, x, lanes, first, step, codes):
        """Items first, first + step, … of (batch, head, tile of tokens)."""
        if not made_of:
            return
        b, h, t = source.shape[:3]
        n_tiles = -(-t // TILE)
        for item in range(first, b * h * n_tiles, step):
            batch, head, begin = item // (h * n_tiles), item // n_tiles % h, item % n_tiles * TILE
            n_tokens = min(TILE, t - begin)
            left[:n_tokens] = source[batch, head, begin : begin + n_tokens]
            for plane in range(tables.plane_start[head], tables.plane_start[head + 1]):
                start, end = tables.plane_quads[plane], tables.plane_end[plane]
                for n in range(0, n_tokens, TOKENS):
                    here = min(TOKENS, n_tokens - n)
                    for i in range(TOKENS):
                        token = n + min(i, here - 1)
                        for k in range(4 * (end - start)):
                            x[TOKENS * k + i] = left[token, tables.coefficient[4 * start + k]]
                    _nearest(tables.columns, half_norms, plane, start, end, x, lanes)
                    for i in range(here):
                        code = _lowest(lanes, 8 * i)
                        codes[batch, plane, begin + n + i] = code
                        for quad in range(start, end):
                            for k in range(4):
                                entry = tables.entries[quad * 1024 + 4 * code + k]
                                left[n + i, tables.coefficient[4 * quad + k]] -= entry

    return _encode


_encode = _compiled(sources())
