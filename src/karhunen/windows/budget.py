"""How many tokens a window may hold: a number, or a share of the tokens seen.

Rounded once, here: a share to the nearest token, and to one at least.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from karhunen.values import refuse_unless_whole


class Budget(ABC):
    """A number of tokens per head, once it is known how many were seen."""

    @abstractmethod
    def of(self, n_seen: int) -> int:
        """Tokens that may be held of `n_seen`."""


@final
@dataclass(frozen=True)
class Tokens(Budget):
    """The same number whatever the context."""

    n: int = 1024

    def __post_init__(self) -> None:
        refuse_unless_whole(n=self.n)
        if self.n < 0:
            raise ValueError(f"{self.n} tokens is not a budget; use 0 or more")

    def of(self, n_seen: int) -> int:
        """The same number, however many tokens were seen."""
        return self.n


@final
@dataclass(frozen=True)
class Share(Budget):
    """A part of the tokens seen, sinks included."""

    part: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.part <= 1:
            raise ValueError(f"{self.part} of the tokens is not a budget; use a share above 0, up to 1")

    def of(self, n_seen: int) -> int:
        """To the nearest token."""
        return max(1, round(self.part * n_seen)) if n_seen else 0
