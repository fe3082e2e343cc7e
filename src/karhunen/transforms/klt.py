"""The Karhunen–Loève transform in a metric: uncorrelated coefficients whose squared error is the cost.

    y = (x − μ) M^½ E,   E the eigenvectors of M^½ Σ M^½, largest first;    x = y Eᵀ M^{−½} + μ
    ‖y − ŷ‖² = (x − x̂)ᵀ M (x − x̂)

Source: NOVA-KV (arXiv:2608.04074), the generalised Parseval relation; M = I is the ordinary KLT, and with joined
heads, no centering and the pre-RoPE frame it spans SPECTRA's latent (arXiv:2608.07915).
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.transforms.affine_map import AffineMap
from karhunen.transforms.base import TransformData, TransformSpec


@final
@dataclass(frozen=True)
class KLT(TransformSpec):
    """Principal axes of the vectors in the side's metric; `center` takes the mean away first."""

    center: bool = True
    needs_moments = True

    def fit(self, data: TransformData) -> AffineMap:
        """Axes by decreasing variance, signs fixed by rule."""
        moments = data.require_moments()
        mean = moments.mean if self.center else torch.zeros_like(moments.mean)
        spread = moments.covariance if self.center else moments.second_moment
        if data.metric is None:
            basis = principal_axes(spread)
            return AffineMap(mean.float(), basis.float().contiguous(), basis.mT.float().contiguous())
        root, inverse_root = square_root(data.metric)
        basis = principal_axes(root @ spread @ root)
        return AffineMap(mean.float(), (root @ basis).float(), (basis.mT @ inverse_root).float())


def principal_axes(covariance: Float[Tensor, "g d d"]) -> Float[Tensor, "g d d"]:
    """Eigenvectors as columns, largest eigenvalue first; each column's largest entry is positive."""
    _, columns = torch.linalg.eigh(covariance.double())
    columns = columns.flip(-1)
    pivot = columns.gather(-2, columns.abs().argmax(-2, keepdim=True))
    return columns * pivot.sign()


def square_root(metric: Float[Tensor, "g d d"]) -> tuple[Float[Tensor, "g d d"], Float[Tensor, "g d d"]]:
    """M^½ and M^{−½} of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(metric.double())
    root = values.clamp_min(values[:, -1:] * 1e-12).sqrt()[:, None]
    return vectors * root @ vectors.mT, vectors / root @ vectors.mT
