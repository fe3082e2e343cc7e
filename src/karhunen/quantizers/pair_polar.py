"""A key's rotary pairs as radius and angle: a channel pair that is an outlier draws a circle, whose radius is smooth.

    ρ = √(x_i² + x_j²), quantized by channel over a block of tokens;   θ = atan2(x_j, x_i), in 2^w sectors of the circle

Source: PolarQuant (arXiv:2502.00527): post-RoPE keys, ρ and θ of a width each, 4 bits for both, groups of 128 tokens.
Pairs are (i, i + c/2), as Llama rotates them, or (2i, 2i + 1) if `interleaved`; any pairing is undone exactly.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.affine import RANGE_BITS, AffineQuantizer
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec

MAX_BITS = 8


@final
@dataclass(frozen=True)
class PairPolar(QuantizerSpec):
    """Radii with a float16 range per pair and `block_tokens` tokens; angles need none.

    At a rate of b bits an angle takes b + `angle_extra` and a radius b − `angle_extra`, whose range `clip` narrows as
    that of `Affine`.
    """

    block_tokens: int = 32
    interleaved: bool = False
    angle_extra: int = 0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"a range over {self.block_tokens} tokens is empty; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Half a range per coefficient and block; ValueError if there are no pairs."""
        if c % 2:
            raise ValueError(f"{c} coefficients are not pairs")
        return RateCost(group=1, overhead_bits=RANGE_BITS / 2 / self.block_tokens)

    def fit(self, data: QuantizerData) -> "PairPolarQuantizer":
        """Nothing is learned; ValueError unless every rate is the same."""
        g, c = data.rates.shape
        self.cost(c)
        bits = int(data.rates.max().round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= MAX_BITS:
            raise ValueError(f"radius and angle take one rate of 1 to {MAX_BITS} bits for all; use Uniform(4)")
        radius_bits, angle_bits = pair_widths(bits, self.angle_extra)
        radius = AffineQuantizer(
            torch.full((g, c // 2), radius_bits, dtype=torch.int32, device=data.rates.device),
            1,
            self.block_tokens,
            self.clip,
        )
        return PairPolarQuantizer(radius, angle_bits, self.interleaved)


@final
@dataclass(frozen=True)
class PairPolarQuantizer(Quantizer):
    """Symbols of all radii, then of all angles."""

    radius: AffineQuantizer
    angle_bits: int
    interleaved: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the radii, and the angles."""
        return (*self.radius.widths, *(self.angle_bits,) * self.radius.bits.numel())

    @property
    def granule_tokens(self) -> int:
        """Tokens are coded in whole blocks of so many."""
        return self.radius.granule_tokens

    def check(self, g: int, c: int) -> None:
        """A radius and an angle for every pair."""
        if c % 2 or not 1 <= self.angle_bits <= MAX_BITS:
            raise ValueError(f"pairs of {c} coefficients with angles of {self.angle_bits} bits; use 1 to {MAX_BITS}")
        self.radius.check(g, c // 2)
        if int(self.radius.bits.min()) < 1:
            raise ValueError("a radius has no bits")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `low` and `step` of the radii."""
        first, second = self._pairs(y.double())
        codes = self.radius.encode(torch.hypot(first, second))
        sector = sectors(torch.atan2(second, first), self.angle_bits)
        return Codes(torch.cat([codes.symbols, sector.transpose(-2, -1).flatten(1, 2)], dim=1), codes.side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        g, pairs = self.radius.bits.shape
        radius = self.radius.decode(Codes(codes.symbols[:, : g * pairs], codes.side))
        angle = middles(codes.symbols[:, g * pairs :].unflatten(1, (g, pairs)).transpose(-2, -1), self.angle_bits)
        parts = [radius * angle.cos(), radius * angle.sin()]
        return torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)

    def _pairs(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return y[..., 0::2], y[..., 1::2]
        first, second = y.chunk(2, dim=-1)
        return first, second


def pair_widths(bits: int, angle_extra: int) -> tuple[int, int]:
    """Bits of a radius and of an angle whose mean is `bits`; ValueError if one of them is out of range."""
    radius, angle = bits - angle_extra, bits + angle_extra
    if min(radius, angle) < 1 or max(radius, angle) > MAX_BITS:
        raise ValueError(
            f"bits={bits} with angle_extra={angle_extra} give a radius {radius} bits and an angle {angle}; each takes "
            f"1 to {MAX_BITS}: use a smaller angle_extra"
        )
    return radius, angle


def sectors(angle: Float[Tensor, "*b"], bits: int) -> Int[Tensor, "*b"]:
    """Which of 2^bits equal sectors of the circle, counted from angle 0."""
    n = 2**bits
    return torch.remainder((angle / (2 * math.pi) * n).floor(), n).int()


def middles(sector: Int[Tensor, "*b"], bits: int) -> Float[Tensor, "*b"]:
    """The angle in the middle of a sector, float32."""
    return (sector.float() + 0.5) * (2 * math.pi / 2**bits)
