"""Per-channel ranges, and a few more bits for the channels that vary most in a block: chosen anew for every block.

    coarse = ⌊fine / 2^e⌋ for every channel (b bits),   fine mod 2^e for the chosen ones (e bits),   fine: b + e bits

Source: Kitty (arXiv:2511.18643): 2-bit keys, a small fraction of the channels of a page at 4 bits, each page split
into two tensors of one width, so that no token's layout depends on the choice. Here: the width of a channel's range
ranks it, since its error is proportional; a token takes one byte string, chosen channels last, their indices once per
block.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.allocation.base import RateCost
from karhunen.quantizers.affine import RANGE_BITS
from karhunen.quantizers.base import HALF_MAX, Codes, Quantizer, QuantizerData, QuantizerSpec, as_half


@final
@dataclass(frozen=True)
class Boosted(QuantizerSpec):
    """`share` of each head group's coefficients get `extra_bits` more than the rate, in blocks of `block_tokens`."""

    block_tokens: int = 32
    share: float = 0.125
    extra_bits: int = 2

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.extra_bits < 1:
            raise ValueError(f"block_tokens={self.block_tokens} and extra_bits={self.extra_bits} must be 1 or more")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} of the coefficients is not above 0 and at most 1")

    def cost(self, c: int) -> RateCost:
        """A range per coefficient and block; the boost and its indices on top."""
        n = self._n_chosen(c)
        boost = n * (self.extra_bits + 16 / self.block_tokens)
        return RateCost(group=1, overhead_bits=RANGE_BITS / self.block_tokens, token_bits=boost)

    def fit(self, data: QuantizerData) -> "BoostedQuantizer":
        """Nothing is learned; ValueError unless every rate is the same."""
        g, c = data.rates.shape
        bits = int(data.rates.max().round())
        if bool((data.rates != bits).any()) or not 1 <= bits <= 8:
            raise ValueError("boosted channels share one rate of 1 to 8 bits; use Uniform(2)")
        return BoostedQuantizer(g, c, bits, self.extra_bits, self._n_chosen(c), self.block_tokens)

    def _n_chosen(self, c: int) -> int:
        return max(1, round(self.share * c))


@final
@dataclass(frozen=True)
class BoostedQuantizer(Quantizer):
    """Symbols: `bits` for every coefficient, then `extra_bits` for the `n_chosen` of each head group."""

    g: int
    c: int
    bits: int
    extra_bits: int
    n_chosen: int
    block_tokens: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Coarse, then extra."""
        return (*(self.bits,) * (self.g * self.c), *(self.extra_bits,) * (self.g * self.n_chosen))

    @property
    def granule_tokens(self) -> int:
        """Tokens are coded in whole blocks of so many."""
        return self.block_tokens

    def check(self, g: int, c: int) -> None:
        """Sizes that belong together, and widths of 1 to 8 bits."""
        widths = self.bits, self.extra_bits
        if (self.g, self.c) != (g, c) or not 1 <= min(widths) <= max(widths) <= 8 or self.block_tokens < 1:
            raise ValueError(f"{self.g} groups of {self.c} at {widths} bits are not {g} groups of {c} at 1 to 8")
        if not 1 <= self.n_chosen <= c:
            raise ValueError(f"{self.n_chosen} of {c} coefficients cannot be chosen")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `low` and `step` [b g·c blocks], `chosen` [b g·n blocks]."""
        x = y.double().clamp(-HALF_MAX, HALF_MAX).unflatten(2, (-1, self.block_tokens))  # [b g blocks block c]
        low, high = x.amin(3), x.amax(3)
        order = (high - low).sort(dim=-1, descending=True, stable=True).indices
        chosen = order[..., : self.n_chosen].sort(-1).values  # [b g blocks n]
        top = 2 ** (self.bits + self.extra_bits * self._mark(chosen)) - 1
        low16, step16 = as_half(low), as_half((high - low) / top)
        base, step = low16.double()[..., None, :], step16.double()[..., None, :]
        scaled = torch.where(step > 0, (x - base) / torch.where(step > 0, step, 1.0), 0.0)
        fine = scaled.round().clamp_min(0).minimum(top[..., None, :]).int()
        mark = self._mark(chosen)[..., None, :]
        coarse = torch.where(mark > 0, fine >> self.extra_bits, fine)
        extra = (fine & ((1 << self.extra_bits) - 1)).gather(-1, self._by_token(chosen))
        symbols = torch.cat([_rows(coarse.flatten(2, 3)), _rows(extra.flatten(2, 3))], dim=1)
        return Codes(symbols, {"low": _rows(low16), "step": _rows(step16), "chosen": _rows(chosen.to(torch.int16))})

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        n = self.g * self.c
        coarse, extra = (
            part.unflatten(1, (self.g, -1)).transpose(-2, -1).unflatten(2, (-1, self.block_tokens))
            for part in (codes.symbols[:, :n], codes.symbols[:, n:])
        )
        low, step, chosen = (
            codes.side[name].unflatten(1, (self.g, -1)).transpose(-2, -1) for name in ("low", "step", "chosen")
        )
        mark = self._mark(chosen.long())[..., None, :]
        added = torch.zeros_like(coarse).scatter(-1, self._by_token(chosen.long()), extra)
        fine = torch.where(mark > 0, (coarse << self.extra_bits) + added, coarse)
        return (low.float()[..., None, :] + step.float()[..., None, :] * fine).flatten(2, 3)

    def _mark(self, chosen: Int[Tensor, "b g blocks n"]) -> Int[Tensor, "b g blocks c"]:
        """1 at the chosen coefficients, 0 elsewhere."""
        return chosen.new_zeros(*chosen.shape[:-1], self.c).scatter(-1, chosen, 1)

    def _by_token(self, chosen: Int[Tensor, "b g blocks n"]) -> Int[Tensor, "b g blocks block n"]:
        return chosen[..., None, :].expand(*chosen.shape[:-1], self.block_tokens, self.n_chosen)


def _rows(x: Tensor) -> Tensor:
    """[b g t c] as [b g·c t]."""
    return x.transpose(-2, -1).flatten(1, 2).clone(memory_format=torch.contiguous_format)
