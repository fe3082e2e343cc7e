"""Coded tokens that are kept exact as well, because the window's rule says so.

Their bytes in the planes stay, so pages keep their size; reading puts the exact vectors over the decoded ones. Which
tokens they are is known on the host, where it decides what is read; their vectors lie where the layer is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.device import HOST, uploaded
from karhunen.statistics.need import Slot

Places = tuple[Int[Tensor, " n"], Int[Tensor, " n"]]


@final
@dataclass(frozen=True)
class Exceptions:
    """`n` exact tokens: the row and coded index of each, on the host, and its vectors."""

    rows: Int[Tensor, " n"]
    tokens: Int[Tensor, " n"]
    key: Float[Tensor, "n h d"]
    value: Float[Tensor, "n h e"]

    @classmethod
    def where(
        cls, exact: Bool[Tensor, "b t"], key: Float[Tensor, "b h t d"], value: Float[Tensor, "b h t e"], first: int
    ) -> "Exceptions":
        """The tokens marked in `exact`, which lies on the host; `first` is the coded index of the first column."""
        found = exact.nonzero()
        rows, columns = uploaded(found, key.device).unbind(1)
        tokens = (found[:, 1] + first).int()
        return cls(found[:, 0].int(), tokens, key[rows, :, columns].clone(), value[rows, :, columns].clone())

    def __add__(self, other: "Exceptions") -> "Exceptions":
        return Exceptions(
            torch.cat([self.rows, other.rows]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.key, other.key]),
            torch.cat([self.value, other.value]),
        )

    def to(self, device: torch.device) -> "Exceptions":
        """The same with its vectors on a device."""
        return Exceptions(self.rows.to(HOST), self.tokens.to(HOST), self.key.to(device), self.value.to(device))

    def count(self, batch: int) -> Int[Tensor, " b"]:
        """How many each row has."""
        return self.rows.bincount(minlength=batch)

    def before(self, n_tokens: int) -> "Exceptions":
        """Those among the first `n_tokens` coded tokens."""
        return self._chosen((self.tokens < n_tokens).nonzero()[:, 0])

    def after(self, n_tokens: int) -> "Exceptions":
        """Those past the first `n_tokens` coded tokens, counted from there."""
        left = self._chosen((self.tokens >= n_tokens).nonzero()[:, 0])
        return replace(left, tokens=left.tokens - n_tokens)

    def select(self, rows: Int[Tensor, " rows"]) -> "Exceptions":
        """Those of the given rows of the batch, in that order; rows may repeat. `rows` lies on the host."""
        new, old = (rows[:, None] == self.rows[None]).nonzero(as_tuple=True)
        return replace(self._chosen(old), rows=new.int())

    def by_row(self, batch: int) -> "RowExceptions":
        """The same tokens side by side for each of `batch` rows; of one row, views of what is held."""
        return RowExceptions.of(self, batch)

    def places(self, rows: slice, start: int, stop: int) -> Places | None:
        """Row and coded index of those in some rows and a range of tokens, both counted from its beginning, where the
        vectors lie; None where there are none."""
        asked = rows.start, rows.stop, start, stop
        if asked not in self._places:
            mine = (self.tokens >= start) & (self.tokens < stop)
            if rows != slice(None):
                mine &= self.rows == rows.start
            every, first = bool(mine.all()), rows.start or 0
            at = (self.rows, self.tokens) if every else (self.rows[mine], self.tokens[mine])
            at = at if not first and not start else (at[0] - first, at[1] - start)
            self._places[asked] = (uploaded(at[0], self._device), uploaded(at[1], self._device)) if len(at[0]) else None
        return self._places[asked]

    def put_over(self, dense: Float[Tensor, "b h t d"], slot: Slot) -> Float[Tensor, "b h t d"]:
        """`dense` with the exact vectors in their places; changes it."""
        if (at := self.places(slice(None), 0, dense.shape[2])) is not None:
            dense[at[0].long(), :, at[1].long()] = (self.key if slot == "key" else self.value).to(dense.dtype)
        return dense

    def tensors(self) -> dict[str, Tensor]:
        """Everything that takes memory: what is read by row, or away from the host, is found once and kept."""
        held = {"rows": self.rows, "tokens": self.tokens, "key": self.key, "value": self.value}
        kept = {id(x): x for x in self._kept() if not any(x is y for y in held.values())}
        return held | {f"places.{i}": x for i, x in enumerate(kept.values())}

    @property
    def _device(self) -> torch.device:
        return self.key.device

    @cached_property
    def _places(self) -> dict[tuple[int | None, int | None, int, int], Places | None]:
        return {}

    @cached_property
    def sides_by_row(self) -> dict[int, "RowPlaces"]:
        """Where each row's tokens lie among the vectors, by the number of rows; filled at first use."""
        return {}

    def _kept(self) -> Iterator[Tensor]:
        for at in self._places.values():
            yield from at or ()
        for found in self.sides_by_row.values():
            yield from (x for x in (found.index, found.tokens, found.there) if x is not None)

    def _chosen(self, index: Int[Tensor, " n"]) -> "Exceptions":
        there = uploaded(index, self._device)
        return Exceptions(self.rows[index], self.tokens[index], self.key[there], self.value[there])


@final
@dataclass(frozen=True)
class RowPlaces:
    """Of each row the vectors' indices and the tokens' coded ones, as many columns as the row with most has; `there` is
    False for filling, None where nothing is filled."""

    index: Int[Tensor, "b x"]
    tokens: Int[Tensor, "b x"]
    there: Bool[Tensor, "b x"] | None

    @classmethod
    def of(cls, found: Exceptions, batch: int) -> "RowPlaces":
        """Row by row, in the order they were found; made on the host."""
        mine = [(found.rows == row).nonzero()[:, 0] for row in range(batch)]
        width = max((len(index) for index in mine), default=0)
        index, tokens = (torch.zeros(batch, width, dtype=torch.int64, device=HOST) for _ in range(2))
        there = torch.zeros(batch, width, dtype=torch.bool, device=HOST)
        for row, at in enumerate(mine):
            index[row, : len(at)], tokens[row, : len(at)], there[row, : len(at)] = at, found.tokens[at].long(), True
        device = found.key.device
        filled = None if bool(there.all()) else uploaded(there, device)
        return cls(uploaded(index, device), uploaded(tokens, device), filled)


@final
@dataclass(frozen=True)
class RowExceptions:
    """The excepted tokens of each row, as `RowPlaces` says; filling holds any of the vectors."""

    tokens: Int[Tensor, "b x"]
    there: Bool[Tensor, "b x"] | None
    key: Float[Tensor, "b h x d"]
    value: Float[Tensor, "b h x e"]

    @classmethod
    def of(cls, found: Exceptions, batch: int) -> "RowExceptions":
        """Row by row, in the order they were found."""
        if batch not in found.sides_by_row:
            found.sides_by_row[batch] = RowPlaces.of(found, batch)
        at = found.sides_by_row[batch]
        if batch == 1:
            key, value = (x.transpose(0, 1)[None] for x in (found.key, found.value))
        else:
            key, value = (x[at.index].transpose(1, 2) for x in (found.key, found.value))
        return cls(at.tokens, at.there, key, value)
