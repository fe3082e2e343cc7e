"""Refinements of coded tokens: bytes of embedded layers for those that have them, and one byte of heat for each token.

    heat         [b t]     │ 7 │ 0 │52 │ 0 │18 │ …     class = (heat − line) // 16, at most the number of layers
    layer 1      row by row, planes of the tokens of class 1 and more, side by side: [p n]
    layer 2      …  of class 2 and more

A layer's bytes are those of keys, then of values. The heat is the mask: what has a layer is counted, never pointed to.
The `line` rises when memory is asked back (`raise_line`): the coldest lose a layer first, and no byte is coded again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from karhunen.codec import LayerCodec, Packed
from karhunen.device import HOST
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.buffers import TokenBuffer
from karhunen.store.plane_counts import layer_planes
from karhunen.store.refined_state import RefinedState
from karhunen.windows.refining import HOTTEST, STEPS, Refining


@final
@dataclass(frozen=True)
class RowRefined:
    """Tokens of one row that have layers: their coded indices, ascending, their classes, and of each layer its planes
    (keys, values), a column for each of the tokens that have it."""

    tokens: Int[Tensor, " n"]
    classes: Int[Tensor, " n"]
    layers: tuple[tuple[UInt8[Tensor, "_ _"], UInt8[Tensor, "_ _"]], ...]

    def having(self, layer: int) -> Int[Tensor, " m"]:
        """Which of the tokens have a layer, counted from 0."""
        return (self.classes > layer).nonzero()[:, 0]

    def prefix(self, base: Packed, slot: Slot, n_layers: int) -> tuple[Int[Tensor, " m"], UInt8[Tensor, "1 p m"]]:
        """Those of exactly `n_layers` layers, and all their planes; `base` holds the row's base planes."""
        mine = self.classes == n_layers
        side = SLOTS.index(slot)
        layers = [self.layers[layer][side][:, mine[self.classes > layer]] for layer in range(n_layers)]
        return self.tokens[mine], torch.cat([base.planes[0][:, self.tokens[mine]], *layers])[None]


@final
@dataclass(frozen=True)
class Refined:
    """What is held of refinements at one moment; later appends and shrinking do not change it."""

    heat: UInt8[Tensor, "b t"]
    line: int
    rule: Refining
    layers: tuple[tuple[UInt8[Tensor, "_ _"], ...], ...]
    n_key_planes: tuple[int, ...]

    @cached_property
    def classes(self) -> Int[Tensor, "b t"]:
        """Layers of each token."""
        return self.rule.classes(self.heat, self.line)

    @property
    def least(self) -> tuple[int, ...]:
        """From which heat on a token has each layer."""
        return tuple(self.line + STEPS * (layer + 1) for layer in range(self.rule.n_layers))

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What a reader made of this, filled at first use."""
        return {}

    def places(self, classes: Int[Tensor, "b t"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Row and coded index of every token that has a layer, by rows."""
        rows, tokens = (classes > 0).nonzero(as_tuple=True)
        return rows.int(), tokens.int()

    def row(self, row: int, start: int, stop: int, classes: Int[Tensor, "b t"]) -> RowRefined:
        """Of one row, among its coded tokens `start` … `stop`."""
        before, here = classes[row, :start], classes[row, start:stop]
        tokens = (here > 0).nonzero()[:, 0]
        found: list[tuple[Tensor, Tensor]] = []
        for layer, n_key in enumerate(self.n_key_planes):
            first, n = int((before > layer).sum()), int((here > layer).sum())
            planes = self.layers[layer][row][:, first : first + n]
            found.append((planes[:n_key], planes[n_key:]))
        return RowRefined(tokens, here[tokens], tuple(found))


