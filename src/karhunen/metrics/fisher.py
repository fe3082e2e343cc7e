"""An error costs what it moves the model's own predictions: M = E[g gᵀ], g the gradient of the log-likelihood.

    KL(p ‖ p̂) ≈ ½ Σ_n E[(g_nᵀ δ_n)²],    g_n = ∂ log p(y) / ∂ x_n,  y drawn from p

The Fisher information of the model's output with respect to each cached key and value. Its unit is nats for every
layer, for keys and values alike, so that one water line may run through the whole model: the split between layers,
heads and sides needs no weight of its own. Source: this project; the expansion is Kullback's (Information Theory and
Statistics, 1959, §2.6).
"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.metrics.base import FindMoments, Metric, regularized
from karhunen.statistics.need import Need


@final
@dataclass(frozen=True)
class FisherMetric(Metric):
    """Second moment of the gradients, with a ridge: it comes from a few thousand heavy-tailed gradients, and its weak
    directions are noise (docs/log.md)."""

    ridge: float = 0.1

    def needs(self, about: Need) -> frozenset[Need]:
        """The gradients in the frame of `about`."""
        return frozenset({self._need(about)})

    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"]:
        """E[g gᵀ]."""
        return regularized(find(self._need(about)).second_moment, self.ridge)

    def _need(self, about: Need) -> Need:
        return replace(about, kind="gradients", stride=1)
