"""What an error costs: a positive definite matrix M per head group, distortion = (x − x̂)ᵀ M (x − x̂)."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need

FindMoments = Callable[[Need], Moments]


class Metric(ABC):
    """Asks calibration for what it needs and makes the matrix of it. `about` is the need of the coded vectors."""

    @abstractmethod
    def needs(self, about: Need) -> frozenset[Need]:
        """The statistics `matrix` reads."""

    @abstractmethod
    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"] | None:
        """M in float64, or None for the identity."""


def regularized(matrix: Float[Tensor, "g d d"], ridge: float) -> Float[Tensor, "g d d"]:
    """`matrix` plus `ridge` times its mean eigenvalue on the diagonal, so that it can be inverted."""
    d = matrix.shape[-1]
    level = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return matrix + ridge * level[:, None, None] * torch.eye(d, dtype=matrix.dtype)
