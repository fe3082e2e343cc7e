"""Symbols of given widths as one run of bits per token, least significant bit first.

Symbol i occupies the bits from offset Σ_{j<i} w_j; a token takes ⌈Σ w / 8⌉ bytes. Bytes are stored as planes: plane p
holds byte p of every token, so that a kernel reads neighbouring tokens together. Where all widths are 8 the planes are
the symbols.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import final

import torch
from jaxtyping import Int, Integer, UInt8
from torch import Tensor

from karhunen.packing.base import Layout, PackingSpec
from karhunen.quantizers.base import MOST_BITS


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

    def check(self, widths: tuple[int, ...]) -> None:
        """The fields are these, each of 0 to 16 bits."""
        if self.widths != widths:
            raise ValueError(f"{len(self.widths)} bit fields do not lay out the {len(widths)} symbols of the quantizer")
        if any(not 0 <= width <= MOST_BITS for width in self.widths):
            raise ValueError(f"bit fields of {min(self.widths)} to {max(self.widths)} bits; use 0 to {MOST_BITS}")

    def pack(self, symbols: Integer[Tensor, "b s t"]) -> UInt8[Tensor, "b p t"]:
        """Symbols to byte planes; ValueError if one does not fit its width."""
        b, s, t = symbols.shape
        assert s == len(self.widths), f"{s} symbols for {len(self.widths)} fields"
        if symbols.dtype == torch.uint8 and self._are_bytes:
            return symbols
        limit = 256 if self._are_bytes else _index(self._limits, symbols.device)[:, None]
        if bool(((symbols < 0) | (symbols >= limit)).any()):
            raise ValueError("a symbol does not fit its bit field")
        if self._are_bytes:
            return symbols.to(torch.uint8)
        planes = torch.zeros(b, self.bytes_per_token + 3, t, dtype=torch.int32, device=symbols.device)
        for alike in self._alike:
            shifted = symbols[:, _at(alike.fields, planes.device)].int() << alike.shift
            for k, reached in enumerate(alike.planes):
                planes[:, _at(reached, planes.device)] |= (shifted >> (8 * k)) & 0xFF
        return planes[:, : self.bytes_per_token].to(torch.uint8)

    def unpack(self, planes: UInt8[Tensor, "b p t"]) -> Int[Tensor, "b s t"]:
        """The mirror of `pack`."""
        if self._are_bytes:
            return planes.int()
        b, _, t = planes.shape
        wide = planes.int()
        symbols = torch.zeros(b, len(self.widths), t, dtype=torch.int32, device=planes.device)
        for alike in self._alike:
            value = wide[:, _at(alike.planes[0], planes.device)]
            for k, reached in enumerate(alike.planes[1:], start=1):
                value = value | (wide[:, _at(reached, planes.device)] << (8 * k))
            symbols[:, _at(alike.fields, planes.device)] = (value >> alike.shift) & ((1 << alike.width) - 1)
        return symbols

    @cached_property
    def _limits(self) -> tuple[int, ...]:
        return tuple(1 << width for width in self.widths)

    @cached_property
    def _are_bytes(self) -> bool:
        return all(width == 8 for width in self.widths)

    @cached_property
    def _alike(self) -> list["_Alike"]:
        """The fields, together where they start at the same bit of their byte and are equally wide."""
        by_place = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        for i, (offset, width) in enumerate(zip(accumulate(self.widths, initial=0), self.widths, strict=False)):
            if width:
                by_place[offset % 8, width].append((i, offset // 8))
        return [
            _Alike(
                shift,
                width,
                _stepped([i for i, _ in fields]),
                tuple(_stepped([byte + k for _, byte in fields]) for k in range((shift + width + 7) // 8)),
            )
            for (shift, width), fields in by_place.items()
        ]


@dataclass(frozen=True)
class _Alike:
    """Fields that one operation packs: no two of them reach the same plane with the same part."""

    shift: int
    width: int
    fields: slice | tuple[int, ...]
    planes: tuple[slice | tuple[int, ...], ...]


def _stepped(places: list[int]) -> slice | tuple[int, ...]:
    """The places as a slice where they are evenly spaced: a view, not a copy."""
    step = places[1] - places[0] if len(places) > 1 else 1
    even = all(b - a == step for a, b in pairwise(places))
    return slice(places[0], places[-1] + 1, step) if even else tuple(places)


def _at(places: slice | tuple[int, ...], device: torch.device) -> slice | Tensor:
    """The places as they index a tensor of this device."""
    return places if isinstance(places, slice) else _index(places, device)


@lru_cache(maxsize=1024)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: the layers of a model are packed alike."""
    return torch.tensor(places, device=device)
