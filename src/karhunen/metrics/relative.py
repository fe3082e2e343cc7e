"""An error costs its share of what coding nothing would cost, so that one budget may serve layers and sides whose own
units say nothing of each other: M / tr(M Σ), Σ the covariance of the vectors, both summed over the head groups.

Source: the normalised distortion of a rate–distortion bound; here so that a score's error and an output's compare.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.metrics.base import FindMoments, Metric
from karhunen.statistics.need import Need


@final
@dataclass(frozen=True)
class Relative(Metric):
    """`of`, scaled for each layer and side."""

    of: Metric

    def needs(self, about: Need) -> frozenset[Need]:
        """What the metric needs, and the moments of the vectors."""
        return self.of.needs(about) | {about}

    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"]:
        """M of cost 1 for coding nothing but the mean."""
        spread = find(about).covariance
        matrix = self.of.matrix(about, find)
        if matrix is None:
            matrix = torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device).expand_as(spread)
        cost = (matrix * spread).sum()
        if float(cost) <= 0:  # the vectors do not move, so their coding costs nothing in any unit
            cost = matrix.diagonal(dim1=-2, dim2=-1).sum()
        return matrix / cost
