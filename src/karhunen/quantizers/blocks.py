"""One scale for a block of neighbouring coefficients, and numbers that engines know: small integers, or E2M1 floats.

    symbol = the number nearest to y / scale,    ŷ = scale · number

| numbers  | which                            | scale of a block                              | as in          |
|----------|----------------------------------|-----------------------------------------------|----------------|
| `int8`   | −127 … 127                       | max abs y / 127                               | llama.cpp q8_0 |
| `int4`   | −8 … 7                           | y of the largest magnitude / −8, of any sign  | llama.cpp q4_0 |
| `float4` | ± 0, ½, 1, 1½, 2, 3, 4, 6 (E2M1) | max abs y / 6; as `e8m0` 2^⌊log2 max abs y⌋/4 | NVFP4, MXFP4   |

Scales are stored as `float16`, `e4m3` (float8, times `unit`) or `e8m0` (a power of two), a byte each but the first.
Source: ggml's quantize_row_q8_0_ref and _q4_0_ref; OCP Microscaling Formats 1.0 §6.3; NVIDIA's NVFP4. Here: a symbol is
chosen by the stored scale, where ggml divides by the scale before it is rounded; `unit` is NVFP4's scale of a tensor.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half, divisors
from karhunen.values import refuse_unless_one_of

Numbers = Literal["int8", "int4", "float4"]
ScaleFormat = Literal["float16", "e4m3", "e8m0"]

WIDTHS: dict[str, int] = {"int8": 8, "int4": 4, "float4": 4}
SCALE_BITS: dict[str, int] = {"float16": 16, "e4m3": 8, "e8m0": 8}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its three lower bits
TOP = {"int8": 127.0, "int4": -8.0, "float4": MAGNITUDES[-1]}  # where the largest value of a block comes to lie
E4M3_TOP = 448.0
E8M0_ONE = 127  # the byte of scale 1


@final
@dataclass(frozen=True)
class Blocks(QuantizerSpec):
    """`group` coefficients to a scale, or the largest divisor of a vector's length below it; `unit` multiplies scales
    of `e4m3`, whose smallest step is 2^−9."""

    numbers: Numbers = "int4"
    scale: ScaleFormat = "float16"
    group: int = 32
    unit: float = 1.0

    def __post_init__(self) -> None:
        refuse_unless_one_of("numbers", self.numbers, tuple(WIDTHS))
        refuse_unless_one_of("scale", self.scale, tuple(SCALE_BITS))
        if self.group < 1:
            raise ValueError(f"a scale for {self.group} coefficients serves none; use group=1 or more")
        if not self.unit > 0 or (self.unit != 1 and self.scale != "e4m3"):
            raise ValueError(f"unit={self.unit} with {self.scale} scales; it is above 0, and 1 unless scale='e4m3'")
        if self.numbers == "int4" and self.scale != "float16":
            raise ValueError(f"int4's scales have a sign, {self.scale} has none; use scale='float16'")

    def cost(self, c: int) -> RateCost:
        """A scale for each block of a vector."""
        return RateCost(token_bits=SCALE_BITS[self.scale] * c / self._group(c))

    def fit(self, data: QuantizerData) -> "BlocksQuantizer":
        """Nothing is learned; ValueError unless every rate is the numbers' width."""
        width = WIDTHS[self.numbers]
        if bool((data.rates != width).any()):
            raise ValueError(
                f"{self.numbers} takes {width} bits, not {data.rates.min().item():g}; use Uniform({width})"
            )
        g, c = data.rates.shape
        return BlocksQuantizer(g, c, self._group(c), self.numbers, self.scale, self.unit)

    def _group(self, c: int) -> int:
        return max(k for k in divisors(c) if k <= self.group)


@final
@dataclass(frozen=True)
class BlocksQuantizer(Quantizer):
    """Blocks of `group` coefficients of `g` head groups of `c`."""

    g: int
    c: int
    group: int
    numbers: str
    scale: str
    unit: float

    @property
    def widths(self) -> tuple[int, ...]:
        """All alike."""
        return (WIDTHS[self.numbers],) * (self.g * self.c)

    def check(self, g: int, c: int) -> None:
        """The size, and formats that are known."""
        refuse_unless_one_of("numbers", self.numbers, tuple(WIDTHS))
        refuse_unless_one_of("scale", self.scale, tuple(SCALE_BITS))
        if (self.g, self.c) != (g, c) or self.group < 1 or c % self.group or not self.unit > 0:
            raise ValueError(f"{self.g} groups of {self.c} in blocks of {self.group} do not code {g} groups of {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `scale` [b blocks t]."""
        blocks = y.double().unflatten(-1, (-1, self.group))  # [b g t blocks group]
        stored = self._stored(blocks)
        level = self._levels(stored)[..., None]
        unit = torch.where(level != 0, blocks / torch.where(level != 0, level, 1.0), 0.0)
        symbols = self._symbols(unit).flatten(-2)  # [b g t c]
        rows = stored.permute(0, 1, 3, 2).flatten(1, 2)
        return Codes(symbols.transpose(-2, -1).flatten(1, 2).int(), {"scale": rows.contiguous()})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        symbols = codes.symbols.unflatten(1, (self.g, self.c)).transpose(-2, -1).unflatten(-1, (-1, self.group))
        stored = codes.side["scale"].unflatten(1, (self.g, -1)).permute(0, 1, 3, 2)
        return (self._numbers(symbols) * self._levels(stored)[..., None]).float().flatten(-2)

    def _stored(self, blocks: Tensor) -> Tensor:
        at = blocks.abs().argmax(-1, keepdim=True)
        largest = blocks.gather(-1, at).squeeze(-1)
        if self.numbers != "int4":
            largest = largest.abs()
        if self.scale == "float16":
            return as_half(largest / TOP[self.numbers])
        if self.scale == "e4m3":
            level = (largest / TOP[self.numbers] / self.unit).clamp(max=E4M3_TOP)
            return level.float().to(torch.float8_e4m3fn).view(torch.uint8)
        exponent = torch.frexp(largest).exponent - 1  # ⌊log2⌋
        of_top = math.frexp(TOP[self.numbers])[1] - 1
        return (exponent - of_top + E8M0_ONE).clamp(0, 254).to(torch.uint8)

    def _levels(self, stored: Tensor) -> Tensor:
        if self.scale == "float16":
            return stored.double()
        if self.scale == "e4m3":
            return stored.view(torch.float8_e4m3fn).double() * self.unit
        return (stored.double() - E8M0_ONE).exp2()

    def _symbols(self, unit: Tensor) -> Tensor:
        if self.numbers == "int8":
            return unit.round().clamp(-127, 127) + 127
        if self.numbers == "int4":
            return (unit + 8.5).floor().clamp(0, 15)
        known = _magnitudes(unit.dtype, unit.device)
        middles = (known[1:] + known[:-1]) / 2
        code = torch.bucketize(unit.abs(), middles)  # a tie goes down, and up again to an even code
        tie = unit.abs() == middles[code.clamp(max=len(middles) - 1)]
        code = code + (tie & (code % 2 == 1)).int()
        return code + 8 * (unit < 0).int()

    def _numbers(self, symbols: Tensor) -> Tensor:
        if self.numbers != "float4":
            return symbols.double() - (127 if self.numbers == "int8" else 8)
        known = _magnitudes(torch.float64, symbols.device)
        return torch.where(symbols < 8, 1.0, -1.0) * known[(symbols % 8).long()]


@lru_cache(maxsize=16)
def _magnitudes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once for a device, which the host would else wait for at every page."""
    return torch.tensor(MAGNITUDES, dtype=dtype, device=device)
