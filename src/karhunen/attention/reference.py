"""Attention to coded tokens, as defined: decode them, then softmax. SPECTRA's Mode A.

k̂, v̂ = decode(bytes);   a_n = softmax_n(scale · qᵀ k̂_n);   output = Σ_n a_n v̂_n,   lse = log Σ_n exp(scale · qᵀ k̂_n)

The logarithm of the sum lets the exact tokens of the window, read apart, be merged in without loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec, Packed


@final
@dataclass(frozen=True)
class Partial:
    """Attention to some of the tokens: their weighted values, and the logarithm of what the weights were divided by."""

    output: Float[Tensor, "b q m e"]
    log_sum: Float[Tensor, "b q m"]


def attend(
    codec: LayerCodec,
    key: Packed,
    value: Packed,
    positions: Int[Tensor, "b t"],
    query: Float[Tensor, "b q m d"],
    scale: float,
) -> Partial:
    """Queries, after RoPE, read every coded token: these have left the window, so all lie in the past."""
    k = codec.key.decode(key, positions).to(query.dtype)
    v = codec.value.decode(value, positions).to(query.dtype)
    grouped = query.unflatten(1, (k.shape[1], -1))  # [b h q m d]
    return weighted(grouped @ k[:, :, None].mT * scale, v[:, :, None])


def weighted(scores: Float[Tensor, "b h q m t"], values: Float[Tensor, "b #h #q t e"]) -> Partial:
    """Softmax over the tokens given, then the weighted sum."""
    return Partial((scores.softmax(-1) @ values).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2))


def merge(parts: Sequence[Partial], sinks: Float[Tensor, " q"] | None = None) -> Float[Tensor, "b q m e"]:
    """Attention to all tokens from that to disjoint sets of them; a learned sink takes its share and gives nothing."""
    log_sums = torch.stack([part.log_sum for part in parts])
    total = log_sums.logsumexp(0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total.dtype)[:, None])
    shares = (log_sums - total).exp()[..., None]
    return (shares * torch.stack([part.output for part in parts])).sum(0)
