"""Which transform for keys when several query heads read one key head: three structures at equal bytes.

D = Σ_j E (q_jᵀ(k − k̂))² ÷ Σ_j E (q_jᵀ(k − μ))²,   j over the query heads of a layer

    per KV head      T of Σ_j M_j over the heads that read it (NOVA-KV, arXiv:2608.04074)
    per layer        one T for all KV heads, of the mean covariance and the mean metric
    per query head   T of M_j alone: as many coded copies of a key as heads read it, each at its share of the bits
    plain            T of the covariance alone, per KV head

Keys are taken as Gaussian and each coefficient as coded at the rate–distortion bound (reverse water-filling at `bits` a
coefficient), so that structures are compared and not quantizers.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.water_filling import ideal_bits
from karhunen.metrics.base import regularized
from karhunen.transforms.klt import principal_axes, square_root

RIDGE = 1e-3


def structures(covariance: Float[Tensor, "h d d"], metrics: Float[Tensor, "h q d d"], bits: float) -> dict[str, float]:
    """D of each structure for one layer, from the covariance of each key head and the second moment of the queries of
    each query head that reads it."""
    h, q, d, _ = metrics.shape
    pooled = metrics.sum(1)
    spread = float((pooled * covariance).sum())
    shared = torch.stack([axes_of(covariance.mean(0), pooled.mean(0))] * h)
    own = torch.stack([axes_of(covariance[i], pooled[i]) for i in range(h)])
    bare = torch.stack(
        [axes_of(covariance[i], torch.eye(d, dtype=torch.float64, device=covariance.device)) for i in range(h)]
    )
    copies = [
        distortion(covariance[i], axes_of(covariance[i], metrics[i, j]), metrics[i, j], bits / q)
        for i in range(h)
        for j in range(q)
    ]
    found = {
        name: sum(distortion(covariance[i], axes[i], pooled[i], bits) for i in range(h)) / spread
        for name, axes in (("per KV head", own), ("per layer", shared), ("plain", bare))
    }
    return {**found, "per query head": sum(copies) / spread}


def axes_of(covariance: Float[Tensor, "d d"], metric: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """The matrix A of y = (k − μ) A: the KLT in the metric."""
    root, _ = square_root(regularized(metric[None], RIDGE))
    return (root @ principal_axes(root @ covariance[None].double() @ root))[0]


def distortion(
    covariance: Float[Tensor, "d d"], axes: Float[Tensor, "d d"], metric: Float[Tensor, "d d"], bits: float
) -> float:
    """Expected squared logit error of readers with `metric`, coefficients coded one by one at the bound."""
    variance = (axes * (covariance.double() @ axes)).sum(0).clamp_min(1e-30)
    ones = torch.ones_like(variance)
    rate = ideal_bits(variance, ones, 0 * ones, 24 * ones, bits * len(ones))
    error = variance * (-2 * rate).exp2()
    inverse = torch.linalg.inv(axes)
    return float((error * (inverse * (inverse @ metric.double())).sum(1)).sum())
