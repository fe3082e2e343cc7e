"""How a query becomes coefficients for each block of tokens: the frame of a layer's keys, as kernels read it.

q′_b = Aᵀ R(−n₀) q,     bias_n = (R(−n₀) q)ᵀ (ν + R(n − n₀) μ),     n₀ the first position of n's block
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from jaxtyping import Float
from torch import Tensor


@final
@dataclass(frozen=True)
class Frames:
    """A is `matrix`, ν `offset`, μ `mean` (zeros where the frame has none). `first` and `second` name the two halves of
    each pair that a rotation turns by `frequencies` a position; none where a frame does not turn."""

    matrix: Float[Tensor, "h d c"]
    offset: Float[Tensor, "h d"]
    mean: Float[Tensor, "h d"]
    first: tuple[int, ...]
    second: tuple[int, ...]
    frequencies: tuple[float, ...]
    block_tokens: int | None

    def __post_init__(self) -> None:
        if (self.block_tokens is None) != (not self.frequencies):
            raise ValueError(f"block_tokens={self.block_tokens} with {len(self.frequencies)} frequencies: both or none")
        if not len(self.first) == len(self.second) == len(self.frequencies):
            raise ValueError(f"{len(self.first)} and {len(self.second)} halves for {len(self.frequencies)} frequencies")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens}; give 1 or more")

    @property
    def rest(self) -> tuple[int, ...]:
        """Coordinates that do not turn."""
        turned = {*self.first, *self.second}
        return tuple(i for i in range(self.matrix.shape[1]) if i not in turned)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What a kernel made of these frames, by kernel: filled at first use, never stored."""
        return {}
