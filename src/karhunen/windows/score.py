"""What a token is worth to a head: the score by which a window chooses whom to keep. The highest stay.

A score looks at the keys alone, or at the attention that queries pay to them. Heads of one KV head's query group are
averaged: they read the same key. Scores are compared within a head and never between heads.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

from jaxtyping import Float
from torch import Tensor

Reads = Literal["never", "once", "always"]


@final
@dataclass(frozen=True)
class Queries:
    """The queries, after RoPE, of a layer's `m` newest tokens, and how they read its keys: all that shapes softmax."""

    rows: Float[Tensor, "b q m d"]
    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, " q"] | None = None


class Score(ABC):
    """One score per token and KV head."""

    @property
    @abstractmethod
    def reads(self) -> Reads:
        """Which forwards' queries are looked at: none, the first one's (the prompt), or all."""

    @property
    def newest(self) -> int:
        """Tokens at the end that have no score of their own and have to be kept as recent ones."""
        return 0

    @abstractmethod
    def scores(self, key: Float[Tensor, "b h t d"], queries: Queries | None) -> Float[Tensor, "b h t"]:
        """Of each token held, in float32; `queries` are None where `reads` is never.

        Where `reads` is always, these are what one forward adds to the scores so far.
        """
