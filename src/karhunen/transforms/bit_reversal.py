"""Neighbours are dealt far apart: coordinate i goes where the reversed binary digits of i say.

    y_{rev(i)} = x_i

Source: the P of OSCAR (arXiv:2605.17757). Hadamard coefficients come in the order of their sequences, neighbours share
sign patterns; reversal gives each quantization group a bit of everything.
Here:   any size: coordinates in the order of the reversed digits of their index, as many digits as the size needs.
"""

from dataclasses import dataclass
from typing import final

import torch

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.orthogonal import orthogonal_map


@final
@dataclass(frozen=True)
class BitReversal(TransformSpec):
    """A permutation, the same for every head group."""

    def fit(self, data: TransformData) -> AffineMap:
        """Nothing is learned."""
        return orthogonal_map(torch.eye(data.d, device=data.device)[:, reversed_order(data.d)].expand(data.g, -1, -1))


def reversed_order(d: int) -> list[int]:
    """0 … d − 1 by their digits read backwards: 0 4 2 6 1 5 3 7 for d = 8."""
    n_digits = max(1, (d - 1).bit_length())
    return sorted(range(d), key=lambda i: f"{i:0{n_digits}b}"[::-1])
