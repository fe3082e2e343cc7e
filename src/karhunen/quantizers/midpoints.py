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

from karhunen.quantizers.base import Codes, as_half
from karhunen.quantizers.uniform_groups import UniformGroups, UniformGroupsQuantizer


@final
@dataclass(frozen=True)
class Midpoints(UniformGroups):
    """A scale for each group."""

    group: int = 32

    @property
    def side_bits(self) -> int:
        """A float16."""
        return 16

    def made(self, g: int, c: int, group: int, bits: int) -> "MidpointsQuantizer":
        """Of this kind."""
        return MidpointsQuantizer(g, c, group, bits)


@final
@dataclass(frozen=True)
class MidpointsQuantizer(UniformGroupsQuantizer):
    """Symbols of `bits` bits of `g` head groups of `c` coefficients, `group` to a scale."""

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `scale` [b parts t]."""
        parts = self.parts(y)
        stored = as_half(parts.abs().amax(-1))
        scale = stored.double()[..., None]
        unit = torch.where(scale > 0, parts / torch.where(scale > 0, scale, 1.0), 0.0)
        half = 2.0 ** (self.bits - 1)
        return self.codes((half + half * unit).floor().clamp(0, 2 * half - 1), {"scale": stored})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        unit = (2 * self.symbols(codes).double() + 1) / 2.0**self.bits - 1
        return (self.side(codes, "scale").double()[..., None] * unit).float().flatten(-2)
