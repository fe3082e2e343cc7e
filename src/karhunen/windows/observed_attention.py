"""What the end of the prompt attends to, answers will attend to: its queries vote, and neighbours are kept together.

    vote_n = Σ_{m in the last w queries} a_mn,    score_n = mean over the group of pool(vote)_n

Source: SnapKV (arXiv:2404.14469), §4 and Listing 1: `w` is its observation window, the pooling its clustering.
Here:   the query heads of a group are averaged after pooling, as in kvpress; the paper's models have one head each.
"""

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from karhunen.values import refuse_unless_one_of, refuse_unless_whole
from karhunen.windows.attention_weights import weight_blocks
from karhunen.windows.score import Queries, Reads, Score


@final
@dataclass(frozen=True)
class ObservedAttention(Score):
    """Votes of the prompt's last `queries` queries, pooled over `kernel` neighbouring tokens by `pooling`."""

    queries: int = 32
    kernel: int = 7
    pooling: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        refuse_unless_whole(queries=self.queries, kernel=self.kernel)
        refuse_unless_one_of("pooling", self.pooling, ("max", "mean"))
        if self.queries < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"queries={self.queries}, kernel={self.kernel}: use 1 query or more and an odd kernel")

    @property
    def reads(self) -> Reads:
        """The prompt's."""
        return "once"

    @property
    def newest(self) -> int:
        """Those who vote are not voted on."""
        return self.queries

    def scores(self, key: Float[Tensor, "b h t d"], queries: Queries | None) -> Float[Tensor, "b h t"]:
        """Zero for the tokens that vote."""
        assert queries is not None, "the store hands over the prompt's queries"
        n_voting = min(self.queries, queries.rows.shape[2])
        votes = sum(w.sum(-2) for w in weight_blocks(queries, key, n_voting))
        assert isinstance(votes, Tensor), "a forward has at least one query"
        old = votes[..., : key.shape[2] - n_voting]  # [b h q t]
        scores = torch.zeros(key.shape[:3], device=key.device)
        if old.shape[-1]:
            pool, half = (max_pool1d if self.pooling == "max" else avg_pool1d), self.kernel // 2
            pooled = pool(old.flatten(0, 1), self.kernel, stride=1, padding=half)  # the mean's padding counts as zeros
            scores[..., : old.shape[-1]] = pooled.unflatten(0, key.shape[:2]).mean(2)
        return scores
