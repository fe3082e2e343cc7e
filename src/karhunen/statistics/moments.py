"""Weighted first and second moments in float64, which add up over batches and machines.

    count = Σ w_n,   sum = Σ w_n x_n,   outer = Σ w_n x_n x_nᵀ

One type serves all that is quadratic: key and value statistics, the query metric (weights: attention), the
activation Gram matrix.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Moments:
    """Moments of vectors in `g` groups of `d` coordinates each."""

    count: Float[Tensor, " g"]
    sum: Float[Tensor, "g d"]
    outer: Float[Tensor, "g d d"]

    @classmethod
    def of(cls, x: Float[Tensor, "g n d"], weight: Float[Tensor, "g n"] | None = None) -> "Moments":
        """Moments of the rows of `x`; `weight` defaults to one each."""
        x = x.double()
        weight = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if weight is None else weight.double()
        weighted = x * weight[..., None]
        return cls(count=weight.sum(-1), sum=weighted.sum(-2), outer=weighted.mT @ x)

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.sum + other.sum, self.outer + other.outer)

    @property
    def mean(self) -> Float[Tensor, "g d"]:
        """Weighted mean of each coordinate."""
        return self.sum / self.count[:, None]

    @property
    def second_moment(self) -> Float[Tensor, "g d d"]:
        """E[x xᵀ], uncentered."""
        return self.outer / self.count[:, None, None]

    @property
    def covariance(self) -> Float[Tensor, "g d d"]:
        """E[(x − mean)(x − mean)ᵀ]."""
        mean = self.mean
        return self.second_moment - mean[:, :, None] * mean[:, None, :]

    def pooled(self) -> "Moments":
        """The groups added up into one."""
        return Moments(self.count.sum(0, True), self.sum.sum(0, True), self.outer.sum(0, True))
