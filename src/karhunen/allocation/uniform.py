"""Every coefficient gets the same number of bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import Allocation, RateCost
from karhunen.values import refuse_unless_whole

K = TypeVar("K")


@final
@dataclass(frozen=True)
class Uniform(Allocation):
    """`bits` for each; scales and gains come on top."""

    bits: int

    def __post_init__(self) -> None:
        refuse_unless_whole(bits=self.bits)
        if not 1 <= self.bits <= 16:
            raise ValueError(f"bits={self.bits} is out of range; use 1 to 16")

    def rates(
        self, spectra: Mapping[K, Float[Tensor, "g c"]], costs: Mapping[K, RateCost]
    ) -> dict[K, Float[Tensor, "g c"]]:
        """The constant."""
        return {key: torch.full_like(spectrum, float(self.bits)) for key, spectrum in spectra.items()}
