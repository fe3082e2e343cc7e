"""Vectors kept as they are, for what moments cannot tell: codebooks are trained on them.

Every `stride`-th token of each sequence is kept, so samples of two texts are the samples of their concatenation.
"""

from dataclasses import dataclass
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Samples:
    """`n` sample vectors for each of `g` groups of `d` coordinates, in float32."""

    vectors: Float[Tensor, "g n d"]

    @classmethod
    def of(cls, x: Float[Tensor, "g n d"], stride: int = 1) -> Self:
        """Every `stride`-th row of `x`."""
        return cls(x[:, ::stride].float().clone())

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(torch.cat([self.vectors, other.vectors], dim=1))

    @property
    def count(self) -> Float[Tensor, " g"]:
        """Samples kept for each group."""
        g, n, _ = self.vectors.shape
        return torch.full((g,), float(n), dtype=torch.float64)
