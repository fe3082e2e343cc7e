"""How many bits each: from the variances of all coefficients of a model to a rate for each of them.

A `Spectrum` holds the coefficient variances of one layer's keys or values; an allocation sees those of all layers at
once, so that its scope may be a head, a layer or the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, final

from jaxtyping import Float
from torch import Tensor

K = TypeVar("K")


@final
@dataclass(frozen=True)
class RateCost:
    """What a quantizer can do with a rate, and what it stores beside the symbols.

    `group` neighbouring coefficients share one width; a group of width > 0 costs `overhead_bits` more (its scale),
    every token `token_bits` more (its gain). Widths are integers if `integer`, at most `max_bits`, and where they are
    not zero at least `least_bits`; the rates of a head group sum to a multiple of `unit_bits` where that is given.
    `loss` says how far above the rate-distortion bound the quantizer lands: knots (bits per coefficient, factor); none
    where the factor does not depend on the rate.
    """

    group: int = 1
    overhead_bits: float = 0.0
    token_bits: float = 0.0
    integer: bool = True
    max_bits: float = 8.0
    unit_bits: int = 0
    least_bits: int = 1
    loss: tuple[tuple[float, float], ...] = ()


class Allocation(ABC):
    """A rule from spectra to rates."""

    needs_spectrum: bool = False

    @abstractmethod
    def rates(
        self, spectra: Mapping[K, Float[Tensor, "g c"]], costs: Mapping[K, RateCost]
    ) -> dict[K, Float[Tensor, "g c"]]:
        """Bits per coefficient, for each spectrum; constant within each group of its cost."""
