"""The coordinates as they are."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.transforms.base import Transform, TransformData, TransformSpec


@final
@dataclass(frozen=True)
class Identity(TransformSpec, Transform):
    """y = x."""

    def fit(self, data: TransformData) -> "Identity":
        """Nothing to fit."""
        return self

    def forward(self, x: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t d"]:
        """x."""
        return x

    def inverse(self, y: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t d"]:
        """y."""
        return y
