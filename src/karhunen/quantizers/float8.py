"""Eight-bit floating point with a scale, so that the largest value of a vector meets the largest number.

    symbol = bits of float8(y / scale),   scale = max |y| / largest finite float8

Source: vLLM's fp8 KV cache. Here: the scale is taken from each vector (bfloat16 per token and head, so that no level of
keys is too small for it), never 1 unasked.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec
from karhunen.values import refuse_unless_one_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@final
@dataclass(frozen=True)
class Float8(QuantizerSpec):
    """`e4m3` (3 mantissa bits, up to 448) or `e5m2` (2 bits, up to 57344), one scale per token and head group."""

    format: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"unknown float8 format {self.format!r}; known: {sorted(DTYPES)}")

    def cost(self, c: int) -> RateCost:
        """Eight bits, one scale."""
        return RateCost(token_bits=16)

    def fit(self, data: QuantizerData) -> "Float8Quantizer":
        """Nothing is learned; ValueError unless every rate is 8 bits."""
        if bool((data.rates != 8).any()):
            raise ValueError(f"float8 codes take 8 bits, not {data.rates.min().item():g}; use Uniform(8)")
        g, c = data.rates.shape
        return Float8Quantizer(g, c, self.format)


@final
@dataclass(frozen=True)
class Float8Quantizer(Quantizer):
    """Float8 symbols with a bfloat16 scale per token and head group."""

    g: int
    c: int
    format: str

    @property
    def widths(self) -> tuple[int, ...]:
        """One byte per coefficient."""
        return (8,) * (self.g * self.c)

    def check(self, g: int, c: int) -> None:
        """The size, and a format that is known."""
        refuse_unless_one_of("float8 format", self.format, tuple(DTYPES))
        if (self.g, self.c) != (g, c):
            raise ValueError(f"it quantizes {self.g} groups of {self.c} coefficients, not {g} of {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `scale` [b g t]."""
        dtype = DTYPES[self.format]
        top = torch.finfo(dtype).max
        scale = (y.double().abs().amax(-1) / top).to(torch.bfloat16)
        level = scale.double()[..., None]
        unit = torch.where(level > 0, y.double() / torch.where(level > 0, level, 1.0), 0.0).clamp(-top, top)
        symbols = unit.float().to(dtype).view(torch.uint8).int()
        return Codes(symbols.transpose(-2, -1).flatten(1, 2), {"scale": scale})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        unit = codes.symbols.to(torch.uint8).view(DTYPES[self.format]).float()
        return unit.unflatten(1, (self.g, self.c)).transpose(-2, -1) * codes.side["scale"].float()[..., None]
