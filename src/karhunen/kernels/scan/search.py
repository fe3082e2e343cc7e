"""The nearest of 256 entries for a tile of tokens at once, token by token in the lanes of vectors.

    byte = the lowest argmin over e of ½‖e‖² − Σ_k x_k e_k

Products are rounded, then subtracted, in the order of the columns: the operations of byte_encode/naive.py alone,
so the bytes are the same. A fused multiply-add would be faster and is not used.
"""

from typing import Any

from llvmlite import ir

from karhunen.kernels.scan.emit import F32, I8, I32, I64, Emitter, Shape, hot

TILE = 64
"""Tokens of a tile: their coefficients and one table stay in the first-level cache."""
NONE = 256  # more than any entry
VECTORS = 4  # of tokens, which share each entry that is loaded


@hot
def nearest_entries(
    e: Emitter, shape: Shape, tile: Any, coefficients: Any, n_columns: Any, entries: Any, half_norms: Any, out: Any
) -> None:
    """One byte for each of TILE tokens to `out`. `tile` is float32 [coefficient][TILE], `coefficients` int64 of each
    column, `entries` float32 [256][n_columns]. The byte behind the last is 1 if some token has no entry at a distance
    below infinity, and the byte of such a token says nothing."""
    lanes = shape.width // 4
    step = lanes * VECTORS
    e.store_one(ir.Constant(I8, 0), e.at(out, TILE))
    far, none = e.constant(F32, lanes, float("inf")), e.constant(I32, lanes, NONE)
    with e.loop(TILE // step) as part:
        first = e.times(part, 4 * step)
        best = [e.variable(far.type, far) for _ in range(VECTORS)]
        chosen = [e.variable(none.type, none) for _ in range(VECTORS)]
        with e.loop(256) as entry:
            start = e.splat(e.load_one(F32, e.at(half_norms, e.times(entry, 4))), lanes)
            distance = [e.variable(start.type, start) for _ in range(VECTORS)]
            row = e.at(entries, e.times(e.times(entry, n_columns), 4))
            with e.loop(n_columns) as k:
                value = e.splat(e.load_one(F32, e.at(row, e.times(k, 4))), lanes)
                line = e.at(tile, first, e.times(e.load_one(I64, e.at(coefficients, e.times(k, 8))), 4 * TILE))
                for v in range(VECTORS):
                    product = e.builder.fmul(e.load(F32, lanes, e.at(line, 4 * lanes * v)), value)
                    distance[v].set(e.builder.fsub(distance[v].get(), product))
            here = e.splat(e.builder.trunc(entry, I32), lanes)
            for v in range(VECTORS):
                nearer = e.builder.fcmp_ordered("<", distance[v].get(), best[v].get())
                best[v].set(e.builder.select(nearer, distance[v].get(), best[v].get()))
                chosen[v].set(e.builder.select(nearer, here, chosen[v].get()))
        for v in range(VECTORS):
            narrow = e.builder.trunc(chosen[v].get(), e.constant(I8, lanes, 0).type)
            e.store(narrow, e.at(out, e.times(part, step), lanes * v))
            lost = e.reduce("umax", chosen[v].get())
            with e.builder.if_then(e.builder.icmp_unsigned("==", lost, ir.Constant(I32, NONE)), likely=False):
                e.store_one(ir.Constant(I8, 1), e.at(out, TILE))
