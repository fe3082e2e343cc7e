"""Keys of small norm draw attention, keys of large norm draw little: the norm alone says whom to drop.

    score_n = −‖k_n‖

Source: Devoto et al. (arXiv:2406.11430), §3: keep the keys of lowest L2 norm.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.windows.score import Queries, Reads, Score


@final
@dataclass(frozen=True)
class KeyNorm(Score):
    """The smaller the L2 norm of a head's key, the more it is worth. A rotation leaves it as it is."""

    @property
    def reads(self) -> Reads:
        """Keys alone."""
        return "never"

    def scores(self, key: Float[Tensor, "b h t d"], queries: Queries | None) -> Float[Tensor, "b h t"]:
        """Minus the norm."""
        return -key.float().norm(dim=-1)
