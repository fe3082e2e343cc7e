"""Which tokens: every token of a cache is Exact, Coded or Dropped, once.

Quantization fills `Coded`, eviction fills `Dropped`, sinks and recent tokens are `Exact`: one family, one path.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import final


class Place(IntEnum):
    """Where a token is kept."""

    EXACT = 0
    CODED = 1
    DROPPED = 2


@final
@dataclass(frozen=True)
class Partition:
    """Consecutive runs of tokens `(place, start, stop)` that cover 0 … n once; checked when made."""

    runs: tuple[tuple[Place, int, int], ...]

    def __post_init__(self) -> None:
        edges = [(start, stop) for _, start, stop in self.runs]
        if any(start > stop for start, stop in edges) or any(a[1] != b[0] for a, b in pairwise(edges)):
            raise ValueError(f"runs {edges} do not cover the tokens once, in order")
        if edges and edges[0][0] != 0:
            raise ValueError(f"runs start at token {edges[0][0]}, not at 0")

    def count(self, place: Place) -> int:
        """Tokens kept there."""
        return sum(stop - start for kind, start, stop in self.runs if kind is place)

    @property
    def n_tokens(self) -> int:
        """All of them."""
        return self.runs[-1][2] if self.runs else 0
