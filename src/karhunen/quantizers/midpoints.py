"""Points in the middles of 2^w equal cells of [−scale, scale]: none at zero, none at the ends.

    symbol = ⌊2^(w−1) · (1 + y / scale)⌋,    ŷ = scale · ((2 · symbol + 1) / 2^w − 1),    scale = max |y| of a group

Source: exllamav3's quantized cache (`CacheLayer_quant`), 2 to 8 bits, a float16 scale for 32 values. Here: a symbol is
chosen by the stored scale, where exllamav3 divides by the scale before it is rounded.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import MOST_BITS, Codes, Quantizer, QuantizerData, QuantizerSpec, as_half, divisors

SCALE_BITS = 16


@final
@dataclass(frozen=True)
class Midpoints(QuantizerSpec):
    """A scale for `group` coefficients, or the largest divisor of a vector's length below it."""

    group: int = 32

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"a scale for {self.group} coefficients serves none; use group=1 or more")

    def cost(self, c: int) -> RateCost:
        """A float16 for each group of a vector."""
        return RateCost(token_bits=SCALE_BITS * c / self._group(c))

    def fit(self, data: QuantizerData) -> "MidpointsQuantizer":
        """Nothing is learned; ValueError unless all rates are one whole number of bits."""
        bits = int(data.rates.flatten()[0].round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= MOST_BITS:
            raise ValueError(f"rates of {data.rates.min().item():g} to {data.rates.max().item():g}; use one of Uniform")
        g, c = data.rates.shape
        return MidpointsQuantizer(g, c, self._group(c), bits)

    def _group(self, c: int) -> int:
        return max(k for k in divisors(c) if k <= self.group)


@final
@dataclass(frozen=True)
class MidpointsQuantizer(Quantizer):
    """Symbols of `bits` bits of `g` head groups of `c` coefficients, `group` to a scale."""

    g: int
    c: int
    group: int
    bits: int

    @property
    def widths(self) -> tuple[int, ...]:
        """All alike."""
        return (self.bits,) * (self.g * self.c)

    def check(self, g: int, c: int) -> None:
        """The size, and a width of 1 to 16 bits."""
        if (self.g, self.c) != (g, c) or self.group < 1 or c % self.group or not 1 <= self.bits <= MOST_BITS:
            raise ValueError(f"{self.g} groups of {self.c} in parts of {self.group}, {self.bits} bits, for {g} of {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `scale` [b parts t]."""
        parts = y.double().unflatten(-1, (-1, self.group))  # [b g t parts group]
        stored = as_half(parts.abs().amax(-1))
        scale = stored.double()[..., None]
        unit = torch.where(scale > 0, parts / torch.where(scale > 0, scale, 1.0), 0.0)
        half = 2.0 ** (self.bits - 1)
        symbols = (half + half * unit).floor().clamp(0, 2 * half - 1).flatten(-2)  # [b g t c]
        rows = stored.permute(0, 1, 3, 2).flatten(1, 2)
        return Codes(symbols.transpose(-2, -1).flatten(1, 2).int(), {"scale": rows.contiguous()})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        symbols = codes.symbols.unflatten(1, (self.g, self.c)).transpose(-2, -1).unflatten(-1, (-1, self.group))
        scale = codes.side["scale"].double().unflatten(1, (self.g, -1)).permute(0, 1, 3, 2)
        unit = (2 * symbols.double() + 1) / 2.0**self.bits - 1
        return (scale[..., None] * unit).float().flatten(-2)
