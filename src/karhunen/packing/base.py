"""Which bytes: a `PackingSpec` lays symbols of given widths out as byte planes `[b p t]`."""

from abc import ABC, abstractmethod

from jaxtyping import Int, Integer, UInt8
from torch import Tensor


class PageCoder(ABC):
    """Makes a page of tokens smaller where it lies in a store; attention reads what `grow` gives back."""

    @property
    @abstractmethod
    def page_tokens(self) -> int:
        """Tokens of a page."""

    @abstractmethod
    def shrink(self, page: UInt8[Tensor, "p t"]) -> bytes:
        """The bytes that are stored."""

    @abstractmethod
    def grow(self, data: bytes) -> UInt8[Tensor, "p t"]:
        """The mirror of `shrink`."""


class Layout(ABC):
    """The layout of a token's bytes; `unpack(pack(s)) == s`, bit for bit."""

    @property
    def pages(self) -> PageCoder | None:
        """How whole pages are stored; None where every token's bytes lie as they are."""
        return None

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that hold one token."""

    @abstractmethod
    def check(self, widths: tuple[int, ...]) -> None:
        """ValueError unless it lays out symbols of these widths."""

    @abstractmethod
    def pack(self, symbols: Integer[Tensor, "b s t"]) -> UInt8[Tensor, "b p t"]:
        """Symbols to bytes; ValueError if one does not fit its width."""

    @abstractmethod
    def unpack(self, planes: UInt8[Tensor, "b p t"]) -> Int[Tensor, "b s t"]:
        """The mirror of `pack`."""


class PackingSpec(ABC):
    """What was asked for."""

    @abstractmethod
    def fit(self, widths: tuple[int, ...]) -> Layout:
        """The layout for symbols of these widths."""
