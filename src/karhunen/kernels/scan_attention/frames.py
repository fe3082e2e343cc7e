"""How a query becomes coefficients for each block of tokens: the frame of a layer's keys, as kernels read it.

q′_b = Aᵀ R(−n₀) q,     bias_n = (R(−n₀) q)ᵀ (ν + R(n − n₀) μ),     n₀ the first position of n's block
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens


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


def require_agreement(
    query: Tensor, keys: CodedTokens, values: CodedTokens, frames: Frames, mask: Tensor | None
) -> None:
    """ValueError unless the shapes belong together."""
    b, h, _, d = query.shape
    if frames.matrix.shape[:2] != (h, d) or frames.matrix.shape[2] != keys.tables.n_coefficients:
        raise ValueError(
            f"frames of shape {tuple(frames.matrix.shape)} for {h} heads of {d} and {keys.tables.n_coefficients} "
            "coefficients; [heads, coordinates, coefficients] is wanted"
        )
    for name, side in (("keys", keys), ("values", values)):
        wanted = (b, keys.n_tokens)
        if (len(side.codes), side.n_tokens) != wanted or side.tables.n_heads not in (1, h):
            raise ValueError(
                f"{name} hold batch {len(side.codes)}, {side.tables.n_heads} heads, {side.n_tokens} tokens; batch "
                f"{wanted[0]}, {h} heads or joined ones, {wanted[1]} tokens are wanted"
            )
    if keys.tables.n_heads != values.tables.n_heads:
        raise ValueError(f"keys of {keys.tables.n_heads} heads, values of {values.tables.n_heads}; give the same")
    if mask is not None and mask.shape != (b, keys.n_tokens):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; {(b, keys.n_tokens)} is wanted")
