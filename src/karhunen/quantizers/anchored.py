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

from karhunen.quantizers.base import Codes, as_half
from karhunen.quantizers.uniform_groups import UniformGroups, UniformGroupsQuantizer

LEAST_STEP = 1e-7


@final
@dataclass(frozen=True)
class Anchored(UniformGroups):
    """An edge and a step for each group."""

    group: int = 64

    @property
    def side_bits(self) -> int:
        """Two float16."""
        return 32

    def made(self, g: int, c: int, group: int, bits: int) -> "AnchoredQuantizer":
        """Of this kind."""
        return AnchoredQuantizer(g, c, group, bits)


@final
@dataclass(frozen=True)
class AnchoredQuantizer(UniformGroupsQuantizer):
    """Symbols of `bits` bits of `g` head groups of `c` coefficients, `group` to an edge and a step."""

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `edge` and `step` [b parts t]."""
        parts = self.parts(y)
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
        return self.codes(symbols, {"edge": edge16, "step": step16})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        edge, step = (self.side(codes, name).float()[..., None] for name in ("edge", "step"))
        return (edge + step * self.symbols(codes)).flatten(-2)
