"""The fitted quantizer of byte codes: every symbol is a byte, its entry one or two look-ups of int8 (`Lookups`).

    ŷ[coordinates of plane j] += (low[byte mod 2^a] + high[byte div 2^(8 − b)]) · scale,    ŷ = gain · that

Integers and one scale a column are the definition: decoding and every kernel compute the same numbers.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from karhunen.kernels.byte_decode import byte_decode
from karhunen.kernels.byte_encode import byte_encode
from karhunen.kernels.byte_tables import ByteTables, Lookups
from karhunen.quantizers.base import Codes, Quantizer
from karhunen.quantizers.gains import GAIN_BITS, GainKind, apply_gain, gain_levels, split_gain
from karhunen.quantizers.nearest import byte_path
from karhunen.values import refuse_unless_one_of


@final
@dataclass(frozen=True)
class ByteQuantizer(Quantizer):
    """`s` planes over `g` head groups of `c` coefficients, group by group, a plane after those it refines.

    Plane j belongs to group `plane_group[j]` and covers the `plane_size[j]` coefficients at `coordinates`
    (concatenated), in as many columns of `low`, `high` and `scale`.
    """

    g: int
    c: int
    gain: GainKind
    plane_group: Int[Tensor, " s"]
    plane_size: Int[Tensor, " s"]
    coordinates: Int[Tensor, " total"]
    low: Int8[Tensor, "_ total"]
    high: Int8[Tensor, "_ total"]
    scale: Float[Tensor, " total"]

    def __post_init__(self) -> None:
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        n = int(self.plane_size.sum())
        for name in ("coordinates", "scale"):
            if tuple(getattr(self, name).shape) != (n,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}; {(n,)} is wanted")
        if n and not 0 <= int(self.coordinates.min()) <= int(self.coordinates.max()) < self.c:
            raise ValueError(f"a coordinate lies outside 0 … {self.c - 1}")
        groups = self.plane_group.tolist()
        if len(groups) != len(self.plane_size) or groups != sorted(groups):
            raise ValueError(
                f"plane_group {groups} does not name a group for each of {len(self.plane_size)} planes, in order"
            )
        if groups and not 0 <= groups[0] <= groups[-1] < self.g:
            raise ValueError(f"plane_group names a group outside 0 … {self.g - 1}")
        if groups and int(self.plane_size.min()) < 1:
            raise ValueError("a plane covers no coefficient; leave it out")
        _ = self.lookups  # refuses rows that do not belong together

    @property
    def widths(self) -> tuple[int, ...]:
        """Every symbol is a byte."""
        return (8,) * len(self.plane_size)

    def check(self, g: int, c: int) -> None:
        """The size and a gain that is known; what the tables imply was checked when they were made."""
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        if (self.g, self.c) != (g, c):
            raise ValueError(f"it quantizes {self.g} groups of {self.c} coefficients, not {g} of {c}")
        _ = self.byte_tables

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `gain` [b g t], where there is one."""
        y = y.double()
        side: dict[str, Tensor] = {}
        if self.gain != "none":
            y, side["gain"] = split_gain(y, self.gain)
        return Codes(byte_encode(y.float(), self.byte_tables, path=byte_path(y.device)), side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        y = byte_decode(codes.symbols.to(torch.uint8), self.byte_tables, path=byte_path(codes.symbols.device))
        return apply_gain(y, codes.side["gain"]) if self.gain != "none" else y

    @cached_property
    def gain_levels(self) -> Float[Tensor, " 256"] | None:
        """What each gain byte means; None where gains are no bytes."""
        return gain_levels(self.scale.device) if self.gain == "log8" else None

    @cached_property
    def lookups(self) -> Lookups:
        """The rows and their scales."""
        return Lookups(self.low, self.high, self.scale)

    @cached_property
    def byte_tables(self) -> ByteTables:
        """The tables as kernels read them."""
        per_group = torch.bincount(self.plane_group, minlength=self.g).tolist()
        return ByteTables.of_lookups(
            self.lookups,
            self.coordinates.long(),
            tuple(accumulate(self.plane_size.tolist(), initial=0)),
            tuple(accumulate(per_group, initial=0)),
            self.c,
        )
