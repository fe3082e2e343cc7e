"""In which coordinates a key is coded: relative to the start n₀ of its block of B positions.

    κ = R(n − n₀) k_pre = R(−n₀) k,      n₀ = B ⌊n / B⌋
    (R(m) q)ᵀ k = (R(m − n₀) q)ᵀ κ

B = 1 is the pre-RoPE key (SPECTRA), B = None (infinite) the post-RoPE key (NOVA-KV). A block-relative key compacts
nearly as well as the first and is read as cheaply as the second: the query turns once per block, never the keys.
The frame is exact for any B, any frequencies and any position offset, since it is undone by the same rotation.

Keys have a large mean before RoPE, which turns with the position after it: a centered frame codes κ − R(n − n₀) μ.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.device import on_host
from karhunen.statistics.rotary import Rotary, distinct

MOST_BLOCK_TOKENS = 1 << 14  # the last block of a read is padded to its length, a turning mean has a column for each


@final
@dataclass(frozen=True)
class RopeFrame:
    """Block-relative rotary frame; `joined` lays the heads of a layer side by side as one vector, `center` takes the
    mean of the unrotated vectors away, turned as they are."""

    block_tokens: int | None = None
    joined: bool = False
    center: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens} is not a block; use 1, 2, ... or None for post-RoPE")
        if self.block_tokens is not None and self.block_tokens > MOST_BLOCK_TOKENS:
            raise ValueError(
                f"block_tokens={self.block_tokens} is more than tables are made for, one place for each token of a "
                f"block; use {MOST_BLOCK_TOKENS} at most, or None for post-RoPE"
            )

    @property
    def needs_rotary(self) -> bool:
        """Whether keys move at all; the post-RoPE frame takes them as they are."""
        return self.block_tokens is not None

    def starts(self, positions: Int[Tensor, "*rows t"]) -> Int[Tensor, "*rows t"]:
        """n₀ of each position; zero throughout for the infinite block."""
        if self.block_tokens is None:
            return torch.zeros_like(positions)
        return positions.div(self.block_tokens, rounding_mode="floor") * self.block_tokens

    def forward(
        self,
        x: Float[Tensor, "b h t d"],
        positions: Int[Tensor, "b t"],
        rotary: Rotary | None,
        mean: Float[Tensor, "h d"] | None = None,
    ) -> Float[Tensor, "b g t e"]:
        """Cached vectors to frame coordinates, float64; `rotary=None` means the model does not rotate them."""
        x = x.double()
        if rotary is not None and self.needs_rotary:
            x = rotary.rotate(x, -self.starts(positions)[:, None])
        if mean is not None:
            x = x - self.turned_mean(mean.double(), positions, rotary)
        return join_heads(x) if self.joined else x

    def inverse(
        self,
        x: Float[Tensor, "b g t e"],
        positions: Int[Tensor, "b t"],
        rotary: Rotary | None,
        n_heads: int,
        mean: Float[Tensor, "h d"] | None = None,
    ) -> Float[Tensor, "b h t d"]:
        """The mirror of `forward`."""
        x = split_heads(x, n_heads) if self.joined else x
        if mean is not None:
            x = x + self.turned_mean(mean.to(x.dtype), positions, rotary)
        if rotary is not None and self.needs_rotary:
            x = rotary.rotate(x, self.starts(positions)[:, None])
        return x

    def turned_mean(
        self, mean: Float[Tensor, "h d"], positions: Int[Tensor, "b t"], rotary: Rotary | None
    ) -> Float[Tensor, "#b h #t d"]:
        """R(n − n₀) μ at each position."""
        if rotary is None:
            return mean[None, :, None]
        where = positions - self.starts(positions)
        if on_host(where):
            offsets, where = distinct(where)
        elif self.block_tokens is not None:
            offsets = torch.arange(self.block_tokens, device=where.device)
        else:
            offsets, where = where.flatten(), torch.arange(where.numel(), device=where.device).view_as(where)
        turned = rotary.rotate(mean[:, None].expand(-1, len(offsets), -1), offsets)  # [h offsets d]
        return turned[:, where].transpose(0, 1)


def join_heads(x: Float[Tensor, "*b h t d"]) -> Float[Tensor, "*b 1 t hd"]:
    """Heads side by side: one vector of h·d coordinates per token."""
    return x.transpose(-3, -2).flatten(-2).unsqueeze(-3)


def split_heads(x: Float[Tensor, "*b 1 t hd"], n_heads: int) -> Float[Tensor, "*b h t d"]:
    """The mirror of `join_heads`."""
    return x.squeeze(-3).unflatten(-1, (n_heads, -1)).transpose(-3, -2)
