"""Channels by decreasing strength, then a Hadamard rotation over the heads of a group.

    y = x P H,   P sorts the channels of `n_heads` neighbouring heads by E x_i², H over all of them

Source: RotateKV (arXiv:2501.16383): outlier-aware rotation by channel reordering; rotation of grouped heads, which
spreads a channel that is strong in one head over all of them.
Here:   the strength is the calibrated second moment; a group is the largest divisor of the number of heads up to
        `n_heads`, and one head where the frame does not join heads.
"""

from dataclasses import dataclass
from typing import final

import torch

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.orthogonal import orthogonal_map
from karhunen.transforms.rotations import hadamard_matrix


@final
@dataclass(frozen=True)
class ReorderedHadamard(TransformSpec):
    """A rotation over up to `n_heads` heads, strongest channel first."""

    n_heads: int = 4
    needs_moments = True

    def __post_init__(self) -> None:
        if self.n_heads < 1:
            raise ValueError(f"n_heads={self.n_heads} is not a number of heads; use 1 or more")

    def fit(self, data: TransformData) -> AffineMap:
        """One order for each group of heads."""
        n_heads = max(k for k in range(1, self.n_heads + 1) if data.n_heads % k == 0)
        size = data.d // data.n_heads * n_heads
        strength = data.require_moments().second_moment.diagonal(dim1=-2, dim2=-1).unflatten(-1, (-1, size))
        order = strength.sort(dim=-1, descending=True, stable=True).indices  # [g groups size]
        sort = torch.eye(size, dtype=torch.float64, device=data.device)[order].mT  # [g groups size size]
        blocks = sort @ hadamard_matrix(size).to(data.device)
        return orthogonal_map(torch.stack([torch.block_diag(*head) for head in blocks]))
