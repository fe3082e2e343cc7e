"""Byte planes that a page coder has made smaller: records end to end, page after page, in each page row after row.

record = length of what follows (4 bytes, little-endian) · bytes
"""

from typing import final

import torch
from jaxtyping import UInt8
from torch import Tensor

from karhunen.device import HOST
from karhunen.packing.base import PageCoder
from karhunen.store.buffers import TokenBuffer

HEADER_BYTES = 4


@final
class PageBuffer:
    """A `TokenBuffer` of planes `[b p t]` that holds whole pages, shrunk."""

    tokens_per_entry = 1

    def __init__(self, coder: PageCoder) -> None:
        self.coder = coder
        self._records = TokenBuffer()
        self._n_rows = 0
        self._length = 0
        self._device = HOST

    def branch(self) -> "PageBuffer":
        """A buffer that goes on from here by itself and shares the records that are there."""
        twin = PageBuffer(self.coder)
        twin._records = self._records.branch()
        twin._n_rows, twin._length, twin._device = self._n_rows, self._length, self._device
        return twin

    @classmethod
    def restored(cls, coder: PageCoder, records: UInt8[Tensor, " n"], n_rows: int, length: int) -> "PageBuffer":
        """The mirror of `records`; ValueError if they do not make pages of `length` tokens."""
        made = cls(coder)
        made._records.append(records)
        made._n_rows, made._length, made._device = n_rows, length, records.device
        sizes = [len(record) for record in made._read()]
        n_pages, rest = divmod(length, coder.page_tokens)
        whole = sum(sizes) + HEADER_BYTES * len(sizes) == records.numel()
        if rest or len(sizes) != n_pages * n_rows or not whole:
            raise ValueError(f"{len(sizes)} records are not those of {length} tokens in {n_rows} rows")
        return made

    @property
    def records(self) -> UInt8[Tensor, " n"]:
        """All that is held, without spare room."""
        return self._records.view()

    def append(self, x: UInt8[Tensor, "b p t"]) -> None:
        """Add tokens at the end, in whole pages."""
        assert x.shape[-1] % self.coder.page_tokens == 0, "the store hands over whole pages"
        self._n_rows, self._device = x.shape[0], x.device
        self._length += x.shape[-1]
        self._write([self.coder.shrink(row) for page in x.split(self.coder.page_tokens, dim=-1) for row in page])

    def view(self) -> UInt8[Tensor, "b p t"]:
        """What was appended."""
        pages = [self.coder.grow(record) for record in self._read()]
        by_page = [torch.stack(pages[i : i + self._n_rows]) for i in range(0, len(pages), self._n_rows)]
        return torch.cat(by_page, dim=-1).to(self._device)

    def storage(self) -> Tensor:
        """The tensor held: all records, and spare room; of a branch, its own."""
        return self._records.storage()

    @property
    def shared(self) -> Tensor | None:
        """The records of the buffer that this branched from."""
        return self._records.shared

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on, which ends a page."""
        self._keep(self._read()[: length // self.coder.page_tokens * self._n_rows], length)

    def drop(self, n: int) -> None:
        """Forget the first `n` tokens, whole pages."""
        self._keep(self._read()[n // self.coder.page_tokens * self._n_rows :], self._length - n)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows of the batch, in that order."""
        records, n = self._read(), self._n_rows
        self._n_rows = len(rows)
        self._keep([records[i + r] for i in range(0, len(records), n) for r in rows.tolist()], self._length)

    @property
    def length(self) -> int:
        """Tokens appended."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._records.nbytes

    def _keep(self, records: list[bytes], length: int) -> None:
        self._records, self._length = TokenBuffer(), length
        self._write(records)

    def _write(self, records: list[bytes]) -> None:
        data = b"".join(len(record).to_bytes(HEADER_BYTES, "little") + record for record in records)
        empty = torch.empty(0, dtype=torch.uint8, device=HOST)
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty
        self._records.append(stored.to(self._device))

    def _read(self) -> list[bytes]:
        data = self._records.view().cpu().numpy().tobytes()
        found, at = [], 0
        while at < len(data):
            start = at + HEADER_BYTES
            at = start + int.from_bytes(data[at:start], "little")
            found.append(data[start:at])
        return found