@final
class Refinements:
    """The store's part, append-only but for `raise_line`."""

    def __init__(self, rule: Refining) -> None:
        self.rule = rule
        self.line = 0
        self._heat = TokenBuffer()
        self._layers: list[list[TokenBuffer]] = [[] for _ in range(rule.n_layers)]
        self._n_key_planes = (0,) * rule.n_layers
        self._held: Refined | None = None  # of the last reading; steps between which nothing changes share it

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes what readers have made of it anew."""
        return {**self.__dict__, "_held": None}

    @classmethod
    def restored(cls, rule: Refining, state: RefinedState, codec: LayerCodec) -> "Refinements":
        """Those whose state this is; it was checked."""
        made = cls(rule)
        made.line = state.line
        made._n_key_planes = layer_planes(codec, "key")
        if state.heat is not None and state.base.n_coded:
            made._heat.append(state.heat)
            for buffers, rows in zip(made._layers, state.layers, strict=True):
                for planes in rows:
                    buffers.append(TokenBuffer())
                    buffers[-1].append(planes)
        return made

    def state(self) -> tuple[Tensor | None, tuple[tuple[Tensor, ...], ...]]:
        """Heat, and the planes of each layer and row."""
        if not self._heat.length:
            return None, ()
        return self._heat.view(), tuple(tuple(buffer.view() for buffer in rows) for rows in self._layers)

    def branch(self) -> "Refinements":
        """One that goes on from here by itself and shares what is there."""
        twin = Refinements(self.rule)
        twin.line, twin._heat, twin._n_key_planes = self.line, self._heat.branch(), self._n_key_planes
        twin._layers = [[b.branch() if b.length else b.copy() for b in rows] for rows in self._layers]
        return twin

    def append(self, heat: UInt8[Tensor, "b t"], codec: LayerCodec, planes: dict[Slot, UInt8[Tensor, "b _ t"]]) -> None:
        """Tokens that were just coded, with the planes of all layers; they keep those that their heat is worth."""
        self._held = None
        b = heat.shape[0]
        classes = self.rule.classes(heat, self.line)
        self._heat.append(heat)
        edges = {slot: tuple(accumulate(layer_planes(codec, slot), initial=0)) for slot in SLOTS}
        self._n_key_planes = layer_planes(codec, "key")
        for layer, rows in enumerate(self._layers):
            rows += [TokenBuffer() for _ in range(b - len(rows))]
            new = torch.cat([planes[slot][:, edges[slot][layer] : edges[slot][layer + 1]] for slot in SLOTS], dim=1)
            for row, buffer in enumerate(rows):
                buffer.append(new[row][:, classes[row] > layer])

    @property
    def given(self) -> Int[Tensor, " b"]:
        """Layers that each row's tokens were given when they were coded."""
        return self.rule.classes(self._heat.view()).sum(1)

    def held(self) -> Refined | None:
        """For reading; None where no token has a layer."""
        if not any(buffer.length for rows in self._layers for buffer in rows):
            return None
        if self._held is not None:
            return self._held
        layers = tuple(tuple(buffer.view() for buffer in rows) for rows in self._layers)
        made = Refined(self._heat.view(), self.line, self.rule, layers, self._n_key_planes)
        if not self.is_shared:  # views of a branch that has gone on are copies, which nobody would count
            self._held = made
        return made

    @property
    def classes(self) -> Int[Tensor, "b t"]:
        """Layers of each coded token, of which there are some."""
        return self.rule.classes(self._heat.view(), self.line)

    def crop(self, n_tokens: int) -> None:
        """Forget tokens from `n_tokens` on."""
        self._held = None
        classes = self.classes
        for layer, rows in enumerate(self._layers):
            for row, buffer in enumerate(rows):
                buffer.crop(int((classes[row, :n_tokens] > layer).sum()))
        self._heat.crop(n_tokens)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the given rows, in that order; rows may repeat."""
        if not self._heat.length:
            return
        self._held = None
        self._heat.select(rows)
        for layer, held in enumerate(self._layers):
            self._layers[layer] = [held[row].copy() for row in rows.tolist()]

    def bytes_by_line(self) -> Int[Tensor, " 256"]:
        """Bytes of layers that are left when the line stands at 0, 1, … sixteenths."""
        total = torch.zeros(HOTTEST + 1, dtype=torch.int64, device=HOST)
        if not self._heat.length:
            return total
        count = torch.bincount(self._heat.view().flatten().long().cpu(), minlength=HOTTEST + 1)
        hotter = count.flip(0).cumsum(0).flip(0)  # tokens of at least this heat
        for layer, rows in enumerate(self._layers):
            least = (layer + 1) * STEPS
            each = rows[0].view().shape[0]
            total[: HOTTEST + 1 - least] += each * hotter[least:]
        return total

    def raise_line(self, line: int) -> None:
        """Give back the layers of tokens that fall below; the line never sinks."""
        if line <= self.line:
            return
        self._held = None
        before, self.line = self.classes if self._heat.length else None, line
        if before is None:
            return
        after = self.classes
        for layer, rows in enumerate(self._layers):
            for row, buffer in enumerate(rows):
                mine = before[row] > layer
                buffer.keep((after[row] > layer)[mine])

    @property
    def is_shared(self) -> bool:
        """Whether another store reads these bytes too."""
        return self._heat.shared is not None

    def tensors(self) -> dict[str, Tensor]:
        """All that takes memory, named by kind."""
        if not self._heat.length:
            return {}
        held = {"side.heat": self._heat}
        held |= {
            f"codes.refined.{layer}.{row}": buffer
            for layer, rows in enumerate(self._layers)
            for row, buffer in enumerate(rows)
        }
        shared = {f"{name}.shared": buffer.shared for name, buffer in held.items() if buffer.shared is not None}
        return {name: buffer.storage() for name, buffer in held.items()} | shared


def hottest_line(stores: Sequence[Refinements], n_bytes: int) -> tuple[int, int]:
    """(line, how many of the stores go to it, the others staying a step below): the lowest that gives `n_bytes` back.
    A line of 0 gives nothing; at the last one all tokens are at their base."""
    none = torch.zeros(0, HOTTEST + 1, dtype=torch.int64, device=HOST)
    by_line = torch.stack([s.bytes_by_line() for s in stores]) if stores else none
    lines = torch.tensor([s.line for s in stores], dtype=torch.int64, device=HOST)
    every = torch.arange(len(stores), device=HOST)
    now = by_line.gather(1, lines[:, None])[:, 0]
    for line in range(1, HOTTEST + 1):
        left, before = (by_line[every, lines.clamp_min(at)] for at in (line, line - 1))
        if int((now - left).sum()) >= n_bytes:
            mixed = (now - before).sum() + (before - left).cumsum(0)
            return line, int((mixed < n_bytes).sum()) + 1
    return HOTTEST, len(stores)
