"""Every coordinate of the frame costs the same: mean squared error."""

from dataclasses import dataclass
from typing import final

from karhunen.metrics.base import FindMoments, Metric
from karhunen.statistics.need import Need


@final
@dataclass(frozen=True)
class Plain(Metric):
    """M = I."""

    def needs(self, about: Need) -> frozenset[Need]:
        """Nothing."""
        return frozenset()

    def matrix(self, about: Need, find: FindMoments) -> None:
        """The identity."""
