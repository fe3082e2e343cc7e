"""Attention to exact tokens on a CPU: the few of a window in one call, which merges them with the coded part."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from karhunen.kernels import simd
from karhunen.kernels.byte_attention.inputs import Partial
from karhunen.kernels.exact_attention import CodedPart
from karhunen.kernels.simd import fma, load, splat, store, sums_of_eight
from karhunen.kernels.sources import sources

TOLERANCE = 2e-5
"""Of the largest mean or log-sum, against naive in float64: a score is a float32 sum of some 100 terms."""

MOST_PIECES = 3


def available() -> tuple[bool, str]:
    """Whether this processor has what the vector code uses, and what that is."""
    return simd.host_support()


def exact_attention(
    query: Float[Tensor, "b h r d"],
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    coded: CodedPart | None,
    *,
    scale: float,
) -> Partial:
    """As `naive.exact_attention`, in float32. ValueError on more than three pieces."""
    if len(pieces) > MOST_PIECES:
        raise ValueError(f"{len(pieces)} pieces of exact tokens; at most {MOST_PIECES} are read in one call")
    b, h, r, _ = query.shape
    e = pieces[0][1].shape[-1]
    mean, log_sum = torch.empty(b, h, r, e), torch.empty(b, h, r)
    given = tuple(_piece(*piece) for piece in pieces)
    given += (given[0]._replace(n=0),) * (MOST_PIECES - len(given))
    if coded is None:
        part = np.zeros((0, 0, 0, 0), np.float32), np.zeros((0, 0, 0), np.float32)
        maps = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.float32)
    else:
        part = _numpy(coded.partial.mean), _numpy(coded.partial.log_sum)
        maps = _numpy(coded.matrix), _numpy(coded.offset)
    scores = np.empty(sum(piece.n for piece in given) + 8, np.float32)
    _attend(_numpy(query), given, *part, *maps, scale, scores, mean.numpy(), log_sum.numpy())
    return Partial(mean, log_sum)


class _Piece(NamedTuple):
    """Some tokens; where a vector begins: batch, head and token times their strides, in floats."""

    n: int
    key: np.ndarray
    key_strides: tuple[int, int, int]
    value: np.ndarray
    value_strides: tuple[int, int, int]


def _piece(key: Tensor, value: Tensor) -> _Piece:
    return _Piece(key.shape[2], *_strided(key), *_strided(value))


def _strided(x: Tensor) -> tuple[np.ndarray, tuple[int, int, int]]:
    x = x.detach().float()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    length = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((length,), (1,)).numpy(), (x.stride(0), x.stride(1), x.stride(2))


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().float().contiguous().numpy()


@njit(nogil=True)
def _score(query, at, d, piece, batch, head, scale, scores, out):
    """Scores of one row and all tokens of a piece, eight tokens at a time; past the last it is read again."""
    last = piece.n - 1
    begin = batch * piece.key_strides[0] + head * piece.key_strides[1]
    step = piece.key_strides[2]
    whole = d // 8 * 8
    key = piece.key
    for n in range(0, piece.n, 8):
        f, g = begin + n * step, begin + min(n + 1, last) * step
        h, i = begin + min(n + 2, last) * step, begin + min(n + 3, last) * step
        j, k = begin + min(n + 4, last) * step, begin + min(n + 5, last) * step
        o, p = begin + min(n + 6, last) * step, begin + min(n + 7, last) * step
        zero = splat(8, 0.0)
        s, t, u, v, w, x, y, z = zero, zero, zero, zero, zero, zero, zero, zero
        for c in range(0, whole, 8):
            q = load(8, query, at + c)
            s, t = fma(load(8, key, f + c), q, s), fma(load(8, key, g + c), q, t)
            u, v = fma(load(8, key, h + c), q, u), fma(load(8, key, i + c), q, v)
            w, x = fma(load(8, key, j + c), q, w), fma(load(8, key, k + c), q, x)
            y, z = fma(load(8, key, o + c), q, y), fma(load(8, key, p + c), q, z)
        store(scores, out + n, sums_of_eight(s, t, u, v, w, x, y, z))
        for token in range(n, min(n + 8, piece.n)):
            total = scores[out + token]
            for c in range(whole, d):
                total += query[at + c] * key[begin + token * step + c]
            scores[out + token] = total * np.float32(scale)


@njit(nogil=True)
def _add_values(piece, batch, head, weights, first, mean):
    begin = batch * piece.value_strides[0] + head * piece.value_strides[1]
    for n in range(piece.n):
        at = begin + n * piece.value_strides[2]
        weight = weights[first + n]
        for c in range(len(mean)):
            mean[c] += weight * piece.value[at + c]


def _compiled(made_of: str):
    """Kept on disk for these sources (karhunen.kernels.sources)."""

    @njit(cache=True, nogil=True)
    def _attend(query, pieces, coded_mean, coded_log_sum, matrix, offset, scale, scores, mean, log_sum):
        """Row by row: scores, softmax, mean; then the coded part's share."""
        if not made_of:
            return
        n_batch, n_heads, n_rows, d = query.shape
        flat = query.reshape(-1)
        a, b, c = pieces
        n = a.n + b.n + c.n
        for item in range(n_batch * n_heads * n_rows):
            batch, head, row = item // (n_heads * n_rows), item // n_rows % n_heads, item % n_rows
            _score(flat, item * d, d, a, batch, head, scale, scores, 0)
            _score(flat, item * d, d, b, batch, head, scale, scores, a.n)
            _score(flat, item * d, d, c, batch, head, scale, scores, a.n + b.n)
            largest = np.float32(-np.inf)
            for i in range(n):
                largest = max(largest, scores[i])
            total = 0.0
            for i in range(n):
                scores[i] = np.exp(scores[i] - largest)
                total += scores[i]
            out = mean[batch, head, row]
            out[:] = 0
            _add_values(a, batch, head, scores, 0, out)
            _add_values(b, batch, head, scores, a.n, out)
            _add_values(c, batch, head, scores, a.n + b.n, out)
            whole = largest + np.log(total) if n else -np.inf
            share = 1 / total if n else 0.0
            if coded_log_sum.size:
                exact, coded = whole, np.float64(coded_log_sum[batch, head, row])
                top = max(exact, coded)
                if top > -np.inf:
                    whole = top + np.log(np.exp(exact - top) + np.exp(coded - top))
                    share *= np.exp(exact - whole)
                    part = np.float32(np.exp(coded - whole))
                    for k in range(len(out)):
                        out[k] = out[k] * np.float32(share) + part * offset[head, k]
                    for i in range(matrix.shape[1]):
                        x = part * coded_mean[batch, head, row, i]
                        for k in range(len(out)):
                            out[k] += x * matrix[head, i, k]
                    share = 1.0
            for k in range(len(out)):
                out[k] *= np.float32(share)
            log_sum[batch, head, row] = whole

    return _attend


_attend = _compiled(sources())
