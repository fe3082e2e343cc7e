"""A Hadamard rotation of the strongest coefficients; the others stay apart.

    y_{1…r} = x_{1…r} H_r,   y_i = x_i for i > r,   r = ⌈share · d⌉

Source: Palu (arXiv:2407.21118) §3.4: a Hadamard matrix is folded into the low-rank projections, so that the latent has
no outlier coordinate. Here: the latent are the leading coefficients of the transform before; allocation drops the rest.
"""

import math
from dataclasses import dataclass
from typing import final

import torch

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.orthogonal import orthogonal_map
from karhunen.transforms.rotations import hadamard_matrix


@final
@dataclass(frozen=True)
class LeadingHadamard(TransformSpec):
    """Rotates the first `share` of the coefficients."""

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} of the coefficients is not above 0 and at most 1")

    def fit(self, data: TransformData) -> AffineMap:
        """The same matrix for every head group."""
        r = n_leading(self.share, data.d)
        matrix = torch.eye(data.d, dtype=torch.float64, device=data.device)
        matrix[:r, :r] = hadamard_matrix(r).to(data.device)
        return orthogonal_map(matrix.expand(data.g, -1, -1))


def n_leading(share: float, d: int) -> int:
    """How many of `d` coefficients are the leading `share`: rounded up, once, here."""
    return math.ceil(round(share * d, 6))
