"""Eight-bit floating point with one calibrated scale per head: a token takes its bytes and nothing else.

    symbol = bits of float8(y / scale),   scale = max |y| over the calibration text / largest finite float8

Source: the per-head static scales of vLLM's and SGLang's fp8 KV caches. What is larger than anything the calibration
saw saturates; `headroom` > 1 leaves room for it, at no cost while exponents last.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec
from karhunen.quantizers.float8 import DTYPES
from karhunen.values import refuse_unless_one_of


@final
@dataclass(frozen=True)
class StaticFloat8(QuantizerSpec):
    """`e4m3` or `e5m2`, one float32 scale per head group, shared by all tokens."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    headroom: float = 1.0
    needs_samples = True

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise ValueError(f"unknown float8 format {self.format!r}; known: {sorted(DTYPES)}")
        if self.headroom < 1:
            raise ValueError(f"headroom={self.headroom} cuts what calibration saw; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Eight bits, no scale."""
        return RateCost()

    def fit(self, data: QuantizerData) -> "StaticFloat8Quantizer":
        """Takes the largest sample of each head group; ValueError unless every rate is 8 bits."""
        if bool((data.rates != 8).any()):
            raise ValueError(f"float8 codes take 8 bits, not {data.rates.min().item():g}; use Uniform(8)")
        largest = data.require_samples().abs().amax((1, 2)).double() * self.headroom
        scale = (largest / torch.finfo(DTYPES[self.format]).max).clamp_min(1e-30).float()
        return StaticFloat8Quantizer(data.rates.shape[-1], scale, self.format)


@final
@dataclass(frozen=True)
class StaticFloat8Quantizer(Quantizer):
    """Float8 symbols; no side information."""

    c: int
    scale: Float[Tensor, " g"]
    format: str

    @property
    def widths(self) -> tuple[int, ...]:
        """One byte per coefficient."""
        return (8,) * (len(self.scale) * self.c)

    def check(self, g: int, c: int) -> None:
        """The size, a format that is known, and scales above 0."""
        refuse_unless_one_of("float8 format", self.format, tuple(DTYPES))
        if (len(self.scale), self.c) != (g, c) or not bool((self.scale > 0).all()):
            raise ValueError(f"it quantizes {len(self.scale)} groups of {self.c} coefficients, not {g} of {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """No side information."""
        dtype = DTYPES[self.format]
        top = torch.finfo(dtype).max
        unit = (y.double() / self.scale.double()[:, None, None]).clamp(-top, top)
        symbols = unit.float().to(dtype).view(torch.uint8).int()
        return Codes(symbols.transpose(-2, -1).flatten(1, 2), {})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        unit = codes.symbols.to(torch.uint8).view(DTYPES[self.format]).float()
        return unit.unflatten(1, (len(self.scale), self.c)).transpose(-2, -1) * self.scale[:, None, None]
