"""The attention that the newest tokens pay to each token held, group by group of query heads.

    a_mn = softmax_n(scale · q_mᵀ k_n),   n ≤ m;   soft-capped, and shared with a learned sink, where the model does so

Summed over blocks of queries, so that no table of all pairs exists at once.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from karhunen.kernels.softmax import attention_weights, capped, causal
from karhunen.windows.score import Queries

BLOCK_ROWS = 256  # queries whose weights exist at a time


def weight_blocks(
    queries: Queries,
    key: Float[Tensor, "b h t d"],
    n_rows: int | None = None,
    unseen: Bool[Tensor, "b t"] | None = None,
    block_rows: int = BLOCK_ROWS,
) -> Iterator[Float[Tensor, "b h q m t"]]:
    """Weights of the last `n_rows` queries (None: of all), `block_rows` at a time; the last query sees all keys but
    the `unseen`."""
    t, n_queries = key.shape[2], queries.rows.shape[2]
    first = n_queries - min(n_queries, n_queries if n_rows is None else n_rows)
    for start in range(first, n_queries, block_rows):
        rows = queries.rows[:, :, start : min(start + block_rows, n_queries)]
        newest_visible = t - n_queries + start + torch.arange(rows.shape[2], device=key.device)
        yield _weights(queries, rows, key, newest_visible, unseen)


def _weights(
    queries: Queries, rows: Tensor, key: Tensor, newest_visible: Tensor, unseen: Tensor | None
) -> Float[Tensor, "b h q m t"]:
    grouped = rows.float().unflatten(1, (key.shape[1], -1))  # [b h q m d]
    scores = capped(grouped @ key.float()[:, :, None].mT * queries.scale, queries.softcap)
    seen = causal(newest_visible, torch.arange(key.shape[2], device=key.device))
    scores = scores.masked_fill(~seen, -torch.inf)
    if unseen is not None:
        scores = scores.masked_fill(unseen[:, None, None, None], torch.finfo(scores.dtype).min)
    return attention_weights(
        scores, None if queries.sinks is None else queries.sinks.unflatten(0, (key.shape[1], -1))[..., None]
    )
