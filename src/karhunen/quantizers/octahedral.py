"""Three coefficients at a time: a length, and a direction on the octahedron unfolded to a square.

    y / ‖y‖ = (t_1, t_2, …),  t_i in R³,   ρ = ‖t_i‖,   (ξ, η) = fold(t_i / |t_i|_1)
    fold(x, y, z) = (x, y) for z ≥ 0,   (sign x (1 − |y|), sign y (1 − |x|)) below

After a random rotation all are distributed as is known beforehand: ρ² ~ Beta(3/2, (d − 3)/2), and (ξ, η) by the density
∝ 1 / |(x, y, z)|³ of the octahedron's point there. Each takes Lloyd–Max levels of its own density: b + 1 bits for ξ and
for η, b − 1 for ρ. Of the nine neighbours of the nearest (ξ, η) the one closest in direction is taken, and then the ρ
nearest to the triplet's length along it.
Source: OCTOPUS (arXiv:2605.21226), abstract, and a summary of the paper for split and rounding; the map is Cigolle et
al., JCGT 2014. Here: the norm is float16; where 3 does not divide d the last triplet is filled with zeros.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.device import HOST, uploaded
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half

NORM_BITS = 16
LEAST_BITS, MOST_BITS = 2, 7
SQUARE = 1024  # cells of a side of the square on which the density of (ξ, η) is summed
LENGTHS = 20000  # points at which that of ρ is
ROUNDS = 500


@final
@dataclass(frozen=True)
class Octahedral(QuantizerSpec):
    """Triplets of coefficients, and a float16 norm for the vector."""

    def cost(self, c: int) -> RateCost:
        """3 b + 1 bits for a triplet of rate b; ValueError for vectors of fewer than 4."""
        if c < 4:
            raise ValueError(f"{c} coefficients are one triplet; lengths of triplets vary from 4 coefficients on")
        return RateCost(token_bits=NORM_BITS + _n_triplets(c))

    def fit(self, data: QuantizerData) -> "OctahedralQuantizer":
        """Nothing is learned; ValueError unless every rate is the same, from 2 to 7 bits."""
        g, c = data.rates.shape
        self.cost(c)
        bits = int(data.rates.max().round())
        if bool((data.rates != bits).any()) or not LEAST_BITS <= bits <= MOST_BITS:
            raise ValueError(f"triplets take one rate of {LEAST_BITS} to {MOST_BITS} bits; use Uniform(3)")
        return OctahedralQuantizer(g, c, bits)


@final
@dataclass(frozen=True)
class OctahedralQuantizer(Quantizer):
    """Symbols of a head group: all ξ, all η, all ρ."""

    g: int
    c: int
    bits: int

    @property
    def widths(self) -> tuple[int, ...]:
        """b + 1, b + 1 and b − 1 bits."""
        n = _n_triplets(self.c)
        return ((self.bits + 1,) * (2 * n) + (self.bits - 1,) * n) * self.g

    def check(self, g: int, c: int) -> None:
        """The size, and a rate of 2 to 7 bits."""
        if (self.g, self.c) != (g, c) or c < 4 or not LEAST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"{self.g} groups of {self.c} at {self.bits} bits are not {g} of {c} at 2 to 7")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `norm` [b g t]."""
        norm = as_half(y.double().square().sum(-1).sqrt())
        level = norm.double()[..., None]
        unit = torch.where(level > 0, y.double() / torch.where(level > 0, level, 1.0), 0.0)
        n = _n_triplets(self.c)
        triplets = torch.nn.functional.pad(unit, (0, 3 * n - self.c)).unflatten(-1, (n, 3))  # [b g t n 3]
        x, w, z = triplets.unbind(-1)
        sides, points = self._levels(y.device), self._directions(y.device)
        borders = (sides[1:] + sides[:-1]) / 2
        first, second = torch.bucketize(fold(triplets).contiguous(), borders).unbind(-1)  # [b g t n]
        best, reach = torch.zeros_like(first), torch.full_like(x, -torch.inf)
        for one, other in product((-1, 0, 1), repeat=2):
            at = (first + one).clamp(0, len(sides) - 1) * len(sides) + (second + other).clamp(0, len(sides) - 1)
            along = x * points[0][at] + w * points[1][at] + z * points[2][at]
            best = torch.where(along > reach, at, best)
            reach = torch.maximum(along, reach)
        lengths = uploaded(length_levels(self.c, self.bits - 1), y.device)
        length = torch.bucketize(reach.contiguous(), (lengths[1:] + lengths[:-1]) / 2)
        symbols = torch.cat([best // len(sides), best % len(sides), length], dim=-1)  # [b g t 3n]
        return Codes(symbols.transpose(-2, -1).flatten(1, 2).int(), {"norm": norm})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        n = _n_triplets(self.c)
        first, second, length = codes.symbols.unflatten(1, (self.g, -1)).transpose(-2, -1).long().split(n, dim=-1)
        direction = self._directions(first.device)[:, first * 2 ** (self.bits + 1) + second]  # [3 b g t n]
        lengths = uploaded(length_levels(self.c, self.bits - 1), first.device)
        unit = (direction * lengths[length]).movedim(0, -1).flatten(-2)[..., : self.c]
        return (unit * codes.side["norm"].double()[..., None]).float()

    def _levels(self, device: torch.device) -> Tensor:
        return uploaded(side_levels(self.bits + 1), device)

    def _directions(self, device: torch.device) -> Tensor:
        return uploaded(directions(self.bits + 1), device)


def fold(x: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 2"]:
    """Directions to the square [−1, 1]²; what has no direction to its middle."""
    length = x.abs().sum(-1, keepdim=True)
    flat = torch.where(length > 0, x / torch.where(length > 0, length, 1.0), 0.0)
    upper = flat[..., :2]
    lower = _sign(upper) * (1 - upper.abs().flip(-1))
    return torch.where(flat[..., 2:] >= 0, upper, lower)


def unfold(at: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 3"]:
    """The mirror of `fold`, of length 1."""
    z = 1 - at.abs().sum(-1, keepdim=True)
    flat = torch.where(z >= 0, at, _sign(at) * (1 - at.abs().flip(-1)))
    return torch.nn.functional.normalize(torch.cat([flat, z], dim=-1), dim=-1)


@cache
def side_levels(bits: int) -> Float[Tensor, " levels"]:
    """Lloyd–Max levels of ξ for directions that are spread evenly, float64, ascending and symmetric."""
    at = (torch.arange(SQUARE, dtype=torch.float64, device=HOST) + 0.5) / SQUARE  # a quadrant tells all
    height = 1 - at[:, None] - at
    x, y = (torch.where(height >= 0, p, 1 - q) for p, q in ((at[:, None], at), (at, at[:, None])))
    half = (x.square() + y.square() + height.square()).pow(-1.5).sum(-1)
    density, points = torch.cat([half.flip(0), half]), torch.cat([-at.flip(0), at])
    levels = _lloyd_max(points, density, bits)
    return (levels - levels.flip(0)) / 2


@cache
def directions(bits: int) -> Float[Tensor, "3 points"]:
    """The direction of every pair of levels, the second running fastest."""
    levels = side_levels(bits)
    return unfold(torch.cartesian_prod(levels, levels)).T.contiguous()


@cache
def length_levels(d: int, bits: int) -> Float[Tensor, " levels"]:
    """Lloyd–Max levels of the length of three of `d` coordinates of a unit vector, float64, ascending."""
    at = (torch.arange(LENGTHS, dtype=torch.float64, device=HOST) + 0.5) / LENGTHS
    return _lloyd_max(at, at.square() * (1 - at.square()).pow((d - 3) / 2 - 1), bits)


def _lloyd_max(points: Tensor, density: Tensor, bits: int) -> Tensor:
    mass, moment = density.cumsum(0), (density * points).cumsum(0)
    shares = (torch.arange(2**bits, dtype=torch.float64, device=HOST) + 0.5) / 2**bits
    levels = points[torch.searchsorted(mass, shares * mass[-1])]
    for _ in range(ROUNDS):
        at = torch.searchsorted(points, (levels[1:] + levels[:-1]) / 2) - 1
        cells = [torch.cat([x.new_zeros(1), x[at], x[-1:]]).diff() for x in (mass, moment)]
        levels = cells[1] / cells[0]
    return levels


def _n_triplets(c: int) -> int:
    return -(-c // 3)


def _sign(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)
