"""Evenly spaced points between a low and a high end.

    symbol = round((y − low) / step),   step = (high − low) / (2^w − 1),   ŷ = low + step · symbol

`PerToken(group)`: one range for each `group` neighbouring coefficients of a token (int4, QuaRot; SPECTRA's latent).
`PerChannel(block_tokens)`: one range for a coefficient over a block of tokens (KIVI's keys, arXiv:2402.02750).
Low and step are stored as float16 and rounded before the symbols are chosen, so decoding sees what encoding saw.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.base import (
    HALF_MAX,
    MOST_BITS,
    Codes,
    Quantizer,
    QuantizerData,
    QuantizerSpec,
    as_half,
    divisors,
)

RANGE_BITS = 32  # a float16 low end and a float16 step


@final
@dataclass(frozen=True)
class PerToken:
    """One range per token and `group` neighbouring coefficients; None: all of the head group."""

    group: int | None = None


@final
@dataclass(frozen=True)
class PerChannel:
    """One range per coefficient and block of tokens."""

    block_tokens: int


@final
@dataclass(frozen=True)
class Affine(QuantizerSpec):
    """Asymmetric uniform quantizer. `clip` < 1 takes that quantile of a range's values as its high end (and 1 − clip
    as its low end), which costs the outliers and helps the rest. A group that does not divide the vector becomes the
    largest divisor below it if `fit_group`, and is refused otherwise."""

    granularity: PerToken | PerChannel = PerToken()
    clip: float = 1.0
    fit_group: bool = False

    def __post_init__(self) -> None:
        if not 0.5 < self.clip <= 1:
            raise ValueError(f"clip={self.clip} is not a quantile above one half; use 0.5 < clip <= 1")
        size = self.granularity.group if isinstance(self.granularity, PerToken) else self.granularity.block_tokens
        if size is not None and size < 1:
            raise ValueError(f"a range over {size} values is empty; use 1 or more")

    def cost(self, c: int) -> RateCost:
        """Integer widths by group, each with its range; without a clip, one bit is worse than none: both of its points
        are ends of the range."""
        least = 2 if self.clip == 1 else 1
        if isinstance(self.granularity, PerChannel):
            return RateCost(1, RANGE_BITS / self.granularity.block_tokens, least_bits=least)
        return RateCost(self._group(c), RANGE_BITS, least_bits=least)

    def fit(self, data: QuantizerData) -> "AffineQuantizer":
        """Widths from the rates; nothing else is learned."""
        c = data.rates.shape[-1]
        if isinstance(self.granularity, PerChannel):
            return AffineQuantizer(data.rates.round().int(), 1, self.granularity.block_tokens, self.clip)
        return AffineQuantizer(data.rates.round().int(), self._group(c), 1, self.clip)

    def _group(self, c: int) -> int:
        assert isinstance(self.granularity, PerToken), "only tokens have groups of coefficients"
        group = self.granularity.group or c
        if c % group and self.fit_group:
            return max(k for k in divisors(c) if k <= group)
        if c % group:
            raise ValueError(f"group={group} does not divide the {c} coefficients of a vector; use {divisors(c)}")
        return group


@final
@dataclass(frozen=True)
class AffineQuantizer(Quantizer):
    """Ranges over `block_tokens` tokens × `group` coefficients; coefficients of width 0 are dropped."""

    bits: Int[Tensor, "g c"]
    group: int
    block_tokens: int
    clip: float

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the kept coefficients, head group by head group."""
        return self._widths

    @property
    def granule_tokens(self) -> int:
        """Tokens are coded in whole blocks of so many."""
        return self.block_tokens

    def check(self, g: int, c: int) -> None:
        """Widths of 0 to 16 bits, alike within a range."""
        if self.bits.shape != (g, c) or not 0 <= int(self.bits.min()) <= int(self.bits.max()) <= MOST_BITS:
            raise ValueError(f"widths {tuple(self.bits.shape)} are not {g} groups of {c}, each 0 to {MOST_BITS}")
        kept = self.bits.flatten()[self._kept_index]
        if self.group < 1 or self.block_tokens < 1 or len(kept) % self.group or not 0.5 < self.clip <= 1:
            raise ValueError(f"ranges of {self.group} of {len(kept)} coefficients, {self.block_tokens} tokens")
        if bool((kept.view(-1, self.group) != kept[:: self.group, None]).any()):
            raise ValueError("coefficients of one range have several widths")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `low` and `step`, [b, kept ranges, t / block]."""
        kept = self._kept(y.double().clamp(-HALF_MAX, HALF_MAX))  # [b ranges blocks block*group]
        low, high = self._ends(kept)
        top = (2.0 ** self._range_bits[:, None]) - 1  # [ranges 1]
        low16, step16 = as_half(low), as_half((high - low) / top)
        low, step = low16.double()[..., None], step16.double()[..., None]
        scaled = torch.where(step > 0, (kept - low) / torch.where(step > 0, step, 1.0), 0.0)
        symbols = scaled.round().clamp_min(0).minimum(top[..., None]).int()
        return Codes(self._to_rows(symbols), {"low": low16, "step": step16})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        symbols = self._from_rows(codes.symbols)
        kept = codes.side["low"].float()[..., None] + codes.side["step"].float()[..., None] * symbols
        rows = self._to_rows(kept)  # [b kept t]
        g, c = self.bits.shape
        full = rows.new_zeros(rows.shape[0], g * c, rows.shape[-1])
        full[:, self._kept_index] = rows
        return full.unflatten(1, (g, c)).transpose(-2, -1)

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return tuple(w for w in self.bits.flatten().tolist() if w > 0)

    @cached_property
    def _kept_index(self) -> Tensor:
        return self.bits.flatten().nonzero().squeeze(-1)

    @cached_property
    def _range_bits(self) -> Tensor:
        return self.bits.flatten()[self._kept_index][:: self.group].double()

    def _ends(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        if self.clip == 1:
            return kept.amin(-1), kept.amax(-1)
        low, high = kept.quantile(_ends_of(self.clip, kept.dtype, kept.device), dim=-1)
        return low, high

    def _kept(self, y: Tensor) -> Tensor:
        rows = y.transpose(-2, -1).flatten(1, 2)[:, self._kept_index]
        return self._from_rows(rows)

    def _from_rows(self, rows: Tensor) -> Tensor:
        blocks = rows.unflatten(1, (-1, self.group)).unflatten(-1, (-1, self.block_tokens))
        return blocks.transpose(2, 3).flatten(-2)  # [b ranges blocks group*block]

    def _to_rows(self, kept: Tensor) -> Tensor:
        blocks = kept.unflatten(-1, (self.group, self.block_tokens)).transpose(2, 3)
        return blocks.flatten(-2).flatten(1, 2)  # [b kept t]


@lru_cache(maxsize=64)
def _ends_of(clip: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " 2"]:
    """Made once for a device, which the host would else wait for at every page."""
    return torch.tensor([1 - clip, clip], dtype=dtype, device=device)
