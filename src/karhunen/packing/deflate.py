"""Bit fields whose pages are deflated where they lie: fewer bytes in the store, the same symbols.

    page of n tokens ── bit fields ──▶ planes ── DEFLATE ──▶ bytes of any length

Source: KVTC (arXiv:2511.01815) entropy-codes its quantized components with DEFLATE (RFC 1951). For caches at rest:
reading inflates every page. Planes are deflated one after the other, so that a byte's own distribution is what is
coded.
Here:   zlib at level 9, raw; what it makes may differ between versions of zlib, what comes back does not.
"""

import zlib
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Int, Integer, UInt8
from torch import Tensor

from karhunen.packing.base import Layout, PackingSpec, PageCoder
from karhunen.packing.bit_fields import BitFields
from karhunen.values import refuse_unless_whole

RAW = -15  # raw DEFLATE, window of 32 KiB
LEVEL = 9


@final
@dataclass(frozen=True)
class Deflate(PackingSpec):
    """Pages of `page_tokens` tokens."""

    page_tokens: int = 32

    def __post_init__(self) -> None:
        refuse_unless_whole(page_tokens=self.page_tokens)
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens={self.page_tokens} is not a page; use 1 or more")

    def fit(self, widths: tuple[int, ...]) -> "DeflatedFields":
        """Fields in the order of the symbols."""
        return DeflatedFields(BitFields(widths), DeflatedPages(self.page_tokens))


@final
@dataclass(frozen=True)
class DeflatedPages(PageCoder):
    """DEFLATE of a page's planes, end to end."""

    n_tokens: int

    def __post_init__(self) -> None:
        if self.n_tokens < 1:
            raise ValueError(f"{self.n_tokens} tokens are no page; use 1 or more")

    @property
    def page_tokens(self) -> int:
        """Tokens that are deflated together."""
        return self.n_tokens

    def shrink(self, page: UInt8[Tensor, "p t"]) -> bytes:
        """The page as a raw DEFLATE stream."""
        coder = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW)
        return coder.compress(page.contiguous().cpu().numpy().tobytes()) + coder.flush()

    def grow(self, data: bytes) -> UInt8[Tensor, "p t"]:
        """The mirror of `shrink`."""
        flat = torch.from_numpy(np.frombuffer(zlib.decompress(data, RAW), dtype=np.uint8).copy())
        return flat.reshape(-1, self.n_tokens)


@final
@dataclass(frozen=True)
class DeflatedFields(Layout):
    """The bit fields of a token; `pages` shrinks them in the store."""

    fields: BitFields
    coder: DeflatedPages

    @property
    def pages(self) -> DeflatedPages:
        """What deflates and inflates pages of this layout."""
        return self.coder

    @property
    def bytes_per_token(self) -> int:
        """Before pages are deflated."""
        return self.fields.bytes_per_token

    def check(self, widths: tuple[int, ...]) -> None:
        """As its bit fields."""
        self.fields.check(widths)

    def pack(self, symbols: Integer[Tensor, "b s t"]) -> UInt8[Tensor, "b p t"]:
        """Symbols to byte planes; ValueError if one does not fit its width."""
        return self.fields.pack(symbols)

    def unpack(self, planes: UInt8[Tensor, "b p t"]) -> Int[Tensor, "b s t"]:
        """The mirror of `pack`."""
        return self.fields.unpack(planes)
