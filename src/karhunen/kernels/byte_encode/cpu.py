"""Byte encoding on a CPU: eight entries' distances at once, a plane's table in the first-level cache.

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

TILE = 64
"""Tokens coded plane by plane before the next tile: their coefficients and one table stay in the first-level cache."""


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
        left, lanes = np.empty((TILE, c), np.float32), np.empty((2, 8), np.float32)
        _encode(source, quads_of(tables), half_norms, left, lanes, first, max(n_workers, 1), codes.numpy())

    others = [_pool(n_workers).submit(run, first) for first in range(1, n_workers)]
    run(0)
    for other in others:
        other.result()
    return codes


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen-byte-encode")


@njit(cache=True, nogil=True)
def _encode(source, tables, half_norms, left, lanes, first, step, codes):
    """Items first, first + step, … of (batch, head, tile of tokens)."""
    b, h, t = source.shape[:3]
    n_tiles = -(-t // TILE)
    for item in range(first, b * h * n_tiles, step):
        batch, head, begin = item // (h * n_tiles), item // n_tiles % h, item % n_tiles * TILE
        n_tokens = min(TILE, t - begin)
        left[:n_tokens] = source[batch, head, begin : begin + n_tokens]
        for plane in range(tables.plane_start[head], tables.plane_start[head + 1]):
            for n in range(n_tokens):
                code = _nearest(tables, half_norms, plane, left[n], lanes)
                codes[batch, plane, begin + n] = code
                for quad in range(tables.plane_quads[plane], tables.plane_end[plane]):
                    for k in range(4):
                        left[n, tables.coefficient[4 * quad + k]] -= tables.entries[quad * 1024 + 4 * code + k]


@njit(cache=True, nogil=True)
def _nearest(tables, half_norms, plane, x, lanes):
    """The lowest index of the smallest ½‖e‖² − ⟨x, e⟩."""
    start, end = tables.plane_quads[plane], tables.plane_end[plane]
    best, best_group = splat(8, np.inf), splat(8, 0.0)
    for i in range(0, 256, 8):
        distance = load(8, half_norms, plane * 256 + i)
        for quad in range(start, end):
            at = quad * 1024 + i
            for k in range(4):
                term = mul(splat(8, x[tables.coefficient[4 * quad + k]]), load(8, tables.columns, at + 256 * k))
                distance = subtract(distance, term)
        best_group = where_less(distance, best, splat(8, i), best_group)
        best = where_less(distance, best, distance, best)
    distances, groups = lanes[0], lanes[1]
    store(distances, 0, best)
    store(groups, 0, best_group)
    code, smallest = 255, np.float32(np.inf)
    for lane in range(8):
        index = np.int64(groups[lane]) + lane
        if distances[lane] < smallest or (distances[lane] == smallest and index < code):
            smallest, code = distances[lane], index
    return code
