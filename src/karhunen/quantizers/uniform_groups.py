"""What quantizers of one width share that have side information for each few neighbouring coefficients of a token.

y [b g t c] ─▶ parts [b g t parts group] ─▶ symbols, all of `bits` bits; side information [b parts t], time last
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import MOST_BITS, Codes, Quantizer, QuantizerData, QuantizerSpec, divisors


@dataclass(frozen=True)
class UniformGroups(QuantizerSpec, ABC):
    """`group` coefficients have side information of their own, or the largest divisor of a vector's length below it."""

    group: int

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"groups of {self.group} coefficients hold none; use group=1 or more")

    @property
    @abstractmethod
    def side_bits(self) -> int:
        """Of one group's side information."""

    @abstractmethod
    def made(self, g: int, c: int, group: int, bits: int) -> "UniformGroupsQuantizer":
        """The quantizer."""

    def cost(self, c: int) -> RateCost:
        """The side information of a vector's groups."""
        return RateCost(token_bits=self.side_bits * c / self._group(c))

    def fit(self, data: QuantizerData) -> "UniformGroupsQuantizer":
        """Nothing is learned; ValueError unless all rates are one whole number of bits."""
        bits = int(data.rates.flatten()[0].round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= MOST_BITS:
            raise ValueError(f"rates of {data.rates.min().item():g} to {data.rates.max().item():g}; use one of Uniform")
        g, c = data.rates.shape
        return self.made(g, c, self._group(c), bits)

    def _group(self, c: int) -> int:
        return max(k for k in divisors(c) if k <= self.group)


@dataclass(frozen=True)
class UniformGroupsQuantizer(Quantizer, ABC):
    """Symbols of `bits` bits of `g` head groups of `c` coefficients, in parts of `group`."""

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

    def parts(self, y: Float[Tensor, "b g t c"]) -> Float[Tensor, "b g t parts group"]:
        """In float64."""
        return y.double().unflatten(-1, (-1, self.group))

    def codes(
        self, symbols: Float[Tensor, "b g t parts group"], side: dict[str, Shaped[Tensor, "b g t parts"]]
    ) -> Codes:
        """Rows of symbols and of side information, time last."""
        rows = {name: x.permute(0, 1, 3, 2).flatten(1, 2).contiguous() for name, x in side.items()}
        return Codes(symbols.flatten(-2).transpose(-2, -1).flatten(1, 2).int(), rows)

    def symbols(self, codes: Codes) -> Shaped[Tensor, "b g t parts group"]:
        """The mirror of `codes`."""
        return codes.symbols.unflatten(1, (self.g, self.c)).transpose(-2, -1).unflatten(-1, (-1, self.group))

    def side(self, codes: Codes, name: str) -> Shaped[Tensor, "b g t parts"]:
        """The mirror of `codes`."""
        return codes.side[name].unflatten(1, (self.g, -1)).permute(0, 1, 3, 2)
