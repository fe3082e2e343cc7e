"""What a layer holds at one moment: the exact tensors and views of the bytes. Later appends do not change it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.codec import LayerCodec, Packed, SideCodec, as_written
from karhunen.device import HOST
from karhunen.quantizers.base import as_dtype
from karhunen.statistics.need import Slot
from karhunen.store.decoded import Decoded
from karhunen.store.exceptions import Exceptions, Places
from karhunen.store.positions import Positions
from karhunen.store.refinements import Refined

DECODE_TOKENS = 8192
"""Tokens decoded at a time: bounds the float32 numbers there are at once."""


@final
@dataclass(frozen=True)
class Snapshot:
    """Sinks, coded tokens, recent tokens, in this order; `n_dropped` more stood between sinks and coded ones.

    `packed` is None where nothing is coded; `exceptions` are coded tokens that are held exact as well; `decoded` is the
    store's copy of decoded tokens, if it keeps one; `refined` says which tokens have more than base bytes.
    """

    sink: Mapping[Slot, Tensor]
    recent: Mapping[Slot, Tensor]
    packed: Mapping[Slot, Packed] | None
    exceptions: Exceptions | None
    rows_at: Positions
    n_coded: int
    n_dropped: int
    decoded: Decoded | None = None
    refined: Refined | None = None

    @property
    def n_sink(self) -> int:
        """Exact tokens before the coded ones."""
        return self.sink["key"].shape[2]

    @property
    def n_held(self) -> int:
        """Tokens that can be read."""
        return self.n_sink + self.n_coded + self.recent["key"].shape[2]

    @property
    def batch(self) -> int:
        """Rows."""
        return self.recent["key"].shape[0]

    def offsets(self, start: int, stop: int) -> list[tuple[int, int, list[int]]]:
        """Runs `(first, last, first position of each row)` of coded tokens `start` … `stop`: within each, positions
        rise by one."""
        shift = self.n_sink + self.n_dropped
        if not self.rows_at.runs:
            return [(start, stop, [shift + start] * self.batch)]
        edges = sorted({start, stop, *(i - shift for i, _ in self.rows_at.runs if start < i - shift < stop)})
        firsts = [self.rows_at.at(shift + a, shift + a + 1, self.batch, HOST)[:, 0].tolist() for a in edges[:-1]]
        return [(a, b, first) for (a, b), first in zip(pairwise(edges), firsts, strict=True)]

    def dense(self, codec: LayerCodec | None, slot: Slot) -> Float[Tensor, "b h t d"]:
        """All tokens held, in the dtype they came in; coded ones are decoded."""
        sink, recent = self.sink[slot], self.recent[slot]
        if self.packed is None:
            return torch.cat([sink, recent], dim=2)
        assert codec is not None, "only a codec codes tokens"
        with as_written(recent.device):
            return torch.cat([sink, self.coded(codec, slot).to(recent.dtype), recent], dim=2)

    def coded(self, codec: LayerCodec, slot: Slot) -> Float[Tensor, "b h t d"]:
        """The coded tokens, exact ones in their places; what float16 cannot hold becomes its largest number."""
        if self.decoded is None:
            made = self._decode(codec, slot, 0)
        else:
            made = self.decoded.upto(slot, self.n_coded, lambda start: self._decode(codec, slot, start))
        return made if self.exceptions is None else self.exceptions.put_over(made, slot)

    def _decode(self, codec: LayerCodec, slot: Slot, start: int) -> Float[Tensor, "b h t d"]:
        """The coded tokens from `start` on, which ends an entry of every tensor, in the dtype they came in; some of
        them at a time, so that no wider copy of all of them exists."""
        assert self.packed is not None, "nothing is coded"
        like, shift = self.recent[slot], self.n_sink + self.n_dropped
        side = codec.to(like.device).side(slot)
        step = max(1, DECODE_TOKENS // codec.granule_tokens) * codec.granule_tokens
        parts: list[Tensor] = []
        for first in range(start, self.n_coded, step):
            last = min(first + step, self.n_coded)
            positions = self.rows_at.at(shift + first, shift + last, self.batch, like.device)
            packed = self._between(self.packed[slot], first, last)
            made = side.decode(packed, positions)
            if self.refined is not None:
                self._refine(made, side, slot, packed, positions, first)
            parts.append(as_dtype(made, like.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _refine(
        self, made: Float[Tensor, "b h m d"], side: SideCodec, slot: Slot, packed: Packed, positions: Tensor, first: int
    ) -> None:
        """Put over base tokens what base and layers together decode to."""
        assert self.refined is not None, "nothing is refined"
        classes = self.refined.classes
        for row in range(self.batch):
            mine = self.refined.row(row, first, first + made.shape[2], classes)
            base = Packed(packed.planes[row : row + 1], {})
            for n_layers in range(1, self.refined.rule.n_layers + 1):
                tokens, planes = mine.prefix(base, slot, n_layers)
                if len(tokens):
                    made[row, :, tokens] = side.decode(Packed(planes, {}), positions[row : row + 1, tokens])[0]

    def apart(self, rows: slice, start: int, stop: int, refined: bool = False) -> Places | None:
        """Row and index of coded tokens that are read apart from the others' bytes, both counted from the beginning of
        `rows` and `start`: those kept exact, and those that are `refined` if asked for."""
        found = None if self.exceptions is None else self.exceptions.places(rows, start, stop)
        if self.refined is None or not refined:
            return found
        classes = self.refined.classes[rows, start:stop]
        more = self.refined.places(classes)
        if found is None:
            return more
        at, tokens = (torch.cat([x.to(y), y]) for x, y in zip(found, more, strict=True))
        order = tokens.argsort(stable=True)
        return at[order], tokens[order]

    def _between(self, packed: Packed, first: int, last: int) -> Packed:
        def cut(x: Tensor) -> Tensor:
            return x[..., first * x.shape[-1] // self.n_coded : last * x.shape[-1] // self.n_coded]

        return Packed(cut(packed.planes), {name: cut(x) for name, x in packed.side.items()})
