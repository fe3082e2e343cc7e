"""A rotation to the axes along which an error costs most, most costly first; no axis is stretched.

    y = x U,   M = U diag(λ) Uᵀ,   λ decreasing

Source: OSCAR (arXiv:2605.17757): U_Q of the query covariance for keys, of the attended second moment for values.
Unlike the KLT in a metric (klt.py) it stays orthogonal: a Hadamard rotation behind it spreads what is costly evenly.
"""

from dataclasses import dataclass
from typing import final

import torch

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec
from karhunen.transforms.klt import principal_axes
from karhunen.transforms.orthogonal import orthogonal_map


@final
@dataclass(frozen=True)
class MetricAxes(TransformSpec):
    """Eigenvectors of the side's metric; the coordinates as they are where every error costs the same."""

    def fit(self, data: TransformData) -> AffineMap:
        """Signs and order fixed by rule."""
        if data.metric is None:
            return orthogonal_map(torch.eye(data.d, device=data.device).expand(data.g, -1, -1))
        return orthogonal_map(principal_axes(data.metric))
