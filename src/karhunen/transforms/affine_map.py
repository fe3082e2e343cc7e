"""y = (x − μ) A and x = y A⁻¹ + μ: every fitted linear transform, whatever chose its axes."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.transforms.base import Transform


@final
@dataclass(frozen=True)
class AffineMap(Transform):
    """A matrix and its inverse per head group, both stored: neither is computed on load."""

    mean: Float[Tensor, "g d"]
    matrix: Float[Tensor, "g d c"]
    inverse_matrix: Float[Tensor, "g c d"]

    def n_coefficients(self, g: int, d: int) -> int:
        """c, where mean, matrix and inverse are of `g` groups of `d` coordinates; nothing is broadcast."""
        c = self.matrix.shape[-1]
        if (self.mean.shape, self.matrix.shape, self.inverse_matrix.shape) != ((g, d), (g, d, c), (g, c, d)):
            shapes = [tuple(x.shape) for x in (self.mean, self.matrix, self.inverse_matrix)]
            raise ValueError(f"a map of shapes {shapes} does not fit {g} groups of {d} coordinates")
        return c

    def forward(self, x: Float[Tensor, "*b g t d"]) -> Float[Tensor, "*b g t c"]:
        """(x − μ) A."""
        return (x.double() - self.mean[:, None].double()) @ self.matrix.double()

    def inverse(self, y: Float[Tensor, "*b g t c"]) -> Float[Tensor, "*b g t d"]:
        """y A⁻¹ + μ."""
        return (y @ self.inverse_matrix.to(y.dtype)).add_(self.mean[:, None].to(y.dtype))
