"""Sixteen coefficients as one radius and fifteen angles, by four rounds of polar coordinates.

    round 1: (y_1, y_2) → (r, θ), θ on the circle;   round l: (r_1, r_2) → (√(r_1² + r_2²), ψ = atan(r_2 / r_1))

After a random rotation θ is uniform and ψ has the density ∝ sin^{m−1}(2ψ), m = 2^{l−1}, on [0, π/2], whatever the
vector: the tables are known beforehand, and no range is stored but the radius.
Source: PolarQuant (arXiv:2502.02617) §4: four rounds, 4 bits for the first and 2 for the others, a 16-bit radius:
(8·4 + 7·2 + 16)/16 = 3.875 bits per coefficient. Here: a rate of b gives b + 1 bits to the first round and b − 1 to the
others, so that theirs is b = 3; levels are the density's Lloyd–Max levels.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.device import HOST, uploaded
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half
from karhunen.quantizers.pair_polar import middles, sectors

N_ROUNDS = 4
BLOCK = 2**N_ROUNDS
RADIUS_BITS = 16
GRID = 20000  # points at which the angle density is summed
MAX_BITS = 8


@final
@dataclass(frozen=True)
class RecursivePolar(QuantizerSpec):
    """Angles of blocks of 16 coefficients, a float16 radius for each block."""

    def cost(self, c: int) -> RateCost:
        """Radii come on top; ValueError if blocks do not fit."""
        if c % BLOCK:
            raise ValueError(f"{c} coefficients are not blocks of {BLOCK}, which four polar rounds need")
        return RateCost(token_bits=RADIUS_BITS * c / BLOCK)

    def fit(self, data: QuantizerData) -> "RecursivePolarQuantizer":
        """Nothing is learned; ValueError unless every rate is the same."""
        g, c = data.rates.shape
        self.cost(c)
        bits = int(data.rates.max().round())
        if bool((data.rates != bits).any()) or not 2 <= bits < MAX_BITS + 1:
            raise ValueError(f"polar angles take one rate of 2 to {MAX_BITS} bits for all coefficients; use Uniform(3)")
        return RecursivePolarQuantizer(g, c, (bits + 1, *(bits - 1,) * (N_ROUNDS - 1)))


@final
@dataclass(frozen=True)
class RecursivePolarQuantizer(Quantizer):
    """Symbols of a head group: the angles of round 1, then those of round 2, ..."""

    g: int
    c: int
    round_bits: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Half as many angles in every round as in the one before."""
        one = [bits for k, bits in enumerate(self.round_bits) for _ in range(self.c >> (k + 1))]
        return tuple(one) * self.g

    def check(self, g: int, c: int) -> None:
        """The size, and widths of 1 to 8 bits."""
        if (self.g, self.c) != (g, c) or not all(1 <= bits <= 8 for bits in self.round_bits) or not self.round_bits:
            raise ValueError(f"{self.g} groups of {self.c} at {self.round_bits} bits are not {g} of {c} at 1 to 8")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `radius` [b g·c/16 t]."""
        radius, angles = to_polar(y.double())
        symbols = [sectors(angles[0], self.round_bits[0])]
        for k, angle in enumerate(angles[1:], start=1):
            _, borders = angle_levels(k, self.round_bits[k])
            symbols.append(torch.bucketize(angle.contiguous(), uploaded(borders, angle.device)).int())
        rows = torch.cat(symbols, dim=-1).transpose(-2, -1).flatten(1, 2)
        return Codes(rows, {"radius": as_half(radius).transpose(-2, -1).flatten(1, 2)})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        rows = codes.symbols.unflatten(1, (self.g, -1)).transpose(-2, -1).long()
        parts = rows.split([self.c >> (k + 1) for k in range(N_ROUNDS)], dim=-1)
        angles = [middles(parts[0], self.round_bits[0]).double()]
        angles += [uploaded(angle_levels(k, self.round_bits[k])[0], rows.device)[parts[k]] for k in range(1, N_ROUNDS)]
        radius = codes.side["radius"].double().unflatten(1, (self.g, -1)).transpose(-2, -1)
        return from_polar(radius, angles).float()


def to_polar(y: Float[Tensor, "*b c"]) -> tuple[Float[Tensor, "*b blocks"], list[Tensor]]:
    """Radii of blocks of 16, and the angles of each round; neighbours form pairs."""
    radius, angles = y, []
    for _ in range(N_ROUNDS):
        first, second = radius[..., 0::2], radius[..., 1::2]
        angles.append(torch.atan2(second, first))
        radius = torch.hypot(first, second)
    return radius, angles


def from_polar(radius: Float[Tensor, "*b blocks"], angles: list[Tensor]) -> Float[Tensor, "*b c"]:
    """The mirror of `to_polar`."""
    for angle in reversed(angles):
        radius = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)
    return radius


@cache
def angle_levels(k: int, bits: int) -> tuple[Float[Tensor, " levels"], Float[Tensor, " borders"]]:
    """Lloyd–Max levels and inner borders of the angle of round k + 1 (k ≥ 1), float64."""
    psi = (torch.arange(GRID, dtype=torch.float64, device=HOST) + 0.5) * (math.pi / 2 / GRID)
    density = (2 * psi).sin() ** (2**k - 1)
    mass, moment = density.cumsum(0), (density * psi).cumsum(0)
    shares = (torch.arange(2**bits, dtype=torch.float64, device=HOST) + 0.5) / 2**bits
    levels = psi[torch.searchsorted(mass, shares * mass[-1])]
    for _ in range(500):
        borders = (levels[1:] + levels[:-1]) / 2
        at = torch.searchsorted(psi, borders) - 1
        cells = [torch.cat([x.new_zeros(1), x[at], x[-1:]]).diff() for x in (mass, moment)]
        levels = cells[1] / cells[0]
    levels = (levels + (math.pi / 2 - levels).flip(0)) / 2
    return levels, (levels[1:] + levels[:-1]) / 2
