"""A store keeps byte strings under keys. It knows nothing of what they are.

`get` is the bytes or None; whatever else goes wrong is the backend's own exception, which `Counted` makes a miss.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

SAFE = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.")


class Store(ABC):
    """Byte strings by key. Keys are letters, digits, `-`, `_` and `.`, and do not begin with a dot."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """What was put last under the key, whole, or None."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under the key. Once this returns, `get` gives it, unless it was dropped to make room."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether something is kept under the key."""

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        """As `has` for each key, in their order; a store behind a network asks once for all."""
        return [self.has(key) for key in keys]

    @abstractmethod
    def remove(self, key: str) -> None:
        """Keep nothing under the key any more; nothing happens if nothing was."""

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """Of all that is kept, in no order that a caller may rely on."""


def check_key(key: str) -> None:
    """ValueError for what could name a place outside the store."""
    if not 0 < len(key) <= 128 or set(key) - SAFE or key[0] == ".":
        raise ValueError(f"{key!r} is not a key: use up to 128 letters, digits, - _ and . (not first)")


def check_size(data: bytes, max_bytes: int | None) -> None:
    """ValueError for what no amount of dropping makes room for."""
    if max_bytes is not None and len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes do not fit a store of {max_bytes}; give it more room")
