"""A sign and a magnitude of w − 1 bits; or, where that is closer to a group, w − 1 bits between its two ends.

    symmetric:  ŷ = scale · n,         scale = max |y| / (2^(w−1) − 1),          n from −(2^(w−1) − 1) to 2^(w−1) − 1
    range:      ŷ = low + scale · n,   scale = (max y − min y) / (2^(w−1) − 1),  n from 0, low = min y

`PerToken(group)`: a group is neighbouring coefficients of a token (keys); `PerChannel(block_tokens)`: a coefficient
over a block of tokens (values). With `hybrid` each group takes what has the smaller sum of |y − ŷ|; the sign bit of its
stored scale says which: set for a range.
Source: InnerQ (arXiv:2602.23200) and its code, quant.py. Here: symbols are chosen by the stored scale.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.affine import PerChannel, PerToken
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half, divisors

HALF_BITS = 16
LEAST_BITS, MOST_BITS = 2, 9


@final
@dataclass(frozen=True)
class SignMagnitude(QuantizerSpec):
    """A float16 scale for each group, and with `hybrid` a float16 low end besides. A group of coefficients that does
    not divide the vector becomes the largest divisor below it."""

    granularity: PerToken | PerChannel = PerToken(32)
    hybrid: bool = False

    def __post_init__(self) -> None:
        size = self.granularity.group if isinstance(self.granularity, PerToken) else self.granularity.block_tokens
        if size is not None and size < 1:
            raise ValueError(f"a scale for {size} values serves none; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Side information of each group."""
        bits = HALF_BITS * (2 if self.hybrid else 1)
        if isinstance(self.granularity, PerChannel):
            return RateCost(1, bits / self.granularity.block_tokens, least_bits=LEAST_BITS)
        return RateCost(self._group(c), bits, least_bits=LEAST_BITS)

    def fit(self, data: QuantizerData) -> "SignMagnitudeQuantizer":
        """Nothing is learned; ValueError unless all rates are one whole number from 2 to 9 bits."""
        bits = int(data.rates.flatten()[0].round())
        if bool((data.rates != bits).any()) or not LEAST_BITS <= bits <= MOST_BITS:
            low, high = data.rates.min().item(), data.rates.max().item()
            raise ValueError(f"rates of {low:g} to {high:g}; use one of Uniform, {LEAST_BITS} to {MOST_BITS} bits")
        g, c = data.rates.shape
        at = self.granularity
        group, block = (1, at.block_tokens) if isinstance(at, PerChannel) else (self._group(c), 1)
        return SignMagnitudeQuantizer(g, c, bits, group, block, self.hybrid)

    def _group(self, c: int) -> int:
        assert isinstance(self.granularity, PerToken), "only tokens have groups of coefficients"
        return max(k for k in divisors(c) if k <= (self.granularity.group or c))


@final
@dataclass(frozen=True)
class SignMagnitudeQuantizer(Quantizer):
    """Groups of `group` coefficients × `block_tokens` tokens of `g` head groups of `c` coefficients."""

    g: int
    c: int
    bits: int
    group: int
    block_tokens: int
    hybrid: bool

    @property
    def widths(self) -> tuple[int, ...]:
        """All alike."""
        return (self.bits,) * (self.g * self.c)

    @property
    def granule_tokens(self) -> int:
        """Tokens are coded in whole blocks of so many."""
        return self.block_tokens

    def check(self, g: int, c: int) -> None:
        """The size, and a width of 2 to 9 bits."""
        if (self.g, self.c) != (g, c) or self.group < 1 or c % self.group or self.block_tokens < 1:
            raise ValueError(f"{self.g} groups of {self.c} in parts of {self.group} do not code {g} groups of {c}")
        if not LEAST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"{self.bits} bits of sign and magnitude are not {LEAST_BITS} to {MOST_BITS}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `scale` [b parts blocks], and `low` of the same shape if hybrid."""
        parts = self._parts(y.double().transpose(-2, -1).flatten(1, 2))  # [b parts blocks size]
        scale = as_half(parts.abs().amax(-1) / self._top)
        symbols = _over(parts, scale).round().clamp(-self._top, self._top) + self._top
        side = {"scale": scale}
        if self.hybrid:
            low = as_half(parts.amin(-1))
            step = as_half((parts.amax(-1) - parts.amin(-1)) / self._top)
            ranged = _over(parts - low.double()[..., None], step).round().clamp(0, self._top)
            closer = self._error(parts, ranged, -step, low) < self._error(parts, symbols, scale, low)
            symbols = torch.where(closer[..., None], ranged, symbols)
            side = {"scale": torch.where(closer, -step, scale), "low": torch.where(closer, low, 0.0)}
        return Codes(self._rows(symbols.int()), side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        low = codes.side["low"] if self.hybrid else None
        made = self._rows(self._made(self._parts(codes.symbols), codes.side["scale"], low))
        return made.float().unflatten(1, (self.g, self.c)).transpose(-2, -1)

    @property
    def _top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _made(self, symbols: Tensor, scale: Tensor, low: Tensor | None) -> Tensor:
        symmetric = scale.double()[..., None] * (symbols.double() - self._top)
        if low is None:
            return symmetric
        ranged = low.double()[..., None] + scale.double().abs()[..., None] * symbols.double()
        return torch.where(torch.signbit(scale)[..., None], ranged, symmetric)

    def _error(self, parts: Tensor, symbols: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        return (parts - self._made(symbols, scale, low)).abs().sum(-1)

    def _parts(self, rows: Tensor) -> Tensor:
        blocks = rows.unflatten(1, (-1, self.group)).unflatten(-1, (-1, self.block_tokens))
        return blocks.transpose(2, 3).flatten(-2)  # [b parts blocks group·block_tokens]

    def _rows(self, parts: Tensor) -> Tensor:
        blocks = parts.unflatten(-1, (self.group, self.block_tokens)).transpose(2, 3)
        return blocks.flatten(-2).flatten(1, 2)  # [b g·c t]


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """0 where the scale is."""
    level = scale.double()[..., None]
    return torch.where(level > 0, x / torch.where(level > 0, level, 1.0), 0.0)
