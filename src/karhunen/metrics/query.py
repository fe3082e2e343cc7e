"""A key error costs what it moves the scores: M = Σ E[q qᵀ] over the group's query heads, in the key's frame.

    E (qᵀ(k − k̂))² = (k − k̂)ᵀ M (k − k̂)

Source: NOVA-KV (arXiv:2608.04074), the distortion D_K. Here: the query is taken in the key's own frame, once per
(query, key block), and may be weighted by the softmax's sensitivity a(1 − a) instead of counting every pair alike.
"""

from dataclasses import dataclass, replace
from typing import Literal, final

from jaxtyping import Float
from torch import Tensor

from karhunen.metrics.base import FindMoments, Metric, regularized
from karhunen.statistics.need import Need
from karhunen.values import refuse_unless_one_of


@final
@dataclass(frozen=True)
class QueryMetric(Metric):
    """Second moment of the queries that read a key."""

    weighting: Literal["uniform", "attention"] = "uniform"
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        refuse_unless_one_of("weighting", self.weighting, ("uniform", "attention"))

    def needs(self, about: Need) -> frozenset[Need]:
        """The query moments in the frame of `about`."""
        return frozenset({self._need(about)})

    def matrix(self, about: Need, find: FindMoments) -> Float[Tensor, "g d d"]:
        """Σ E[q qᵀ], with a ridge."""
        return regularized(find(self._need(about)).second_moment, self.ridge)

    def _need(self, about: Need) -> Need:
        if about.slot != "key":
            raise ValueError("QueryMetric is the cost of a key error; use OutputMetric or Plain for values")
        return replace(about, kind="queries", weighting=self.weighting, stride=1, quiet_slot=None, quiet_fraction=0.0)
