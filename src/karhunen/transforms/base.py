"""Which axes: a `TransformSpec` is what was asked for, a `Transform` what calibration made of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.moments import Moments


class Transform(ABC):
    """A fitted change of coordinates, per head group; works in float64 so that no batch shape changes a byte."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t c"]:
        """Frame coordinates to coefficients."""

    @abstractmethod
    def inverse(self, y: Float[Tensor, "*b g t c"]) -> Float[Tensor, "*b g t d"]:
        """Coefficients to frame coordinates."""


@final
@dataclass(frozen=True)
class TransformData:
    """What a transform may look at: the size, the moments of the vectors if gathered, and the cost metric."""

    g: int
    d: int
    moments: Moments | None = None
    metric: Float[Tensor, "g d d"] | None = None

    def require_moments(self) -> Moments:
        """The moments; ValueError if there are none."""
        if self.moments is None:
            raise ValueError("this transform is fitted to data, but no moments were gathered; calibrate first")
        return self.moments


class TransformSpec(ABC):
    """What was asked for."""

    needs_moments: bool = False

    @abstractmethod
    def fit(self, data: TransformData) -> Transform:
        """The transform for this data."""
