"""A Hadamard rotation of each block of neighbouring coordinates, by itself.

    y = x · diag(H_s, H_s, …),   s = `size`, or the largest divisor of d below it

Source: exllamav3's quantized cache, whose groups of 32 are rotated one by one, so that what shares a scale is what was
mixed. Here: any size of head, as `Hadamard`.
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
class BlockHadamard(TransformSpec):
    """Blocks of `size` coordinates, or of the largest divisor of a vector's length below it."""

    size: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size={self.size}: a block has 1 coordinate or more")

    def fit(self, data: TransformData) -> AffineMap:
        """The same matrix for every head group."""
        size = max(k for k in range(1, self.size + 1) if data.d % k == 0)
        matrix = torch.block_diag(*[hadamard_matrix(size)] * (data.d // size)).to(data.device)
        return orthogonal_map(matrix.expand(data.g, -1, -1))
