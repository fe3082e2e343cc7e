"""The stored gain makes the reconstruction as long as the vector was.

    γ' = γ ‖y‖ / ‖ŷ‖,    so that ‖ŷ'‖ = ‖y‖

Source: the "nc" presets of TurboQuant in vLLM; re-normalization after a deterministic scalar quantizer is EDEN's
(arXiv:2108.08842). Levels that are means of their cells shorten a vector; a short key reads as a weak one.
Costs nothing: symbols stay as they are, the gain takes another value.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import Codes, Quantizer, QuantizerData, QuantizerSpec, as_half
from karhunen.quantizers.lloyd_max import LloydMax, LloydMaxQuantizer


@final
@dataclass(frozen=True)
class NormCorrected(QuantizerSpec):
    """`inner` with its float16 gain corrected."""

    inner: LloydMax = LloydMax()

    def __post_init__(self) -> None:
        if self.inner.gain != "float16":
            raise ValueError(f"gain={self.inner.gain!r} cannot hold a corrected norm; use LloydMax(gain='float16')")

    @property
    def needs_moments(self) -> bool:  # type: ignore[override]
        """Whether `inner` needs them."""
        return self.inner.needs_moments

    def cost(self, c: int) -> RateCost:
        """What `inner` costs; the norm is stored anyway."""
        return self.inner.cost(c)

    def fit(self, data: QuantizerData) -> "NormCorrectedQuantizer":
        """Fits `inner`."""
        return NormCorrectedQuantizer(self.inner.fit(data))


@final
@dataclass(frozen=True)
class NormCorrectedQuantizer(Quantizer):
    """Symbols and decoding of `inner`."""

    inner: LloydMaxQuantizer

    @property
    def widths(self) -> tuple[int, ...]:
        """Those of `inner`."""
        return self.inner.widths

    def check(self, g: int, c: int) -> None:
        """What `inner` refuses."""
        self.inner.check(g, c)
        if self.inner.gain != "float16":
            raise ValueError(f"gain={self.inner.gain!r} cannot hold a corrected norm")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `gain` [b g t], corrected."""
        codes = self.inner.encode(y)
        length = self.inner.decode(codes).double().square().sum(-1).sqrt()
        factor = y.double().square().sum(-1).sqrt() / torch.where(length > 0, length, 1.0)
        return Codes(codes.symbols, {"gain": as_half(codes.side["gain"].double() * factor)})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        return self.inner.decode(codes)
