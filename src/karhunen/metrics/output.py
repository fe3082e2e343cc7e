"""A value error costs what it moves the layer's output: M = Σ W_O W_Oᵀ over the group's query heads.

‖(v − v̂) W_O‖² = (v − v̂) W_O W_Oᵀ (v − v̂)ᵀ
"""

from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.metrics.base import FindMoments, Metric, regularized
from karhunen.statistics.need import Need


@final
@dataclass(frozen=True)
class OutputMetric(Metric):
    """Gram matrix of the output projection."""

    ridge: float = 1e-3

    def needs(self, about: Need) -> frozenset[Need]:
        """The Gram matrix of the model's output projection."""
        return frozenset({self._need(about)})

    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"]:
        """Σ W_O W_Oᵀ, with a ridge."""
        return regularized(find(self._need(about)).outer, self.ridge)

    def _need(self, about: Need) -> Need:
        if about.slot != "value":
            raise ValueError("OutputMetric is the cost of a value error; use QueryMetric or Plain for keys")
        plain = replace(about, block_tokens=None, stride=1, skip_tokens=0, quiet_slot=None, quiet_fraction=0.0)
        return replace(plain, kind="output_gram")
