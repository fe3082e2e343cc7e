"""Symbols of given widths as one run of bits per token, least significant bit first.

Symbol i occupies the bits from offset Σ_{j<i} w_j; a token takes ⌈Σ w / 8⌉ bytes. Bytes are stored as planes: plane p
holds byte p of every token, so that a kernel reads neighbouring tokens together. Where all widths are 8 the planes are
the symbols.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from karhunen.packing.base import Layout, PackingSpec


@final
@dataclass(frozen=True)
class FixedWidth(PackingSpec):
    """Every token takes the same number of bits, so pages are of fixed size."""

    def fit(self, widths: tuple[int, ...]) -> "BitFields":
        """Fields in the order of the symbols."""
        return BitFields(widths)


@final
@dataclass(frozen=True)
class BitFields(Layout):
    """The layout of one token's bits."""

    widths: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that hold one token; the last may be partly used."""
        return -(-sum(self.widths) // 8)

    def pack(self, symbols: Int[Tensor, "b s t"]) -> UInt8[Tensor, "b p t"]:
        """Symbols to byte planes; ValueError if one does not fit its width."""
        b, s, t = symbols.shape
        assert s == len(self.widths), f"{s} symbols for {len(self.widths)} fields"
        if symbols.numel():
            limit = torch.tensor([1 << w for w in self.widths], device=symbols.device)[:, None]
            if bool(((symbols < 0) | (symbols >= limit)).any()):
                raise ValueError("a symbol does not fit its bit field")
        if all(w == 8 for w in self.widths):
            return symbols.to(torch.uint8)
        planes = torch.zeros(b, self.bytes_per_token + 3, t, dtype=torch.int32, device=symbols.device)
        for i, offset in enumerate(self._offsets):
            shifted = symbols[:, i].int() << (offset % 8)
            for k in range((offset % 8 + self.widths[i] + 7) // 8):
                planes[:, offset // 8 + k] |= (shifted >> (8 * k)) & 0xFF
        return planes[:, : self.bytes_per_token].to(torch.uint8)

    def unpack(self, planes: UInt8[Tensor, "b p t"]) -> Int[Tensor, "b s t"]:
        """The mirror of `pack`."""
        if all(w == 8 for w in self.widths):
            return planes.int()
        b, _, t = planes.shape
        wide = planes.int()
        symbols = torch.empty(b, len(self.widths), t, dtype=torch.int32, device=planes.device)
        for i, offset in enumerate(self._offsets):
            value = wide[:, offset // 8]
            for k in range(1, (offset % 8 + self.widths[i] + 7) // 8):
                value = value | (wide[:, offset // 8 + k] << (8 * k))
            symbols[:, i] = (value >> (offset % 8)) & ((1 << self.widths[i]) - 1)
        return symbols

    @property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.widths, initial=0))[:-1]
