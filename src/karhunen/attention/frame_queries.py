"""What a query becomes before it meets coded keys: one vector of coefficients for each block, and a term per token.

    q'_b = Aᵀ R(−n₀) q,     bias_n = (R(−n₀) q)ᵀ (ν + R(n − n₀) μ)

A is the inverse transform, ν its offset, μ the frame's mean.

R(−n₀) q is linear in the cosines and sines of n₀, so all blocks of a query are one product,
[blocks, cos | sin | 1] · [cos | sin | 1, coefficients], whose right side is made of the query once.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.attention.absorbed import InverseMap
from karhunen.codec import SideCodec
from karhunen.device import HOST, uploaded
from karhunen.kernels.byte_attention.inputs import row_lanes
from karhunen.statistics.rotary import Rotary

CACHED_CHUNKS = 64  # tables of cosines kept: as many chunks of the longest cache, shared by layers that turn alike


@final
@dataclass(frozen=True)
class Turned:
    """Columns of `[h d c]` arranged for rotation: the halves of each pair and what does not turn."""

    first: Float[Tensor, "h p c"]
    second: Float[Tensor, "h p c"]
    rest: Float[Tensor, "h s c"]


@final
@dataclass(frozen=True)
class LaidOut:
    """Right sides of the products with `FrameQueries.blocks`; s = 1 without rotation. The rows of a bias lie side by
    side, `row_lanes` of them, as a kernel adds them."""

    queries: Float[Tensor, "b h r s c"]
    bias: Float[Tensor, "b h s w"]

    def __getitem__(self, rows: slice) -> "LaidOut":
        return LaidOut(self.queries[rows], self.bias[rows])


@final
@dataclass(frozen=True)
class FrameQueries:
    """One layer's keys. `bias` has a column per offset in the block where the mean turns, else one, else none."""

    matrix: Float[Tensor, "h d c"]
    bias: Float[Tensor, "h d k"]
    rotary: Rotary | None
    block_tokens: int | None

    @classmethod
    def of(cls, side: SideCodec, inverse: InverseMap, dtype: torch.dtype) -> "FrameQueries":
        """ValueError where the mean of an endless frame turns: its term has no block to repeat in."""
        turning = side.rotary is not None and side.frame.needs_rotary
        offset = inverse.offset[..., None]
        if side.mean is not None:
            mean = side.mean.to(offset)
            if side.rotary is not None and not turning:
                raise ValueError("the mean of a post-RoPE frame turns with every position")
            if turning:
                assert side.rotary is not None and side.frame.block_tokens is not None, "a turning frame has blocks"
                places = torch.arange(side.frame.block_tokens, device=offset.device)
                turned = side.rotary.rotate(mean[:, None].expand(-1, len(places), -1), places)
                offset = offset + turned.mT.to(offset.dtype)
            else:
                offset = offset + mean[..., None]
        bias = offset if bool(offset.any()) else offset[..., :0]
        return cls(
            inverse.matrix.mT.to(dtype).contiguous(),
            bias.to(dtype).contiguous(),
            side.rotary if turning else None,
            side.frame.block_tokens if turning else None,
        )

    def with_columns(self, index: Int[Tensor, "h c"]) -> "FrameQueries":
        """Coefficients in this order, which may repeat them."""
        d = self.matrix.shape[1]
        return replace(self, matrix=self.matrix.gather(2, index[:, None].expand(-1, d, -1)).contiguous())

    def lay_out(self, query: Float[Tensor, "b h r d"]) -> "LaidOut":
        """The right sides of the two products, for all blocks."""
        r = query.shape[2]
        bias = self._turned_back(query, self._bias_columns).permute(0, 1, 3, 4, 2)
        by_row = bias.new_zeros(*bias.shape[:-1], row_lanes(r))
        by_row[..., :r] = bias
        return LaidOut(self._turned_back(query, self._matrix_columns), by_row.flatten(3))

    def _turned_back(self, query: Float[Tensor, "b h r d"], columns: Turned) -> Float[Tensor, "b h r s c"]:
        """R(−n₀) q against the columns, apart for cosines, sines and what does not turn."""
        if self.rotary is None:
            return (query @ columns.rest)[..., None, :]
        x, y, rest = _pairs(query, self.rotary)
        p, c = columns.first.shape[-2:]
        made = query.new_empty(*query.shape[:3], 2 * p + self._has_rest, c)
        x, y, first, second = x[..., None], y[..., None], columns.first[:, None], columns.second[:, None]
        # R(−n₀) turns the pair (x, y) to (x cos + y sin, y cos − x sin)
        torch.mul(x, first, out=made[..., :p, :]).addcmul_(y, second)
        torch.mul(y, first, out=made[..., p : 2 * p, :]).addcmul_(x, second, value=-1)
        if self._has_rest:
            made[..., 2 * p, :] = rest @ columns.rest
        return made

    def blocks(self, first: int, n: int, dtype: torch.dtype) -> Float[Tensor, "n s"]:
        """The left side for blocks `first` … `first + n`."""
        if self.rotary is None:
            return torch.ones(1, 1, dtype=dtype, device=self.matrix.device)
        assert self.block_tokens is not None, "a turning frame has blocks"
        angles = _angles(self._frequencies, self.block_tokens, first, n, dtype, self.matrix.device)
        return angles if self._has_rest else angles[:, :-1]

    @cached_property
    def _frequencies(self) -> tuple[float, ...]:
        assert self.rotary is not None, "only a rotation has frequencies"
        return tuple(self.rotary.inv_freq.double().tolist())

    @cached_property
    def _has_rest(self) -> bool:
        return self._matrix_columns.rest.shape[1] > 0

    @cached_property
    def _matrix_columns(self) -> Turned:
        return self._turned(self.matrix)

    @cached_property
    def _bias_columns(self) -> Turned:
        return self._turned(self.bias)

    def _turned(self, columns: Float[Tensor, "h d c"]) -> Turned:
        if self.rotary is None:
            return Turned(columns[:, :0], columns[:, :0], columns)
        return Turned(*(x.mT.contiguous() for x in _pairs(columns.mT, self.rotary)))


def _pairs(x: Float[Tensor, "*b d"], rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    start, end = rotary.offset, rotary.offset + rotary.n_rotated
    turned = x[..., start:end]
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned.chunk(2, dim=-1)
    return a, b, torch.cat([x[..., :start], x[..., end:]], dim=-1)


@lru_cache(maxsize=CACHED_CHUNKS)
def _angles(
    frequencies: tuple[float, ...], block_tokens: int, first: int, n: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Made on the host, for any device: the copy is not waited for."""
    starts = torch.arange(first, first + n, dtype=torch.float64, device=HOST) * block_tokens
    angle = starts[:, None] * torch.tensor(frequencies, dtype=torch.float64, device=HOST)
    made = torch.cat([angle.cos(), angle.sin(), angle.new_ones(n, 1)], dim=-1).to(dtype)
    return uploaded(made, device)
