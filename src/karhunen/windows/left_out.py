"""Tokens that are kept exact leave the ranges of their block as if they were not there.

    y_n ← mean of the block's other tokens,   for n kept exact

The mean of the others lies inside every range they span, so a range over tokens is the range of the others alone.
Source: OTT (arXiv:2505.10938) §4: outlier tokens are excluded from the quantization groups.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from karhunen.device import on_host


def without(y: Float[Tensor, "b g t c"], left_out: Bool[Tensor, "b t"], block_tokens: int) -> Float[Tensor, "b g t c"]:
    """`y` with the tokens of `left_out` put inside their block; a block of nothing else stays as it is, and so do
    blocks
    of one token."""
    if block_tokens == 1 or (on_host(left_out) and not bool(left_out.any())):
        return y
    blocks = y.unflatten(2, (-1, block_tokens))
    others = ~left_out.unflatten(1, (-1, block_tokens))[:, None, :, :, None]  # [b 1 blocks block 1]
    n = others.sum(3, keepdim=True)
    mean = torch.where(others, blocks, 0.0).sum(3, keepdim=True) / n.clamp_min(1)
    return torch.where(others | (n == 0), blocks, mean).flatten(2, 3)
