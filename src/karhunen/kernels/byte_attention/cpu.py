"""Attention from bytes on a CPU: look-ups and additions in place of most of the arithmetic.

    keys     F_j[byte] = ⟨q′, table_j[byte]⟩ once per block; a token's score is Σ_j F_j[byte_j]
    values   H_j[byte] += p_n · gain_n, a histogram of attention weight; mean = Σ_byte H_j[byte] · table_j[byte]

All query rows of a KV head (up to 8) lie side by side in one vector, so a look-up or an addition serves the group, and
each byte is read once for it. A pass takes four planes, whose tables stay in the first-level cache. The softmax is
online over spans of tokens; its reference moves only when a score exceeds it by `SLACK`, so the histograms are
hardly ever rescaled. Work is cut by (batch, KV head, rows, tokens); partials of token ranges are merged at the end.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import simd
from karhunen.kernels.byte_attention.cpu_inputs import (
    NO_INDICES,
    NOTHING,
    SPAN,
    Problem,
    flat,
    frames_of,
    row_vectors_of,
    scratch_of,
    side_of,
)
from karhunen.kernels.byte_attention.cpu_loop import attend
from karhunen.kernels.byte_attention.inputs import CodedTokens, require_agreement, row_lanes
from karhunen.kernels.byte_attention.naive import additive
from karhunen.kernels.simd import ROWS
from karhunen.kernels.softmax import Partial, merge_partials

TOLERANCE = 2e-5
"""Of the largest mean or log-sum, against naive in float64: a score is a float32 sum of some 100 terms (error about
1e-6 of their magnitude), and a softmax weight carries the score's absolute error as a relative one."""


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
) -> Partial:
    """As `naive.byte_attention`, in float32. `n_threads`: torch's own number if None."""
    require_agreement(q_frames, keys, values, key_bias, offset_bias, block_tokens, first_offset, mask, first_visible)
    b, h, q, n, c = q_frames.shape
    t, c_value = keys.n_tokens, values.tables.n_coefficients
    n_threads = n_threads or torch.get_num_threads()
    rows = ROWS[min(row_lanes(q), 8)]
    n_chunks = -(-q // len(rows))
    n_splits = token_splits(b * h * n_chunks, t, n_threads)

    key_side, value_side = side_of(keys), side_of(values)
    frames, frame_stride = frames_of(q_frames, keys.tables)
    by_offset, n_bias_rows = (NOTHING, 0) if offset_bias is None else row_vectors_of(offset_bias, len(rows))
    problem = Problem(
        h=h, q=q, t=t, n=n, c=c, c_value=c_value, n_chunks=n_chunks, n_splits=n_splits,
        block_tokens=block_tokens or 0, first_offset=first_offset,
        scale=scale, softcap=softcap or 0.0,
        q_frames=frames,
        q_frame_stride=frame_stride,
        key_bias=NOTHING if key_bias is None else flat(key_bias),
        offset_bias=by_offset,
        offset_bias_rows=n_bias_rows,
        mask=NOTHING if mask is None else flat(additive(mask, torch.float32)),
        first_visible=NO_INDICES if first_visible is None else flat(first_visible, torch.int64),
    )  # fmt: skip
    mean = torch.empty(n_splits, b, h, q, c_value)
    log_sum = torch.empty(n_splits, b, h, q)

    def run(first: int, step: int) -> None:
        scratch = scratch_of(len(rows), key_side.tables, value_side.tables)
        attend(
            rows, problem, key_side, value_side, scratch, first, step, b * h * n_chunks * n_splits,
            mean.view(-1).numpy(), log_sum.view(-1).numpy(),
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


@cache
def _pool(n_workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_workers - 1, thread_name_prefix="karhunen-byte-attention")
