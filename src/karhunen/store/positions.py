"""Where the tokens of a cache stand: the position of token i of row r is i − offset, piecewise in i.

A row padded on the left by p tokens has offset p. Offsets may change between two appends (a new turn with other
positions); tokens keep the offset they came with, so what was encoded decodes the same for ever.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor


@final
@dataclass(frozen=True)
class Positions:
    """Runs `(first token index, offsets [b])`; no run means offset 0 throughout."""

    runs: tuple[tuple[int, Int[Tensor, " b"]], ...] = ()

    def starting(self, index: int, offsets: Int[Tensor, " b"]) -> "Positions":
        """Tokens from `index` on have these offsets."""
        last = self.runs[-1][1] if self.runs else torch.zeros_like(offsets)
        if last.shape == offsets.shape and bool((last == offsets).all()):
            return self
        return Positions((*(run for run in self.runs if run[0] < index), (index, offsets)))

    def until(self, index: int) -> "Positions":
        """What is known of the tokens before `index`."""
        return Positions(tuple(run for run in self.runs if run[0] < index))

    def at(self, start: int, stop: int, batch: int, device: torch.device) -> Int[Tensor, "b t"]:
        """Positions of tokens `start` … `stop`."""
        index = torch.arange(start, stop, device=device)
        offset = torch.zeros(batch, stop - start, dtype=torch.int64, device=device)
        for first, offsets in self.runs:
            offset = torch.where(index >= first, offsets.to(device)[:, None], offset)
        return index - offset

    def select(self, rows: Int[Tensor, " rows"]) -> "Positions":
        """The given rows of the batch, in that order."""
        return Positions(tuple((first, o.index_select(0, rows.to(o.device))) for first, o in self.runs))
