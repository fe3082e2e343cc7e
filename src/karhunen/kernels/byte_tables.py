"""Tables of codewords, one of 256 entries per byte of a coded token: what the kernels on bytes share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, final

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor


@final
@dataclass(frozen=True)
class Lookups:
    """Tables that can be scanned: an entry is the sum of one or two look-ups of int8, times its column's scale.

        entry(byte) = (low[byte mod 2^a] + high[byte div 2^(8 − b)]) · scale,    2^a and 2^b rows, a + b ≥ 8

    Without `high` (no row) a is 8: 256 entries of their own. Columns are those of all planes side by side.
    """

    low: Int8[Tensor, "_ columns"]
    high: Int8[Tensor, "_ columns"]
    scale: Float[Tensor, " columns"]

    def __post_init__(self) -> None:
        if self.low.dtype != torch.int8 or self.high.dtype != torch.int8:
            raise TypeError(f"rows are {self.low.dtype} and {self.high.dtype}; int8 is read")
        n = self.scale.shape
        if self.low.ndim != 2 or self.high.ndim != 2 or self.low.shape[1:] != n or self.high.shape[1:] != n:
            raise ValueError(f"rows {tuple(self.low.shape)}, {tuple(self.high.shape)} do not fit {tuple(n)} columns")
        a, b = self.index_bits
        if len(self.low) != 2**a or len(self.high) != (2**b if b else 0) or a > 8 or b > 8 or a + b < 8:
            raise ValueError(f"{len(self.low)} and {len(self.high)} rows; powers of two whose product is 256 or more")
        if not bool(torch.isfinite(self.scale).all()):
            raise ValueError("a scale is NaN or infinite")
        sums = self._sums()
        if n.numel() and not -128 <= int(sums.min()) <= int(sums.max()) <= 127:
            raise ValueError("a sum of two rows leaves int8; every entry must be one of -128 … 127")

    @property
    def index_bits(self) -> tuple[int, int]:
        """(a, b); b is 0 where there is one look-up."""
        return len(self.low).bit_length() - 1, max(0, len(self.high).bit_length() - 1)

    def entries(self) -> Float[Tensor, "256 columns"]:
        """What every byte means, float32: the sum is exact, the product with the scale is rounded once."""
        return self._sums().float() * self.scale.float()

    def _sums(self) -> Int[Tensor, "256 columns"]:
        a, b = self.index_bits
        byte = torch.arange(256, device=self.low.device)
        whole = self.low[byte % 2**a].int()
        return whole + self.high[byte // 2 ** (8 - b)].int() if b else whole


@final
@dataclass(frozen=True)
class ByteTables:
    """One 256-entry table of codewords per byte plane, ragged in width, side by side.

    Plane j owns columns `column_start[j]:column_start[j + 1]` of `entries`; column k adds to coefficient
    `coefficient[k]` of its head. KV head i owns planes `plane_start[i]:plane_start[i + 1]`. Two planes of a head may
    name one coefficient: their entries add (a residual stage).
    """

    entries: Float[Tensor, "256 columns"]
    coefficient: Int[Tensor, " columns"]
    column_start: tuple[int, ...]
    plane_start: tuple[int, ...]
    n_coefficients: int
    lookups: Lookups | None = None

    def __post_init__(self) -> None:
        n_columns = self.entries.shape[1]
        if self.entries.shape[0] != 256:
            raise ValueError(f"entries have {self.entries.shape[0]} rows; a byte chooses among 256")
        if list(self.column_start) != sorted(set(self.column_start)) or self.column_start[-1] != n_columns:
            raise ValueError(f"column_start={self.column_start} does not rise from 0 to the {n_columns} columns given")
        if list(self.plane_start) != sorted(self.plane_start) or self.plane_start[-1] != self.n_planes:
            raise ValueError(f"plane_start={self.plane_start} does not rise from 0 to the {self.n_planes} planes given")
        if self.column_start[0] or self.plane_start[0]:
            raise ValueError("column_start and plane_start begin at 0")
        if self.coefficient.shape != (n_columns,):
            raise ValueError(f"{self.coefficient.numel()} coefficient indices name {n_columns} columns; give one each")
        if n_columns and not 0 <= int(self.coefficient.min()) <= int(self.coefficient.max()) < self.n_coefficients:
            raise ValueError(f"a coefficient index lies outside 0 .. {self.n_coefficients - 1}")

    @classmethod
    def from_planes(cls, heads: Sequence[Sequence[tuple[Tensor, Tensor]]], n_coefficients: int) -> "ByteTables":
        """From each head's list of (table [256 w], coefficient indices [w])."""
        planes = [plane for head in heads for plane in head]
        column_start, plane_start = [0], [0]
        for table, _ in planes:
            column_start.append(column_start[-1] + table.shape[1])
        for head in heads:
            plane_start.append(plane_start[-1] + len(head))
        return cls(
            entries=torch.cat([table for table, _ in planes], 1),
            coefficient=torch.cat([coefficient for _, coefficient in planes]),
            column_start=tuple(column_start),
            plane_start=tuple(plane_start),
            n_coefficients=n_coefficients,
        )

    @classmethod
    def of_lookups(
        cls,
        lookups: Lookups,
        coefficient: Int[Tensor, " columns"],
        column_start: tuple[int, ...],
        plane_start: tuple[int, ...],
        n_coefficients: int,
    ) -> "ByteTables":
        """Tables that can be scanned; `entries` is what their sums are."""
        return cls(lookups.entries(), coefficient, column_start, plane_start, n_coefficients, lookups)

    @property
    def n_planes(self) -> int:
        """Bytes per token, all heads together."""
        return len(self.column_start) - 1

    @property
    def n_heads(self) -> int:
        """KV heads."""
        return len(self.plane_start) - 1

    def plane(self, j: int) -> tuple[Float[Tensor, "256 w"], Int[Tensor, " w"]]:
        """Table and coefficient indices of plane j."""
        columns = slice(self.column_start[j], self.column_start[j + 1])
        return self.entries[:, columns], self.coefficient[columns]

    @cached_property
    def in_quads(self) -> tuple[Int[Tensor, " columns"], int]:
        """Where each column lies among its head's when a plane begins at a multiple of four and a head at one of
        eight, as CPU kernels read them, and how many places the widest head takes."""
        place: list[int] = []
        most = 0
        for first, last in pairwise(self.plane_start):
            at = 0
            for start, stop in pairwise(self.column_start[first : last + 1]):
                place += range(at, at + stop - start)
                at += -(-(stop - start) // 4) * 4
            most = max(most, -(-at // 8) * 8)
        return torch.tensor(place, dtype=torch.int64, device=self.entries.device), most

    @cached_property
    def half_norms(self) -> Float[Tensor, "s 256"]:
        """Half the squared length of every entry, rounded once to float32: one number for all kernels and machines."""
        squares = self.entries.cpu().double().square() / 2  # where the order of a sum is one
        norms = [squares[:, left:right].sum(1) for left, right in pairwise(self.column_start)]
        found = torch.stack(norms).float() if norms else squares.new_zeros(0, 256, dtype=torch.float32)
        return found.to(self.entries.device)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What a kernel made of these tables, by kernel: filled at first use, never stored."""
        return {}
