"""The definition: softmax over the exact tokens, then the weighted mean of that and the coded part."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.kernels.exact_attention import CodedPart
from karhunen.kernels.softmax import Partial, attended, merge_partials


def exact_attention(
    query: Float[Tensor, "b h r d"],
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    coded: CodedPart | None,
    *,
    scale: float,
) -> Partial:
    """In the dtype of `query`."""
    key, value = (torch.cat([piece[i] for piece in pieces], dim=2).to(query.dtype) for i in (0, 1))
    exact = attended(query @ key.mT * scale, value)
    if coded is None:
        return exact
    vectors = coded.partial.mean.to(query.dtype) @ coded.matrix.to(query.dtype) + coded.offset.to(query.dtype)[:, None]
    return merge_partials([exact, Partial(vectors, coded.partial.log_sum.to(query.dtype))])
