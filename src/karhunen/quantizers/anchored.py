"""Evenly spaced points of which one is zero and one is the end of the range that is farther from zero.

    edge = the value of a group farthest from 0,   step = ± (max − min) / (2^w − 1), away from the edge
    n = round(−edge / step),   step ← −edge / n,   ŷ = edge + step · symbol

Source: MLX's `mx.quantize`, in mlx-lm's `QuantizedKVCache` with groups of 64. Where n is 0 the step stays as it is
and points start at zero. Edge and step are stored as float16, which MLX stores in the model's dtype.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import MOST_BITS, Codes, Quantizer, QuantizerData, QuantizerSpec, as_half, divisors

LEAST_STEP = 1e-7


@final
@dataclass(frozen=True)
class Anchored(QuantizerSpec):
    """An edge and a step for `group` coefficients, or the largest divisor of a vector's length below it."""

    group: int = 64

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"a range over {self.group} values is empty; use group=1 or more")

    def cost(self, c: int) -> RateCost:
        """Two float16 for each group of a vector."""
        return RateCost(token_bits=32 * c / self._group(c))

    def fit(self, data: QuantizerData) -> "AnchoredQuantizer":
        """Nothing is learned; ValueError unless all rates are one whole number of bits."""
        bits = int(data.rates.flatten()[0].round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= MOST_BITS:
            raise ValueError(f"rates of {data.rates.min().item():g} to {data.rates.max().item():g}; use one of Uniform")
        g, c = data.rates.shape
        return AnchoredQuantizer(g, c, self._group(c), bits)

    def _group(self, c: int) -> int:
        return max(k for k in divisors(c) if k <= self.group)


@final
@dataclass(frozen=True)
class AnchoredQuantizer(Quantizer):
    """Symbols of `bits` bits of `g` head groups of `c` coefficients."""

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
        """Side information: `edge` and `step` [b parts t]."""
        parts = y.double().unflatten(-1, (-1, self.group))
        top = 2.0**self.bits - 1
        low, high = parts.amin(-1), parts.amax(-1)
        from_low = low.abs() > high.abs()
        step = ((high - low) / top).clamp_min(LEAST_STEP) * torch.where(from_low, 1.0, -1.0)
        edge = torch.where(from_low, low, high)
        n = (-edge / step).round()
        step = torch.where(n == 0, step, -edge / torch.where(n == 0, 1.0, n))
        edge16, step16 = as_half(torch.where(n == 0, 0.0, edge)), as_half(step)
        moved = parts - edge16.double()[..., None]
        level = step16.double()[..., None]
        symbols = torch.where(level != 0, moved / torch.where(level != 0, level, 1.0), 0.0).round().clamp(0, top)
        side = {"edge": _rows(edge16), "step": _rows(step16)}
        return Codes(symbols.flatten(-2).transpose(-2, -1).flatten(1, 2).int(), side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        symbols = codes.symbols.unflatten(1, (self.g, self.c)).transpose(-2, -1).unflatten(-1, (-1, self.group))
        edge, step = (
            codes.side[name].float().unflatten(1, (self.g, -1)).permute(0, 1, 3, 2) for name in ("edge", "step")
        )
        return (edge[..., None] + step[..., None] * symbols).flatten(-2)


def _rows(x: Tensor) -> Tensor:
    """[b g t parts] as [b parts t]: time last."""
    return x.permute(0, 1, 3, 2).flatten(1, 2).contiguous()
