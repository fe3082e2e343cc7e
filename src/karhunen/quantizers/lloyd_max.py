"""The best 2^w points for a Gaussian coefficient of known spread.

    levels t_k = E[x | x in cell k],  cell borders half-way between levels,   ŷ = gain · σ_i · t_symbol

Source: Lloyd (1982), Max (1960); used on rotated vectors by TurboQuant (arXiv:2504.19874), whose coordinates are all
but Gaussian with σ = norm/√d. Here: σ_i comes from calibration where moments were gathered, and is 1 otherwise (after
the gain, a rotated vector's coordinates have unit variance).
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.device import HOST, uploaded
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec
from karhunen.quantizers.gains import GAIN_BITS, GainKind, apply_gain, split_gain
from karhunen.values import refuse_unless_one_of

MAX_BITS = 10  # Lloyd's iteration finds 1,024 levels in a second; more is better served by a uniform quantizer


@final
@dataclass(frozen=True)
class LloydMax(QuantizerSpec):
    """Scalar Gaussian codebooks; `gain` stores the vector's level, `scaled` takes each coefficient's σ from moments."""

    gain: GainKind = "float16"
    scaled: bool = False

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))

    @property
    def needs_moments(self) -> bool:  # type: ignore[override]
        """Only for σ."""
        return self.scaled

    def cost(self, c: int) -> RateCost:
        """Integer widths, one gain per token."""
        return RateCost(token_bits=GAIN_BITS[self.gain])

    def fit(self, data: QuantizerData) -> "LloydMaxQuantizer":
        """σ of each coefficient, and the widths."""
        bits = data.rates.round().int()
        if int(bits.max()) > MAX_BITS:
            raise ValueError(f"{int(bits.max())} bits per coefficient are more than {MAX_BITS}; use 1 to {MAX_BITS}")
        sigma = torch.ones_like(bits, dtype=torch.float32)
        if self.scaled:
            variance = data.require_moments().second_moment.diagonal(dim1=-2, dim2=-1)
            level = variance.mean(-1, keepdim=True) if self.gain != "none" else torch.ones_like(variance[:, :1])
            sigma = (variance / level).clamp_min(1e-30).sqrt().float()
        return LloydMaxQuantizer(bits, sigma, self.gain)


@final
@dataclass(frozen=True)
class LloydMaxQuantizer(Quantizer):
    """Gaussian codebooks of 2^bits levels, scaled by σ; coefficients of width 0 are dropped."""

    bits: Int[Tensor, "g c"]
    sigma: Float[Tensor, "g c"]
    gain: GainKind

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the kept coefficients, head group by head group."""
        return self._widths

    def check(self, g: int, c: int) -> None:
        """Widths of 0 to MAX_BITS bits, a spread above 0 for each coefficient, a gain that is known."""
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        if self.bits.shape != (g, c) or not 0 <= int(self.bits.min()) <= int(self.bits.max()) <= MAX_BITS:
            raise ValueError(f"widths {tuple(self.bits.shape)} are not {g} groups of {c}, each 0 to {MAX_BITS}")
        if self.sigma.shape != (g, c) or not bool((self.sigma > 0).all()):
            raise ValueError(f"spreads {tuple(self.sigma.shape)} are not above 0 for {g} groups of {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `gain` [b g t], where there is one."""
        y = y.double()
        side: dict[str, Tensor] = {}
        if self.gain != "none":
            y, side["gain"] = split_gain(y, self.gain)
        rows = (y / self.sigma[:, None].double()).transpose(-2, -1).flatten(1, 2)
        symbols = torch.empty(rows.shape[0], len(self.widths), rows.shape[-1], dtype=torch.int32, device=y.device)
        for width, at, kept in self._by_width:
            _, borders = gaussian_levels(width)
            symbols[:, at] = torch.bucketize(rows[:, kept].contiguous(), uploaded(borders, y.device)).int()
        return Codes(symbols, side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        g, c = self.bits.shape
        b, _, t = codes.symbols.shape
        rows = torch.zeros(b, g * c, t, device=codes.symbols.device)
        for width, at, kept in self._by_width:
            levels, _ = gaussian_levels(width)
            rows[:, kept] = uploaded(levels.float(), rows.device)[codes.symbols[:, at]]
        y = rows.unflatten(1, (g, c)).transpose(-2, -1) * self.sigma[:, None]
        return apply_gain(y, codes.side["gain"]) if self.gain != "none" else y

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return tuple(w for w in self.bits.flatten().tolist() if w > 0)

    @cached_property
    def _by_width(self) -> list[tuple[int, Tensor, Tensor]]:
        kept = self.bits.flatten().nonzero().squeeze(-1)
        widths = self.bits.flatten()[kept]
        found: list[tuple[int, Tensor, Tensor]] = []
        for width in sorted(set(widths.tolist())):
            at = (widths == width).nonzero().squeeze(-1)
            found.append((int(width), at, kept[at]))
        return found


@cache
def gaussian_levels(width: int) -> tuple[Float[Tensor, " levels"], Float[Tensor, " borders"]]:
    """Lloyd–Max levels and inner borders of N(0, 1) at 2^width levels, float64; found by Lloyd's iteration."""
    n = 2**width
    normal = torch.distributions.Normal(0.0, 1.0, validate_args=False)
    quantiles = (torch.arange(n, dtype=torch.float64, device=HOST) + 0.5) / n
    levels = normal.icdf(quantiles) * 1.2
    edge = levels.new_full((1,), torch.inf)
    for _ in range(20 * n + 1000):
        borders = torch.cat([-edge, (levels[1:] + levels[:-1]) / 2, edge])
        density = (-borders.square() / 2).exp() / (2 * torch.pi) ** 0.5
        mass = torch.special.ndtr(borders).diff()
        improved = -density.diff() / mass
        improved = (improved - improved.flip(0)) / 2
        if bool((improved - levels).abs().max() < 1e-13):
            break
        levels = improved
    return levels, (levels[1:] + levels[:-1]) / 2
