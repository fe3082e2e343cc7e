"""Heavy hitters: tokens that have received most attention so far will receive most again.

    score_n = Σ_m a_mn   over all queries m so far, mean over the group

Source: H2O (arXiv:2306.14048), §4 and Algorithm 1. What a query pays counts from when it comes: a token that was
dropped gets nothing, and those that are left share what it would have got.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.score import Queries, Reads, Score


@final
@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """The sum of the attention weights that a token has received from all queries; older tokens had more of them."""

    @property
    def reads(self) -> Reads:
        """Every forward's."""
        return "always"

    def scores(self, key: Float[Tensor, "b h t d"], queries: Queries | None) -> Float[Tensor, "b h t"]:
        """What the queries of one forward pay."""
        assert queries is not None, "the store hands over every forward's queries"
        paid = sum(w.sum(-2).mean(2) for w in weight_blocks(queries, key))
        assert isinstance(paid, Tensor), "a forward has at least one query"
        return paid
