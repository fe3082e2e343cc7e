"""Tensors that grow along time. Time is the last axis; what is written is never written again."""

from typing import final

import torch
from torch import Tensor

GROWTH_SHARE = 128  # a buffer that has to grow takes spare room of one part in this many of what it holds


@final
class TokenBuffer:
    """Append-only storage of `[b, ..., entries]`, an entry for each `tokens_per_entry` tokens; `nbytes` counts the
    spare room too. A branch reads the entries of the buffer that it comes from, and holds only its own."""

    def __init__(self, tokens_per_entry: int = 1) -> None:
        self.tokens_per_entry = tokens_per_entry
        self._shared: Tensor | None = None
        self._data: Tensor | None = None
        self._own_length = 0

    def branch(self) -> "TokenBuffer":
        """A buffer that goes on from here by itself; what is there is shared, since it is never written again."""
        twin = TokenBuffer(self.tokens_per_entry)
        twin._shared = None if self.length == 0 else self.view()
        return twin

    def append(self, x: Tensor) -> None:
        """Add entries at the end. The first append fits exactly; later ones leave a little room."""
        if self._data is None:
            self._data = x.clone(memory_format=torch.contiguous_format)
            self._own_length = x.shape[-1]
            return
        needed = self._own_length + x.shape[-1]
        capacity = self._data.shape[-1]
        if needed > capacity:
            room = max(needed, capacity + capacity // GROWTH_SHARE)
            grown = self._data.new_empty(*self._data.shape[:-1], room)
            grown[..., : self._own_length] = self._data[..., : self._own_length]
            self._data = grown
        self._data[..., self._own_length : needed] = x
        self._own_length = needed

    def view(self) -> Tensor:
        """What was appended; of a branch that has gone on, a copy."""
        if self._data is None:
            if self._shared is None:
                raise ValueError("nothing was appended to this buffer")
            return self._shared
        own = self._data[..., : self._own_length]
        return own if self._shared is None else torch.cat([self._shared, own], dim=-1)

    def storage(self) -> Tensor:
        """The tensor held, spare room included; of a branch, its own."""
        if self._data is None:
            if self._shared is None:
                raise ValueError("nothing was appended to this buffer")
            return self._shared[..., :0]
        return self._data

    @property
    def shared(self) -> Tensor | None:
        """The entries of the buffer that this branched from."""
        return self._shared

    def crop(self, length: int) -> None:
        """Forget the entries from `length` on, and give their room back."""
        if length < self.length:
            self._hold(self.view()[..., :length])

    def drop(self, n: int) -> None:
        """Forget the first `n` entries, and give their room back."""
        if self.length and n > 0:
            self._hold(self.view()[..., n:])

    def keep(self, which: Tensor) -> None:
        """Keep the entries that a mask names, and give the others' room back."""
        if self.length:
            self._hold(self.view()[..., which])

    def copy(self) -> "TokenBuffer":
        """Another with the same entries, without spare room."""
        twin = TokenBuffer(self.tokens_per_entry)
        twin.append(self.view())
        return twin

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch, in that order."""
        if self._shared is not None:
            self._hold(self.view())
        if self._data is not None:
            self._data = self._data.index_select(0, rows.to(self._data.device))

    @property
    def length(self) -> int:
        """Entries appended."""
        return self._own_length + (0 if self._shared is None else self._shared.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes held, shared ones included."""
        return sum(0 if x is None else x.nbytes for x in (self._data, self._shared))

    def _hold(self, x: Tensor) -> None:
        self._data = x.clone(memory_format=torch.contiguous_format)
        self._shared, self._own_length = None, x.shape[-1]
