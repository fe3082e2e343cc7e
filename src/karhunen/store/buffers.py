"""Tensors that grow along time. Time is the last axis; what is written is never written again."""

from typing import final

import torch
from torch import Tensor

GROWTH_SHARE = 128  # a buffer that has to grow takes spare room of one part in this many of what it holds


@final
class TokenBuffer:
    """Append-only storage of `[b, ..., entries]`, an entry for each `tokens_per_entry` tokens; `nbytes` counts the
    spare room too."""

    def __init__(self, tokens_per_entry: int = 1) -> None:
        self.tokens_per_entry = tokens_per_entry
        self._data: Tensor | None = None
        self._length = 0

    def append(self, x: Tensor) -> None:
        """Add entries at the end. The first append fits exactly; later ones leave a little room."""
        if self._data is None:
            self._data = x.clone(memory_format=torch.contiguous_format)
            self._length = x.shape[-1]
            return
        needed = self._length + x.shape[-1]
        capacity = self._data.shape[-1]
        if needed > capacity:
            room = max(needed, capacity + capacity // GROWTH_SHARE)
            grown = self._data.new_empty(*self._data.shape[:-1], room)
            grown[..., : self._length] = self._data[..., : self._length]
            self._data = grown
        self._data[..., self._length : needed] = x
        self._length = needed

    def view(self) -> Tensor:
        """What was appended."""
        if self._data is None:
            raise ValueError("nothing was appended to this buffer")
        return self._data[..., : self._length]

    def storage(self) -> Tensor:
        """The tensor held, spare room included."""
        if self._data is None:
            raise ValueError("nothing was appended to this buffer")
        return self._data

    def crop(self, length: int) -> None:
        """Forget the entries from `length` on, and give their room back."""
        if self._data is not None and length < self._length:
            self._data = self._data[..., :length].clone(memory_format=torch.contiguous_format)
            self._length = length

    def drop(self, n: int) -> None:
        """Forget the first `n` entries, and give their room back."""
        if self._data is not None and n > 0:
            self._data = self._data[..., n : self._length].clone(memory_format=torch.contiguous_format)
            self._length = self._data.shape[-1]

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch, in that order."""
        if self._data is not None:
            self._data = self._data.index_select(0, rows.to(self._data.device))

    @property
    def length(self) -> int:
        """Entries appended."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._data is None else self._data.nbytes
