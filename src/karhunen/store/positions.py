"""Where the tokens of a cache stand: the position of token i of row r is i − offset, piecewise in i.

A row padded on the left by p tokens has offset p. Offsets may change between two appends (a new turn with other
positions); tokens keep the offset they came with, so what was encoded decodes the same for ever.

Offsets are known on the host. A step's own come from the device, where the model's positions are: they are asked for
when a token of that step is coded, those of many steps at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from karhunen.device import HOST, answers, on_host, uploaded

NOWHERE = -(1 << 40)  # the padding of a row whose token has no one position
SEVERAL_POSITIONS = (
    "tokens of an image stand at one position in time and others in height and width, and this codec turns keys by one "
    "position; use a recipe that codes keys as they are cached, such as nova_kv, kivi or int4"
)


@final
class Offsets:
    """The left padding of each row in one forward; the layers of a cache share it, so it is asked for once."""

    def __init__(self, given: Int[Tensor, " b"]) -> None:
        self._given = given.detach().clone()

    @property
    def is_known(self) -> bool:
        """Whether no device has to be asked."""
        return on_host(self._given)

    @property
    def known(self) -> Int[Tensor, " b"]:
        """On the host; waits for the device if it was not asked before."""
        self.ask([self])
        return self._given

    def zero(self) -> "Offsets":
        """No padding, of as many rows."""
        return Offsets(torch.zeros(len(self._given), dtype=torch.int64, device=HOST))

    @staticmethod
    def ask(several: Sequence["Offsets"]) -> None:
        """Bring all of them to the host, in one copy for each device. ValueError for what is NOWHERE."""
        unknown = [offsets for offsets in several if not offsets.is_known]
        for device in {offsets._given.device for offsets in unknown}:
            mine = [offsets for offsets in unknown if offsets._given.device == device]
            for offsets, found in zip(mine, answers(*(o._given for o in mine)), strict=True):
                offsets._given = found.long()
                if bool((offsets._given == NOWHERE).any()):
                    raise ValueError(SEVERAL_POSITIONS)


@final
@dataclass(frozen=True)
class Positions:
    """Runs `(first token index, offsets [b])`; no run means offset 0 throughout. On the host."""

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
        """Positions of tokens `start` … `stop`, on a device; the host does not wait for it."""
        if not self.runs:
            return torch.arange(start, stop, device=device).expand(batch, -1)
        index = torch.arange(start, stop, device=HOST)
        offset = torch.zeros(batch, stop - start, dtype=torch.int64, device=HOST)
        for first, offsets in self.runs:
            offset = torch.where(index >= first, offsets[:, None], offset)
        return uploaded(index - offset, device)

    def select(self, rows: Int[Tensor, " rows"]) -> "Positions":
        """The given rows of the batch, in that order."""
        return Positions(tuple((first, offsets.index_select(0, rows)) for first, offsets in self.runs))
