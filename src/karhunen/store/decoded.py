"""Coded tokens kept decoded as well, so that a read decodes only what was coded since the last one.

It costs the memory that coding saves, so no cache does it by itself: scoring does, which reads one cache many times.
"""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.statistics.need import Slot


@final
class Decoded:
    """Decoded vectors of the first coded tokens of both sides of a layer."""

    def __init__(self) -> None:
        self._held: dict[Slot, Tensor] = {}

    def branch(self) -> "Decoded":
        """What is there, shared; each goes on by itself, since no tensor is written again."""
        twin = Decoded()
        twin._held = dict(self._held)
        return twin

    def upto(
        self, slot: Slot, n_coded: int, decode: Callable[[int], Float[Tensor, "b h m d"]]
    ) -> Float[Tensor, "b h t d"]:
        """The first `n_coded` tokens; `decode(start)` gives those from `start` on."""
        held = self._held.get(slot)
        n_held = 0 if held is None else held.shape[2]
        if held is None or n_held < n_coded:
            new = decode(n_held)
            held = self._held[slot] = new if held is None else torch.cat([held, new], dim=2)
        return held[:, :, :n_coded]

    def forget(self) -> None:
        """Tokens were taken away or moved; the next read decodes all."""
        self._held.clear()
