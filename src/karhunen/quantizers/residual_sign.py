"""One bit per coefficient of a quantizer's residual, which makes inner products unbiased.

    r = y − ŷ,   stored: sign(S r) and ‖r‖,    ŷ' = ŷ + √(π/2) / c · ‖r‖ · Sᵀ sign(S r),    E_S ⟨q, ŷ'⟩ = ⟨q, y⟩

S is a c × c Gaussian matrix from a seed. Source: QJL (arXiv:2406.03482), used on the residual by TurboQuant_prod
(arXiv:2504.19874) Algorithm 2. The squared error grows (by π/2 of the residual's): it is the mean over S that is right.
"""

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.device import HOST
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half
from karhunen.quantizers.lloyd_max import LloydMax, LloydMaxQuantizer

NORM_BITS = 16


@final
@dataclass(frozen=True)
class ResidualSign(QuantizerSpec):
    """`inner` at one bit less than asked for, and the sign of a projection for each coefficient."""

    inner: LloydMax = LloydMax()
    seed: int = 0

    @property
    def needs_moments(self) -> bool:  # type: ignore[override]
        """Whether `inner` needs them."""
        return self.inner.needs_moments

    def cost(self, c: int) -> RateCost:
        """A norm more than `inner`."""
        inner = self.inner.cost(c)
        return replace(inner, token_bits=inner.token_bits + NORM_BITS)

    def fit(self, data: QuantizerData) -> "ResidualSignQuantizer":
        """ValueError if a coefficient has no bit for its sign."""
        if bool((data.rates < 1).any()):
            raise ValueError("a sign takes one bit of every coefficient; use Uniform(1) or more")
        c = data.rates.shape[-1]
        generator = torch.Generator(HOST).manual_seed(self.seed)
        projection = (
            torch.randn(c, c, generator=generator, dtype=torch.float64, device=HOST).float().to(data.rates.device)
        )
        return ResidualSignQuantizer(self.inner.fit(replace(data, rates=data.rates - 1)), projection)


@final
@dataclass(frozen=True)
class ResidualSignQuantizer(Quantizer):
    """Symbols of `inner`, then one bit for each coefficient, head group by head group."""

    inner: LloydMaxQuantizer
    projection: Float[Tensor, "c c"]

    @property
    def widths(self) -> tuple[int, ...]:
        """Of `inner`, and ones."""
        return (*self.inner.widths, *(1,) * self.inner.bits.numel())

    def check(self, g: int, c: int) -> None:
        """As `inner`, and a square projection."""
        self.inner.check(g, c)
        if self.projection.shape != (c, c):
            raise ValueError(f"a projection {tuple(self.projection.shape)} is not that of {c} coefficients")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: that of `inner`, and `residual_norm` [b g t]."""
        codes = self.inner.encode(y)
        rest = y.double() - self.inner.decode(codes).double()
        signs = (rest @ self.projection.mT.double() >= 0).int().transpose(-2, -1).flatten(1, 2)
        norm = as_half(rest.square().sum(-1).sqrt())
        return Codes(torch.cat([codes.symbols, signs], dim=1), {**codes.side, "residual_norm": norm})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        g, c = self.inner.bits.shape
        n_inner = len(self.inner.widths)
        y = self.inner.decode(Codes(codes.symbols[:, :n_inner], codes.side))
        signs = codes.symbols[:, n_inner:].unflatten(1, (g, c)).transpose(-2, -1).float() * 2 - 1
        length = codes.side["residual_norm"].float()[..., None] * (math.sqrt(math.pi / 2) / c)
        return y + length * (signs @ self.projection)
