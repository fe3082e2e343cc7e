"""One side of one layer as the parts of a page, and back: byte planes, then side tensors, then exact vectors.

part of n tokens = [ planes: p · n bytes, plane after plane ][ side tensors by name, row after row ][ exact vectors ]

With `SHRUNK` set in the part's length, its planes are [ length: 4 bytes ][ raw DEFLATE stream ]. Little-endian.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from karhunen.codec import Packed, SideCodec
from karhunen.device import HOST
from karhunen.packing.deflate import LEVEL, RAW
from karhunen.pages.frame import LENGTH, SHRUNK
from karhunen.pages.heads import HeadPart, parts_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
LITTLE = {1: "<u1", 2: "<i2", 4: "<i4", 8: "<i8"}


@final
@dataclass(frozen=True)
class SideTensor:
    """A side tensor of a codec: `rows` values for each `block_tokens` tokens."""

    dtype: torch.dtype
    rows: int
    block_tokens: int


@final
@dataclass(frozen=True)
class SideLayout:
    """Where the bytes of one side lie in a page."""

    side: SideCodec
    dim: int
    tensors: dict[str, SideTensor]

    @classmethod
    def of(cls, side: SideCodec, dim: int) -> "SideLayout":
        """Known from coding one granule of zeros of `dim` coordinates a head."""
        n = side.granule_tokens
        zeros = torch.zeros(1, side.n_heads, n, dim, device=side.device or HOST)
        packed = side.encode(zeros, torch.arange(n, device=zeros.device)[None])
        tensors = {name: SideTensor(x.dtype, x.shape[1], n // x.shape[-1]) for name, x in sorted(packed.side.items())}
        return cls(side, dim, tensors)

    @cached_property
    def parts(self) -> tuple[HeadPart, ...]:
        """One for each head, or one for all."""
        return parts_of(self.side, {name: tensor.rows for name, tensor in self.tensors.items()})

    @property
    def description(self) -> str:
        """All that decides where a byte lies; hashed into the owner."""
        rows = [f"{name} {t.dtype} {t.rows}/{t.block_tokens}" for name, t in self.tensors.items()]
        parts = [f"{part.fields.widths} {sorted(part.rows.items())}" for part in self.parts]
        return "; ".join((f"{self.side.n_heads} heads of {self.dim}", *rows, *parts))

    def plane_bytes(self, part: int, n_tokens: int) -> int:
        """Of one part, before it is deflated."""
        return self.parts[part].bytes_per_token * n_tokens

    def side_bytes(self, part: int, n_tokens: int) -> int:
        """Of one part's side tensors."""
        rows = self.parts[part].rows
        return sum(
            len(rows[name]) * (n_tokens // t.block_tokens) * t.dtype.itemsize for name, t in self.tensors.items()
        )

    def heads_of(self, part: int) -> slice:
        """Whose exact vectors go with a part."""
        return slice(part, part + 1) if len(self.parts) > 1 else slice(0, self.side.n_heads)

    def taken_apart(self, packed: Packed, n_pages: int, page_tokens: int, parts: range) -> list[list[list[bytes]]]:
        """`[page][part]` → planes, then side tensors, of coded tokens of one row."""
        planes = self._by_part(packed.planes, parts)
        arrays = {name: _array(x[0]) for name, x in packed.side.items()}
        pages: list[list[list[bytes]]] = []
        for page in range(n_pages):
            start, stop = page * page_tokens, (page + 1) * page_tokens
            made: list[list[bytes]] = []
            for part, own in zip(parts, planes, strict=True):
                pieces = [own[:, start:stop].tobytes()]
                for name, tensor in self.tensors.items():
                    entries = slice(start // tensor.block_tokens, stop // tensor.block_tokens)
                    pieces.append(arrays[name][self.parts[part].row_index[name], entries].tobytes())
                made.append(pieces)
            pages.append(made)
        return pages

    def put_together(
        self, pages: Sequence[Sequence[tuple[memoryview, memoryview]]], parts: range, lengths: Sequence[int]
    ) -> Packed:
        """The mirror of `taken_apart`: (planes, side tensors) by page and part; heads that are not there are zero."""
        n_tokens = sum(lengths)
        planes = [np.empty((self.parts[part].bytes_per_token, n_tokens), np.uint8) for part in parts]
        side = {
            name: np.zeros((t.rows, n_tokens // t.block_tokens), LITTLE[t.dtype.itemsize])
            for name, t in self.tensors.items()
        }
        at = 0
        for page, n in zip(pages, lengths, strict=True):
            for i, (part, (plane_bytes, side_bytes)) in enumerate(zip(parts, page, strict=True)):
                planes[i][:, at : at + n] = np.frombuffer(plane_bytes, np.uint8).reshape(-1, n)
                self._fill(side, self.parts[part], side_bytes, at, n)
            at += n
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            native = side[name].astype(side[name].dtype.newbyteorder("="), copy=False)
            found[name] = torch.from_numpy(native).view(tensor.dtype)[None]
        self._check(found)
        return Packed(self._joined(planes, parts, n_tokens)[None], found)

    def _fill(self, side: dict[str, np.ndarray], part: HeadPart, data: memoryview, at: int, n: int) -> None:
        start = 0
        for name, tensor in self.tensors.items():
            n_rows, entries, first = len(part.rows[name]), n // tensor.block_tokens, at // tensor.block_tokens
            stop = start + n_rows * entries * tensor.dtype.itemsize
            values = np.frombuffer(data[start:stop], LITTLE[tensor.dtype.itemsize]).reshape(n_rows, entries)
            side[name][part.row_index[name], first : first + entries] = values
            start = stop

    def _by_part(self, planes: Tensor, parts: range) -> list[np.ndarray]:
        """Planes `[p, t]` of each part."""
        own = planes[0].cpu()
        if len(self.parts) == 1:
            return [own.numpy()]
        found: list[np.ndarray] = []
        symbols: Tensor | None = None
        for part in (self.parts[i] for i in parts):
            if part.planes is not None:
                found.append(own[part.plane_index].numpy())
                continue
            symbols = self.side.layout.unpack(planes).cpu() if symbols is None else symbols
            found.append(part.fields.pack(symbols[:, list(part.symbols)])[0].numpy())
        return found

    def _joined(self, planes: list[np.ndarray], parts: range, n_tokens: int) -> Tensor:
        """The mirror of `_by_part`."""
        if len(self.parts) == 1:
            return torch.from_numpy(planes[0])
        chosen = [self.parts[i] for i in parts]
        if all(part.planes is not None for part in chosen):
            joined = torch.zeros(self.side.layout.bytes_per_token, n_tokens, dtype=torch.uint8, device=HOST)
            for part, own in zip(chosen, planes, strict=True):
                joined[part.plane_index] = torch.from_numpy(own)
            return joined
        symbols = torch.zeros(1, len(self.side.quantizer.widths), n_tokens, dtype=torch.int32, device=HOST)
        for part, own in zip(chosen, planes, strict=True):
            symbols[:, list(part.symbols)] = part.fields.unpack(torch.from_numpy(own)[None]).int()
        return self.side.layout.pack(symbols)[0]

    def _check(self, side: dict[str, Tensor]) -> None:
        """What no encoder writes would become NaN or an index past the end."""
        n_coefficients = self.side.n_heads * self.dim
        for name, x in side.items():
            if x.dtype.is_floating_point:
                fits = math.isfinite(float(x.double().sum()))  # of finite numbers of 16 or 32 bits it is finite
            else:
                fits = x.dtype == torch.uint8 or not x.numel() or bool(((x >= 0) & (x < n_coefficients)).all())
            if not fits:
                raise ValueError(f"a page whose `{name}` holds what no encoder writes; make it again")


def shrunk(planes: bytes) -> bytes | None:
    """Planes with their length before them, deflated; None where that is not smaller."""
    coder = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW)
    data = coder.compress(planes) + coder.flush()
    return LENGTH.pack(len(data)) + data if LENGTH.size + len(data) < len(planes) else None


def opened(part: memoryview, length: int, plane_bytes: int) -> tuple[memoryview, memoryview]:
    """(planes, what follows) of a part; a stream that holds more than `plane_bytes` is not inflated past them."""
    if not length & SHRUNK:
        if len(part) < plane_bytes:
            raise ValueError(
                f"a page with a part of {len(part)} bytes, of {plane_bytes} its codes alone; make it again"
            )
        return part[:plane_bytes], part[plane_bytes:]
    n_bytes = LENGTH.unpack_from(part)[0] if len(part) >= LENGTH.size else len(part)
    if LENGTH.size + n_bytes > len(part):
        raise ValueError(f"a page with a part of {len(part)} bytes and {n_bytes} deflated ones; make it again")
    coder = zlib.decompressobj(RAW)
    try:
        planes = coder.decompress(part[LENGTH.size : LENGTH.size + n_bytes], plane_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"a page with a part that cannot be inflated ({error}); make it again") from error
    if len(planes) != plane_bytes or not coder.eof or coder.unused_data:
        raise ValueError(f"a page with a part that does not inflate to {plane_bytes} bytes; make it again")
    return memoryview(planes), part[LENGTH.size + n_bytes :]


def raw_bytes(x: Tensor) -> bytes:
    """The numbers of a tensor, little-endian."""
    return _array(x).tobytes()


def raw_tensor(data: memoryview | bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The mirror of `raw_bytes`; the length was checked."""
    values = np.frombuffer(data, LITTLE[dtype.itemsize])
    native = values.astype(values.dtype.newbyteorder("="), copy=True)
    return torch.from_numpy(native).view(dtype).reshape(tuple(shape))


def _array(x: Tensor) -> np.ndarray:
    found = x.detach().cpu().contiguous().view(INTEGERS[x.dtype.itemsize]).numpy()
    return found.astype(found.dtype.newbyteorder("<"), copy=False)
