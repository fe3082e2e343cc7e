"""Which axes: a `TransformSpec` is what was asked for, a `Transform` what calibration made of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.device import HOST, device_of
from karhunen.statistics.moments import Moments
from karhunen.statistics.need import Need, Statistic

S = TypeVar("S", bound=Statistic)


class Transform(ABC):
    """A fitted change of coordinates, per head group; works in float64 so that no batch shape changes a byte."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t c"]:
        """Frame coordinates to coefficients."""

    @abstractmethod
    def inverse(self, y: Float[Tensor, "*b g t c"]) -> Float[Tensor, "*b g t d"]:
        """Coefficients to frame coordinates."""

    def n_coefficients(self, g: int, d: int) -> int:
        """How many coefficients it makes of `d` coordinates of `g` head groups; ValueError if it is not for these."""
        return d


@final
@dataclass(frozen=True)
class TransformData:
    """What a transform may look at: the size, the moments of the vectors if gathered, the cost metric, and the
    statistics that its `needs` named, by need; `n_heads` heads lie side by side in a vector."""

    g: int
    d: int
    moments: Moments | None = None
    metric: Float[Tensor, "g d d"] | None = None
    about: Need = Need("moments", "key")
    measured: Mapping[Need, Statistic] = field(default_factory=dict)
    n_heads: int = 1

    @property
    def device(self) -> torch.device:
        """Where the statistics lie."""
        return device_of((self.moments, self.metric)) or HOST

    def require_moments(self) -> Moments:
        """The moments; ValueError if there are none."""
        if self.moments is None:
            raise ValueError("this transform is fitted to data, but no moments were gathered; calibrate first")
        return self.moments

    def require(self, need: Need, kind: type[S]) -> S:
        """A statistic; ValueError if it was not gathered."""
        found = self.measured.get(need)
        if not isinstance(found, kind):
            raise ValueError(f"this transform needs {need}, which was not gathered; calibrate again with this recipe")
        return found


class TransformSpec(ABC):
    """What was asked for."""

    needs_moments: bool = False

    def needs(self, about: Need) -> frozenset[Need]:
        """The statistics `fit` reads besides the moments of the vectors, `about`."""
        return frozenset()

    @abstractmethod
    def fit(self, data: TransformData) -> Transform:
        """The transform for this data."""
