"""What an error costs: a positive definite matrix M per head group, distortion = (x − x̂)ᵀ M (x − x̂)."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

FindMoments = Callable[[Need], Moments]
LEAST_SHARE = 1e-9  # of what an error costs in the costliest head group: below it, errors cost nothing
LEAST_LEVEL = 1e-24  # where they cost nothing in any: the square root and its inverse are float32's still


class Metric(ABC):
    """Asks calibration for what it needs and makes the matrix of it. `about` is the need of the coded vectors."""

    @abstractmethod
    def needs(self, about: Need) -> frozenset[Need]:
        """The statistics `matrix` reads."""

    @abstractmethod
    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"] | None:
        """M in float64, or None for the identity."""


def regularized(matrix: Float[Tensor, "g d d"], ridge: float) -> Float[Tensor, "g d d"]:
    """`matrix` plus `ridge` times its mean eigenvalue on the diagonal, so that it can be inverted.

    A head group where errors cost nothing (a pruned head) gets a plain metric of a cost next to nothing.
    """
    d = matrix.shape[-1]
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = level.clamp_min(LEAST_SHARE * float(level.max())).clamp_min(LEAST_LEVEL)
    return matrix + ridge * level[:, None, None] * torch.eye(d, dtype=matrix.dtype, device=matrix.device)


def costs_nothing(moments: Moments) -> Bool[Tensor, " g"]:
    """Head groups where, by what was measured, an error costs nothing: exactly, or beside the costliest of them."""
    level = moments.outer.diagonal(dim1=-2, dim2=-1).mean(-1)
    return level <= LEAST_SHARE * level.max()
