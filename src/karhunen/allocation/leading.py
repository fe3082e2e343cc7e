"""A rank cut: the strongest coefficients get the same width, the others none.

    b_i = width for i ≤ ⌈share · d⌉,   0 otherwise

Source: Palu (arXiv:2407.21118): rank r of the latent by hand, one width for it. Coefficients come strongest first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.transforms.leading_hadamard import n_leading
from karhunen.values import refuse_unless_whole

K = TypeVar("K")


@final
@dataclass(frozen=True)
class Leading(Allocation):
    """`width` bits for each of the first `share` of the coefficients."""

    width: int = 3
    share: float = 0.5

    def __post_init__(self) -> None:
        refuse_unless_whole(width=self.width)
        if not 1 <= self.width <= 16:
            raise ValueError(f"width={self.width} is out of range; use 1 to 16")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} of the coefficients is not above 0 and at most 1")

    @property
    def bits(self) -> float:
        """Per coefficient on average, where the share is whole."""
        return self.width * self.share

    def rates(
        self, spectra: Mapping[K, Float[Tensor, "g c"]], costs: Mapping[K, RateCost]
    ) -> dict[K, Float[Tensor, "g c"]]:
        """Ones and zeros, times the width; the rank is rounded up to whole groups of the quantizer."""
        return {key: self._cut(spectrum, costs[key].group) for key, spectrum in spectra.items()}

    def _cut(self, spectrum: Tensor, group: int) -> Tensor:
        n_kept = -(-n_leading(self.share, spectrum.shape[-1]) // group) * group
        rates = torch.zeros_like(spectrum, dtype=torch.float64)
        rates[:, :n_kept] = self.width
        return rates
