"""All that one layer's store holds, as a value that can be written down; `LayerStore.restored` is its mirror.

What is stored is what is held, byte for byte: nothing is coded again. Numbers that come from a file are checked against
the codec and against each other before a store is made of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.codec import LayerCodec
from karhunen.device import moved
from karhunen.statistics.identity import LayerShape
from karhunen.statistics.need import SLOTS, Slot
from karhunen.store.exceptions import Exceptions
from karhunen.store.plane_counts import base_planes


@final
@dataclass(frozen=True)
class BufferState:
    """A buffer: its entries, or the records of its pages; how many tokens an entry is for, and how many there are."""

    data: Tensor
    tokens_per_entry: int
    n_tokens: int


@final
@dataclass(frozen=True)
class SelectionState:
    """What a score has decided, and what it is based on."""

    scores: Float[Tensor, "b h t"] | None
    decided: bool
    chosen_before: int


@final
@dataclass(frozen=True)
class StoreState:
    """One layer. `runs` are those of its positions."""

    sink: Mapping[str, Tensor]
    recent: Mapping[str, Tensor]
    coded: Mapping[str, Mapping[str, BufferState]]
    n_coded: int
    n_dropped: int
    runs: tuple[tuple[int, Int[Tensor, " b"]], ...]
    exceptions: Exceptions | None
    selection: SelectionState | None

    def to(self, device: torch.device) -> "StoreState":
        """The same on a device, but for what stays on the host: where tokens stand."""
        exceptions = None if self.exceptions is None else self.exceptions.to(device)
        return replace(moved(self, device), runs=self.runs, exceptions=exceptions)

    def check(self, codec: LayerCodec | None, shape: LayerShape) -> None:
        """ValueError, saying what is wrong, unless this is a store of such a layer."""
        if not self.recent:
            if self.sink or any(self.coded.values()) or self.n_coded or self.n_dropped:
                raise ValueError("it has coded tokens and no exact ones, not even none")
            return
        if (
            sorted(self.recent) != sorted(SLOTS)
            or sorted(self.sink) != sorted(SLOTS)
            or min(self.n_coded, self.n_dropped) < 0
        ):
            raise ValueError(f"it holds {sorted(self.recent)} and {self.n_coded} coded tokens")
        batch = self.recent["key"].shape[0]
        for slot, dim in zip(SLOTS, (shape.key_dim, shape.value_dim), strict=True):
            for x in (self.sink[slot], self.recent[slot]):
                b, h, _, d = x.shape if x.ndim == 4 else (0, 0, 0, 0)
                if (b, h, d) != (batch, shape.n_kv_heads, dim):
                    raise ValueError(f"its exact {slot}s are {tuple(x.shape)}")
            self._check_coded(slot, codec, batch)
        self._check_exceptions(batch, shape)
        if any(offsets.shape != (batch,) for _, offsets in self.runs):
            raise ValueError(f"its offsets are not of {batch} rows")

    def _check_coded(self, slot: Slot, codec: LayerCodec | None, batch: int) -> None:
        held = self.coded.get(slot, {})
        if not held and not self.n_coded:
            return
        if codec is None or "planes" not in held or self.n_coded % codec.granule_tokens:
            raise ValueError(f"{self.n_coded} coded {slot}s do not belong to its codec")
        paged = codec.side(slot).layout.pages is not None
        for name, buffer in held.items():
            if name == "planes" and paged:
                if buffer.data.ndim != 1 or buffer.n_tokens != self.n_coded:
                    raise ValueError(
                        f"its pages of {slot}s are {tuple(buffer.data.shape)} for {buffer.n_tokens} tokens"
                    )
                continue
            b, rows, entries = buffer.data.shape if buffer.data.ndim == 3 else (0, 0, 0)
            want_rows = base_planes(codec, slot) if name == "planes" else rows
            if (b, rows, entries * buffer.tokens_per_entry) != (batch, want_rows, self.n_coded):
                raise ValueError(
                    f"its {name} of {slot}s are {tuple(buffer.data.shape)} for {self.n_coded} tokens of {batch} rows"
                )

    def _check_exceptions(self, batch: int, shape: LayerShape) -> None:
        found = self.exceptions
        if found is None:
            return
        n = len(found.rows)
        sizes = (n,), (n, shape.n_kv_heads, shape.key_dim), (n, shape.n_kv_heads, shape.value_dim)
        if (found.tokens.shape, found.key.shape, found.value.shape) != sizes:
            raise ValueError(f"its {n} coded tokens that are exact too have vectors {tuple(found.key.shape)}")
        for name, index, end in (("rows", found.rows, batch), ("tokens", found.tokens, self.n_coded)):
            if n and not 0 <= int(index.min()) <= int(index.max()) < end:
                raise ValueError(f"its coded tokens that are exact too stand in {name} past {end}")
