"""The rotation R(n) that a model applies to the queries and keys at position n.

    R(n) turns the pair of coordinates i by the angle n · inv_freq[i];   R(m) R(n) = R(m + n)

Source: RoFormer (arXiv:2104.09864), eq. 15. The frequencies are the model's own, scaling included.
Here:   only the rotation; a model's constant attention scaling (yarn) stays in the vector.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.device import on_host


@final
@dataclass(frozen=True)
class Rotary:
    """Rotary position encoding of `2 · len(inv_freq)` coordinates from `offset` on; the others pass unchanged.

    `interleaved` pairs coordinates (2i, 2i+1), as GPT-J and Cohere do; otherwise (i, i + r/2), as Llama does.
    """

    inv_freq: Float[Tensor, " pairs"]
    interleaved: bool = False
    offset: int = 0

    @property
    def n_rotated(self) -> int:
        """How many coordinates turn."""
        return 2 * self.inv_freq.shape[0]

    def rotate(self, x: Float[Tensor, "*batch t d"], positions: Int[Tensor, "*#rows t"]) -> Float[Tensor, "*batch t d"]:
        """R(positions) x, in the precision of x but at least float32. Negative positions undo a rotation."""
        start, end = self.offset, self.offset + self.n_rotated
        if end > x.shape[-1]:
            raise ValueError(f"a rotation of coordinates {start} to {end - 1} does not fit vectors of {x.shape[-1]}")
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        distinct, where = positions, None
        if on_host(positions):  # in a block-relative frame a block is one position; another device would be waited for
            distinct, where = positions.unique(return_inverse=True)
        angle = distinct.double()[..., None] * self.inv_freq.to(x.device).double()
        cos, sin = (part.to(x.dtype) for part in (angle.cos(), angle.sin()))
        cos, sin = (cos, sin) if where is None else (cos[where], sin[where])  # [rows t pairs]
        turned = x[..., start:end]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        if pairs.shape[-1] == x.shape[-1]:
            return pairs
        return torch.cat([x[..., :start], pairs, x[..., end:]], dim=-1)
