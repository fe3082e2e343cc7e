"""Vectors kept as they are, for what moments cannot tell: codebooks are trained on them.

Every `stride`-th token of each sequence is kept, so samples of two texts are the samples of their concatenation.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor


@final
@dataclass(frozen=True)
class Samples:
    """`n` sample vectors for each of `g` groups of `d` coordinates, in float32, and where each stood."""

    vectors: Float[Tensor, "g n d"]
    positions: Int[Tensor, " n"]

    @classmethod
    def of(cls, x: Float[Tensor, "g n d"], stride: int = 1, positions: Int[Tensor, " n"] | None = None) -> "Samples":
        """Every `stride`-th row of `x`; its rows stand at 0, 1, 2, ... unless `positions` says otherwise."""
        where = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        return cls(x[:, ::stride].float().clone(), where[::stride].clone())

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(torch.cat([self.vectors, other.vectors], dim=1), torch.cat([self.positions, other.positions]))

    @property
    def count(self) -> Float[Tensor, " g"]:
        """Samples kept for each group."""
        g, n, _ = self.vectors.shape
        return torch.full((g,), float(n), dtype=torch.float64, device=self.vectors.device)
