"""Every coordinate over the square root of its largest magnitude in the calibration text.

    y_i = x_i / √(max_t |x_ti|)

Source: InnerQ (arXiv:2602.23200), "per-channel normalization of the key cache", from the prompt's keys. Here: from
calibration's, so that every token is coded alike whenever it comes; a coordinate that is always 0 keeps its unit.
"""

from dataclasses import dataclass, replace
from typing import final

import torch

from karhunen.statistics.need import Need
from karhunen.statistics.samples import Samples
from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec

LEAST = 1e-6  # of the largest peak: a coordinate far below can still be undone in float32


@final
@dataclass(frozen=True)
class PeakScale(TransformSpec):
    """One factor for each coordinate of a head group."""

    def needs(self, about: Need) -> frozenset[Need]:
        """Vectors as they are."""
        return frozenset({replace(about, kind="samples")})

    def fit(self, data: TransformData) -> AffineMap:
        """The factors."""
        vectors = data.require(replace(data.about, kind="samples"), Samples).vectors.double()
        peak = vectors.abs().amax(-2)  # [g d]
        peak = torch.where(peak > 0, peak.clamp_min(LEAST * float(peak.max())), 1.0)
        scale = peak.sqrt()
        zeros = torch.zeros_like(peak, dtype=torch.float32)
        return AffineMap(zeros, (1 / scale).diag_embed().float(), scale.diag_embed().float())
