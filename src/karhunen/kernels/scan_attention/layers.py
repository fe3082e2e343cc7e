"""Refinements of coded tokens as the scan reads them: bytes that add to the coefficients of the tokens that have them.

    κ̂_n = base(bytes of n) + Σ_l [heat_n ≥ least_l] · layer_l(bytes of n),    values likewise

A layer's bytes lie side by side in the order of the tokens that have it. What has a layer is counted, never pointed to.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import UInt8
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.byte_tables import ByteTables


@final
@dataclass(frozen=True)
class Layers:
    """Of every layer: from which heat on a token has it, planes of each row (those of keys, then those of values) with
    a column for each token that has it, and the tables of keys and of values.

    `heat` is that of all coded tokens, of which a call reads those from number `first` on; `least` rises from layer to
    layer, so a token of one layer has those before it.
    """

    heat: UInt8[Tensor, "b n"]
    least: tuple[int, ...]
    codes: tuple[tuple[UInt8[Tensor, "_ _"], ...], ...]
    tables: tuple[tuple[ByteTables, ByteTables], ...]
    first: int = 0

    def __post_init__(self) -> None:
        if self.heat.dtype != torch.uint8 or any(x.dtype != torch.uint8 for rows in self.codes for x in rows):
            raise TypeError("heat and codes of layers are bytes (torch.uint8)")
        n = len(self.least)
        if not n or len(self.codes) != n or len(self.tables) != n or list(self.least) != sorted(self.least):
            raise ValueError(
                f"least={self.least}, {len(self.codes)} layers of codes, {len(self.tables)} of tables; as many of each "
                "are wanted, 1 or more, and least heats that rise"
            )
        for layer, (rows, tables) in enumerate(zip(self.codes, self.tables, strict=True)):
            wanted = sum(side.n_planes for side in tables)
            if len(rows) != len(self.heat) or any(len(planes) != wanted for planes in rows):
                raise ValueError(
                    f"layer {layer} has planes {[len(planes) for planes in rows]} by row; {wanted} for each of "
                    f"{len(self.heat)} rows are wanted"
                )

    @property
    def n(self) -> int:
        """Layers."""
        return len(self.least)

    def of(self, rows: slice, first: int) -> "Layers":
        """Of some rows of the batch, for a call whose first token is number `first`."""
        if rows == slice(None) and first == self.first:
            return self
        return Layers(self.heat[rows], self.least, tuple(held[rows] for held in self.codes), self.tables, first)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What a kernel made of these layers, by kernel: filled at first use, never stored."""
        return {}


def require_layers(layers: Layers, keys: CodedTokens, values: CodedTokens) -> None:
    """ValueError unless layers belong to these tokens."""
    b, t = len(keys.codes), keys.n_tokens
    if len(layers.heat) != b or not 0 <= layers.first <= layers.heat.shape[1] - t:
        raise ValueError(
            f"heat of shape {tuple(layers.heat.shape)} for {b} rows of {t} tokens from number {layers.first} on; "
            "it has all of these"
        )
    if keys.gain is not None or values.gain is not None:
        raise ValueError("tokens with gains have no layers: a layer would be multiplied by them")
    for tables in layers.tables:
        for side, mine in zip((keys, values), tables, strict=True):
            base = side.tables
            if (mine.n_heads, mine.n_coefficients) != (base.n_heads, base.n_coefficients):
                raise ValueError(
                    f"a layer has tables of {mine.n_heads} heads and {mine.n_coefficients} coefficients; its base has "
                    f"{base.n_heads} and {base.n_coefficients}"
                )
