"""All that a store with refinements holds, as a value that can be written down: its base, and the layers beside it.

A store without refinements is a `StoreState` alone, written as it was before there were any.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from karhunen.codec import LayerCodec
from karhunen.device import moved
from karhunen.statistics.need import SLOTS
from karhunen.store.plane_counts import layer_planes
from karhunen.store.state import StoreState
from karhunen.windows.refining import HOTTEST, Refining


@final
@dataclass(frozen=True)
class RefinedState:
    """`base` is what every store holds; `heat` and `layers` (of each layer, of each row, planes of keys and then of
    values) are empty where nothing is coded. `sums` and `counts` are what the exact tokens were paid so far."""

    base: StoreState
    line: int
    heat: UInt8[Tensor, "b t"] | None
    layers: tuple[tuple[UInt8[Tensor, "_ _"], ...], ...]
    sums: Float[Tensor, "b n"] | None
    counts: Int[Tensor, " n"] | None

    def to(self, device: torch.device) -> "RefinedState":
        """The same on a device."""
        parts = moved((self.heat, self.layers, self.sums, self.counts), device)
        return RefinedState(self.base.to(device), self.line, *parts)

    def check(self, codec: LayerCodec, rule: Refining) -> None:
        """ValueError, saying what is wrong, unless these layers belong to the base, which was checked."""
        if not 0 <= self.line <= HOTTEST:
            raise ValueError(f"its line of heat is {self.line}; it lies between 0 and {HOTTEST}")
        if not self.base.recent:
            return
        batch, _, n_exact, _ = self.base.recent["key"].shape
        if self.base.n_coded and (self.heat is None or tuple(self.heat.shape) != (batch, self.base.n_coded)):
            given = None if self.heat is None else tuple(self.heat.shape)
            raise ValueError(f"its heat is {given} for {self.base.n_coded} coded tokens of {batch} rows")
        if self.heat is not None and self.base.n_coded:
            classes = rule.classes(self.heat, self.line)
            planes = tuple(map(sum, zip(*(layer_planes(codec, slot) for slot in SLOTS), strict=True)))
            want = [[(n, int((classes[row] > i).sum())) for row in range(batch)] for i, n in enumerate(planes)]
            given = [[tuple(x.shape) for x in rows] for rows in self.layers]
            if given != want:
                raise ValueError(f"its layers are {given} by row; its heat says {want}")
        paid = [None if x is None else tuple(x.shape) for x in (self.sums, self.counts)]
        if paid != [(batch, n_exact), (n_exact,)]:
            raise ValueError(f"what its {n_exact} exact tokens of {batch} rows were paid is not there for each")
