"""What attention from bytes reads, what it returns, and how parts of one softmax are merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

INVISIBLE = -1e30
"""A mask entry at or below this hides its token; transformers writes the least finite float, others -inf."""


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
    def from_planes(
        cls, heads: Sequence[Sequence[tuple[Tensor, Tensor]]], n_coefficients: int
    ) -> "ByteTables":
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
    def prepared(self) -> dict[str, object]:
        """What a kernel made of these tables, by kernel: filled at first use, never stored."""
        return {}


@final
@dataclass(frozen=True)
class CodedTokens:
    """One side (keys or values) of one layer's coded tokens, the token axis last.

    `codes` and `gain` may be slices of larger buffers, as long as neighbouring tokens are neighbours in memory. With
    `gain_levels`, `gain` holds bytes that choose among them; without `gain` every token's gain is 1.
    """

    codes: UInt8[Tensor, "b s t"]
    tables: ByteTables
    gain: Float[Tensor, "b h t"] | UInt8[Tensor, "b h t"] | None = None
    gain_levels: Float[Tensor, " 256"] | None = None

    def __post_init__(self) -> None:
        b, s, t = self.codes.shape
        if self.codes.dtype != torch.uint8:
            raise TypeError(f"codes are {self.codes.dtype}; bytes (torch.uint8) are read")
        if s != self.tables.n_planes:
            raise ValueError(f"codes have {s} planes, the tables {self.tables.n_planes}")
        if self.gain is not None and self.gain.shape != (b, self.tables.n_heads, t):
            raise ValueError(f"gain has shape {tuple(self.gain.shape)}; {(b, self.tables.n_heads, t)} is wanted")
        if (self.gain_levels is not None) != (self.gain is not None and self.gain.dtype == torch.uint8):
            raise ValueError("gain_levels goes with a gain of bytes, and only with it")

    @property
    def n_tokens(self) -> int:
        """Coded tokens."""
        return self.codes.shape[-1]


@final
@dataclass(frozen=True)
class Partial:
    """Attention over some of the tokens: the mean under that softmax, and the logarithm of its denominator.

    A row that sees no token has mean 0 and `log_sum` -inf.
    """

    mean: Float[Tensor, "b h q c"]
    log_sum: Float[Tensor, "b h q"]


def merge_partials(parts: Sequence[Partial]) -> Partial:
    """The partial over the union of disjoint sets of tokens; all means in the same coordinates."""
    log_sums = torch.stack([part.log_sum for part in parts])
    total = log_sums.logsumexp(0)
    weights = (log_sums - total.clamp_min(torch.finfo(total.dtype).min)).exp()
    mean = (weights[..., None] * torch.stack([part.mean for part in parts])).sum(0)
    return Partial(mean=mean, log_sum=total)


def require_agreement(
    q_frames: Tensor,
    keys: CodedTokens,
    values: CodedTokens,
    key_bias: Tensor | None,
    block_tokens: int | None,
    first_offset: int,
    mask: Tensor | None,
    first_visible: Tensor | None,
) -> None:
    """ValueError unless the shapes belong together."""
    b, h, q, n, c = q_frames.shape
    t = keys.n_tokens
    for name, side in (("keys", keys), ("values", values)):
        if side.tables.n_heads != h or side.codes.shape[0] != b or side.n_tokens != t:
            raise ValueError(
                f"{name} hold batch {side.codes.shape[0]}, {side.tables.n_heads} heads, {side.n_tokens} tokens; "
                f"the queries and keys ask for {b}, {h}, {t}"
            )
    if keys.tables.n_coefficients != c:
        raise ValueError(f"queries have {c} coefficients, the key tables {keys.tables.n_coefficients}")
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}; give 1 or more, or None for one frame")
    needed = 1 if block_tokens is None or not t else (t - 1 + first_offset) // block_tokens + 1
    if n < needed or first_offset < 0:
        raise ValueError(
            f"{t} tokens from offset {first_offset} lie in {needed} blocks of {block_tokens}; {n} frames were given"
        )
    for name, tensor, shape in (
        ("key_bias", key_bias, (b, h, q, n)),
        ("mask", mask, (b, t)),
        ("first_visible", first_visible, (b, q)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {shape} is wanted")
