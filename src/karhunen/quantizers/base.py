"""Which points: a `QuantizerSpec` fitted to coefficients becomes a `Quantizer` with mirrored encode and decode."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.statistics.moments import Moments


@final
@dataclass(frozen=True)
class Codes:
    """Symbols and side information of `t` tokens; in every tensor the last axis is time.

    `symbols[:, i]` is below `2 ** widths[i]` of the quantizer that made it; a side tensor's last axis counts tokens or
    whole blocks of them.
    """

    symbols: Integer[Tensor, "b s t"]
    side: Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class QuantizerData:
    """What a quantizer is fitted to: the rates, and moments and samples of the coefficients where gathered."""

    rates: Float[Tensor, "g c"]
    moments: Moments | None = None
    samples: Float[Tensor, "g n c"] | None = None

    def require_moments(self) -> Moments:
        """The moments; ValueError if there are none."""
        if self.moments is None:
            raise ValueError("this quantizer is fitted to data, but no moments were gathered; calibrate first")
        return self.moments

    def require_samples(self) -> Float[Tensor, "g n c"]:
        """The samples; ValueError if there are none."""
        if self.samples is None:
            raise ValueError("this quantizer is trained on samples, but none were gathered; calibrate first")
        return self.samples


class Quantizer(ABC):
    """A fitted quantizer of coefficients `[b g t c]`."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, ...]:
        """Bits of each symbol of a token, in the order of `Codes.symbols`."""

    @property
    def granule_tokens(self) -> int:
        """Tokens are coded in multiples of this."""
        return 1

    def check(self, g: int, c: int) -> None:
        """ValueError, saying what is wrong, unless it quantizes `g` groups of `c` coefficients with what it holds; here
        of the widths alone."""
        if any(not 0 <= width <= MOST_BITS for width in self.widths):
            raise ValueError(f"symbols of {min(self.widths)} to {max(self.widths)} bits; use 0 to {MOST_BITS}")

    @abstractmethod
    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Coefficients to symbols and side information."""

    @abstractmethod
    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The reconstruction, float32."""


class QuantizerSpec(ABC):
    """What was asked for."""

    needs_moments: bool = False
    needs_samples: bool = False

    @abstractmethod
    def cost(self, c: int) -> RateCost:
        """What this quantizer can do with a rate, for groups of `c` coefficients; ValueError if it cannot code them."""

    @abstractmethod
    def fit(self, data: QuantizerData) -> Quantizer:
        """The quantizer for this data."""


MOST_BITS = 16  # of a symbol
HALF_MAX = 65504.0  # the largest float16; scales and offsets beyond it are clamped before symbols are chosen


def as_half(x: Tensor) -> Tensor:
    """Rounded to float16, clamped to its range, so that no scale becomes infinite."""
    return x.clamp(-HALF_MAX, HALF_MAX).to(torch.float16)


def divisors(n: int) -> list[int]:
    """All divisors of n, for messages."""
    return [k for k in range(1, n + 1) if n % k == 0]


def as_dtype(x: Float[Tensor, "*n"], dtype: torch.dtype) -> Float[Tensor, "*n"]:
    """`x` in `dtype`: what rounding put past float16's largest number becomes that number."""
    return (x.clamp(-HALF_MAX, HALF_MAX) if dtype == torch.float16 else x).to(dtype)
