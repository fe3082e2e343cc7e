"""Coded tokens that are kept exact as well, because the window's rule says so.

Their bytes in the planes stay, so pages keep their size; reading puts the exact vectors over the decoded ones.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.statistics.need import Slot


@final
@dataclass(frozen=True)
class Exceptions:
    """`n` exact tokens: the row and coded index of each, and its vectors."""

    rows: Int[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    key: Float[Tensor, "n h d"]
    value: Float[Tensor, "n h e"]

    @classmethod
    def where(
        cls, exact: Bool[Tensor, "b t"], key: Float[Tensor, "b h t d"], value: Float[Tensor, "b h t e"], first: int
    ) -> "Exceptions":
        """The tokens marked in `exact`; `first` is the coded index of the first column."""
        rows, columns = exact.nonzero(as_tuple=True)
        return cls(rows.int(), (columns + first).int(), key[rows, :, columns].clone(), value[rows, :, columns].clone())

    def __add__(self, other: "Exceptions") -> "Exceptions":
        return Exceptions(
            torch.cat([self.rows, other.rows]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.key, other.key]),
            torch.cat([self.value, other.value]),
        )

    def count(self, batch: int) -> Int[Tensor, " b"]:
        """How many each row has."""
        return self.rows.bincount(minlength=batch)

    def before(self, n_tokens: int) -> "Exceptions":
        """Those among the first `n_tokens` coded tokens."""
        keep = self.tokens < n_tokens
        return Exceptions(self.rows[keep], self.tokens[keep], self.key[keep], self.value[keep])

    def after(self, n_tokens: int) -> "Exceptions":
        """Those past the first `n_tokens` coded tokens, counted from there."""
        keep = self.tokens >= n_tokens
        return Exceptions(self.rows[keep], self.tokens[keep] - n_tokens, self.key[keep], self.value[keep])

    def select(self, rows: Int[Tensor, " rows"]) -> "Exceptions":
        """Those of the given rows of the batch, in that order; rows may repeat."""
        new, old = (rows[:, None] == self.rows[None]).nonzero(as_tuple=True)
        return replace(self, rows=new.int(), tokens=self.tokens[old], key=self.key[old], value=self.value[old])

    def by_row(self, batch: int) -> "RowExceptions":
        """The same tokens side by side for each of `batch` rows; of one row, views of what is held."""
        return RowExceptions.of(self, batch)

    def put_over(self, dense: Float[Tensor, "b h t d"], slot: Slot) -> Float[Tensor, "b h t d"]:
        """`dense` with the exact vectors in their places; changes it."""
        dense[self.rows.long(), :, self.tokens.long()] = (self.key if slot == "key" else self.value).to(dense.dtype)
        return dense

    def tensors(self) -> dict[str, Tensor]:
        """Everything that takes memory."""
        return {"rows": self.rows, "tokens": self.tokens, "key": self.key, "value": self.value}


@final
@dataclass(frozen=True)
class RowExceptions:
    """The excepted tokens of each row, as many columns as the row with most has; `there` is False for filling."""

    tokens: Int[Tensor, "b x"]
    there: Bool[Tensor, "b x"]
    key: Float[Tensor, "b h x d"]
    value: Float[Tensor, "b h x e"]
    all_there: bool

    @classmethod
    def of(cls, found: Exceptions, batch: int) -> "RowExceptions":
        """Row by row, in the order they were found. Nothing of it is kept: what a cache holds is counted."""
        if batch == 1:
            there = torch.ones(1, len(found.tokens), dtype=torch.bool, device=found.tokens.device)
            sides = (x.transpose(0, 1)[None] for x in (found.key, found.value))
            return cls(found.tokens[None].long(), there, *sides, all_there=True)
        mine = [(found.rows == row).nonzero()[:, 0] for row in range(batch)]
        width = max((len(index) for index in mine), default=0)
        there = torch.zeros(batch, width, dtype=torch.bool, device=found.tokens.device)
        tokens = torch.zeros(batch, width, dtype=torch.int64, device=found.tokens.device)
        sides = [x.new_zeros(batch, width, *x.shape[1:]) for x in (found.key, found.value)]
        for row, index in enumerate(mine):
            there[row, : len(index)] = True
            tokens[row, : len(index)] = found.tokens[index].long()
            for side, x in zip(sides, (found.key, found.value), strict=True):
                side[row, : len(index)] = x[index]
        key, value = (side.transpose(1, 2) for side in sides)
        return cls(tokens, there, key, value, bool(there.all()))
