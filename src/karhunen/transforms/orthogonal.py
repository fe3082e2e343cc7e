"""A fitted rotation: y = x Q with Q orthogonal, so that the inverse is the transpose and errors keep their size."""

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.transforms.affine_map import AffineMap


def orthogonal_map(matrix: Float[Tensor, "g d d"]) -> AffineMap:
    """The map of a rotation per head group, float32."""
    g, d, _ = matrix.shape
    return AffineMap(
        torch.zeros(g, d, device=matrix.device), matrix.float().contiguous(), matrix.mT.float().contiguous()
    )
