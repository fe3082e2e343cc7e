"""Every coordinate in the unit in which its error costs one: y_i = √M_ii x_i.

    Σ_i (y_i − ŷ_i)² = Σ_i M_ii (x_i − x̂_i)²

Source: KVQuant (arXiv:2401.18079) §3.2 weighs the error of each element with its Fisher information (diagonal); in
these units a plain k-means is that weighted one.
"""

from dataclasses import dataclass
from typing import final

import torch

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec

NOTHING = 1e-20  # what errors cost where they cost nothing at all: ranges in such a unit would vanish in float16
LEAST_SHARE = 1e-6  # of the mean cost: a coordinate that costs nothing keeps a scale that can be undone


@final
@dataclass(frozen=True)
class MetricScale(TransformSpec):
    """The square roots of the metric's diagonal, and no rotation."""

    def fit(self, data: TransformData) -> AffineMap:
        """One factor per coordinate; 1 where every error costs the same, or none anything."""
        cost = torch.ones(data.g, data.d, dtype=torch.float64, device=data.device)
        if data.metric is not None:
            cost = data.metric.diagonal(dim1=-2, dim2=-1).double()
            if float(cost.mean()) < NOTHING:
                cost = torch.ones_like(cost)
        scale = cost.clamp_min(LEAST_SHARE * float(cost.mean())).sqrt()
        return AffineMap(
            cost.new_zeros(data.g, data.d, dtype=torch.float32),
            scale.diag_embed().float(),
            (1 / scale).diag_embed().float(),
        )
