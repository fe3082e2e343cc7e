"""The fitted vector quantizer: one byte (or symbol) names one entry of a table that covers a few coefficients.

    ŷ[coordinates of plane j] += table_j[symbol_j],    ŷ = gain · that

Every static codec of the house ends here: group VQ, product VQ, residual VQ and byte codes differ only in which
coefficients share a symbol, so one read path serves them all. A plane of a later stage codes what the planes before it
left over.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_decode import byte_decode
from karhunen.kernels.byte_encode import byte_encode
from karhunen.kernels.byte_tables import ByteTables
from karhunen.quantizers.base import MOST_BITS, Codes, Quantizer
from karhunen.quantizers.gains import GAIN_BITS, GainKind, apply_gain, split_gain
from karhunen.quantizers.nearest import byte_path, nearest
from karhunen.values import refuse_unless_one_of

CHUNK_TOKENS = 4096  # bounds the distance table: tokens × entries × planes of one width


@final
@dataclass(frozen=True)
class VectorQuantizer(Quantizer):
    """`s` planes over `g` head groups of `c` coefficients, group by group, a plane after those it refines.

    Plane j belongs to group `plane_group[j]`, stage `plane_stage[j]`, has 2^`plane_bits[j]` entries of `plane_size[j]`
    coefficients at `coordinates` (concatenated).

    `entries` holds all tables end to end, row by row; `scale[j]` multiplies table j (1 unless the entries are float8).
    """

    g: int
    c: int
    gain: GainKind
    plane_group: Int[Tensor, " s"]
    plane_stage: Int[Tensor, " s"]
    plane_bits: Int[Tensor, " s"]
    plane_size: Int[Tensor, " s"]
    coordinates: Int[Tensor, " total"]
    entries: Tensor
    scale: Float[Tensor, " s"]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each plane's symbol."""
        return self._widths

    def check(self, g: int, c: int) -> None:
        """Planes in order, within their groups, with as many entries and coordinates as they say."""
        refuse_unless_one_of("gain", self.gain, tuple(GAIN_BITS))
        if (self.g, self.c) != (g, c):
            raise ValueError(f"it quantizes {self.g} groups of {self.c} coefficients, not {g} of {c}")
        per_plane = self.plane_group, self.plane_stage, self.plane_bits, self.plane_size, self.scale
        if len({x.shape for x in per_plane}) > 1:
            raise ValueError(f"planes are {sorted(len(x) for x in per_plane)} in number")
        groups, sizes, bits = (x.tolist() for x in (self.plane_group, self.plane_size, self.plane_bits))
        if groups != sorted(groups) or any(not 0 <= i < g for i in groups) or any(n < 1 for n in sizes):
            raise ValueError(f"planes do not cover coefficients of groups 0 to {g - 1}, in order")
        if any(not 0 <= b <= MOST_BITS for b in bits) or any(n < 0 for n in self.plane_stage.tolist()):
            raise ValueError(f"planes of {bits} bits; use 0 to {MOST_BITS}, in stages from 0 on")
        if self.entries.ndim != 1 or len(self.entries) != sum(2**b * n for b, n in zip(bits, sizes, strict=True)):
            raise ValueError(f"{self.entries.numel()} entries are not those of the planes")
        inside = not sizes or 0 <= int(self.coordinates.min()) <= int(self.coordinates.max()) < c
        if len(self.coordinates) != sum(sizes) or not inside:
            raise ValueError(f"{len(self.coordinates)} coordinates are not those of the planes, each below {c}")

    def encode(self, y: Float[Tensor, "b g t c"]) -> Codes:
        """Side information: `gain` [b g t], where there is one."""
        y = y.double()
        side: dict[str, Tensor] = {}
        if self.gain != "none":
            y, side["gain"] = split_gain(y, self.gain)
        parts = [self._encode_rows(part) for part in y.split(CHUNK_TOKENS, dim=2)]
        empty = torch.empty(y.shape[0], len(self.widths), 0, dtype=torch.int32, device=y.device)
        return Codes(torch.cat(parts, dim=-1) if parts else empty, side)

    def decode(self, codes: Codes) -> Float[Tensor, "b g t c"]:
        """The mirror of `encode`."""
        y = self._decode_symbols(codes.symbols)
        return apply_gain(y, codes.side["gain"]) if self.gain != "none" else y

    def _decode_symbols(self, symbols: Int[Tensor, "b s t"]) -> Float[Tensor, "b g t c"]:
        if self.byte_tables is not None:
            return byte_decode(symbols.to(torch.uint8), self.byte_tables, path=byte_path(symbols.device))
        b, _, t = symbols.shape
        rows = torch.zeros(b, t, self.g * self.c, device=symbols.device)
        for bucket in self.buckets:
            self._add(rows, bucket, symbols[:, bucket.planes])
        return rows.unflatten(-1, (self.g, self.c)).transpose(1, 2)

    def table(self, plane: int) -> Float[Tensor, "entries size"]:
        """The entries of one plane, float32, scale applied."""
        n, size = 2 ** int(self.plane_bits[plane]), int(self.plane_size[plane])
        start = self._entry_offsets[plane]
        return self.entries[start : start + n * size].float().reshape(n, size) * self.scale[plane]

    def plane_coordinates(self, plane: int) -> Int[Tensor, " size"]:
        """Which coefficients (of the plane's group) a plane covers."""
        start = self._coordinate_offsets[plane]
        return self.coordinates[start : start + int(self.plane_size[plane])].long()

    @cached_property
    def buckets(self) -> tuple["Bucket", ...]:
        """Planes of equal stage, entry count and size, which are coded as one batch; stages in order."""
        keys = list(zip(self.plane_stage.tolist(), self.plane_bits.tolist(), self.plane_size.tolist(), strict=True))
        found: list[Bucket] = []
        for key in sorted(set(keys)):
            planes = [j for j, k in enumerate(keys) if k == key]
            columns = [self.plane_coordinates(j) + int(self.plane_group[j]) * self.c for j in planes]
            tables = torch.stack([self.table(j) for j in planes])
            found.append(Bucket(torch.tensor(planes, device=self.entries.device), torch.stack(columns), tables))
        return tuple(found)

    @cached_property
    def byte_tables(self) -> ByteTables | None:
        """The tables as kernels read them; None unless every symbol is a byte."""
        if not len(self.widths) or set(self.widths) != {8}:
            return None
        heads: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.g)]
        for j, group in enumerate(self.plane_group.tolist()):
            heads[group].append((self.table(j), self.plane_coordinates(j)))
        return ByteTables.from_planes(heads, self.c)

    def _encode_rows(self, y: Float[Tensor, "b g t c"]) -> Int[Tensor, "b s t"]:
        b, _, t, _ = y.shape
        if self.byte_tables is not None:
            return byte_encode(y.float(), self.byte_tables, path=byte_path(y.device)).int()
        rest = y.transpose(1, 2).flatten(2).clone()  # [b t gc]
        symbols = torch.empty(b, len(self.widths), t, dtype=torch.int32, device=y.device)
        for bucket in self.buckets:
            x = rest[:, :, bucket.columns].permute(2, 0, 1, 3).flatten(1, 2)  # [s bt w]
            chosen, _ = nearest(x, bucket.tables)
            chosen = chosen.unflatten(1, (b, t)).transpose(0, 1)  # [b s t]
            symbols[:, bucket.planes] = chosen.int()
            if self._last_stage > 0:
                self._add(rest, bucket, chosen, sign=-1)
        return symbols

    def _add(self, rows: Tensor, bucket: "Bucket", symbols: Tensor, sign: int = 1) -> None:
        s, e, _ = bucket.tables.shape
        index = symbols.long() + e * torch.arange(s, device=symbols.device)[:, None]
        values = bucket.tables.to(rows.dtype).flatten(0, 1)[index]  # [b s t w]
        columns = bucket.columns.flatten()
        rows[:, :, columns] += sign * values.transpose(1, 2).flatten(2)

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return tuple(self.plane_bits.tolist())

    @cached_property
    def _last_stage(self) -> int:
        return int(self.plane_stage.max()) if len(self.widths) else 0

    @cached_property
    def _entry_offsets(self) -> list[int]:
        sizes = zip(self.plane_bits.tolist(), self.plane_size.tolist(), strict=True)
        return list(accumulate((2**bits * size for bits, size in sizes), initial=0))

    @cached_property
    def _coordinate_offsets(self) -> list[int]:
        return list(accumulate(self.plane_size.tolist(), initial=0))


@final
@dataclass(frozen=True)
class Bucket:
    """Planes that are coded as one batch; `columns` index the g·c coefficients of a token. No two planes of a bucket
    cover the same coefficient."""

    planes: Int[Tensor, " s"]
    columns: Int[Tensor, "s w"]
    tables: Float[Tensor, "s e w"]
