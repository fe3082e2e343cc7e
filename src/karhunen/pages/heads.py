"""Which symbols and side values belong to which KV head, so that a page can be cut between heads.

A side can be cut where each head is coded by itself: the frame does not join heads, and the quantizer says of every
symbol and side row whose it is. Other sides are one part, and a page that has one is not cut.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, final

from karhunen.codec import SideCodec
from karhunen.packing.bit_fields import BitFields
from karhunen.quantizers.affine import AffineQuantizer
from karhunen.quantizers.float8 import Float8Quantizer
from karhunen.quantizers.float8_static import StaticFloat8Quantizer
from karhunen.quantizers.lloyd_max import LloydMaxQuantizer

ROW_PER_HEAD = ("gain", "scale")


@final
@dataclass(frozen=True)
class HeadPart:
    """What of a side belongs to one part: symbols and rows of its side tensors, in order. `planes` are the bytes of a
    token that hold exactly these symbols, None where they share a byte with others' and are packed anew."""

    symbols: tuple[int, ...]
    rows: dict[str, tuple[int, ...]]
    planes: tuple[int, ...] | None
    fields: BitFields

    @cached_property
    def bytes_per_token(self) -> int:
        """Of the planes."""
        return self.fields.bytes_per_token

    @cached_property
    def plane_index(self) -> slice | list[int]:
        """`planes` to index with: a slice, and so a view, where they are neighbours."""
        return _index(self.planes or ())

    @cached_property
    def row_index(self) -> dict[str, slice | list[int]]:
        """`rows` to index with."""
        return {name: _index(rows) for name, rows in self.rows.items()}


def parts_of(side: SideCodec, side_rows: dict[str, int]) -> tuple[HeadPart, ...]:
    """One part for each head, or a single one where heads cannot be told apart."""
    widths = side.quantizer.widths
    owners = None if side.n_heads == 1 else _owners(side, side_rows)
    if owners is None:
        rows = {name: tuple(range(n)) for name, n in side_rows.items()}
        planes = tuple(range(side.layout.bytes_per_token))
        return (HeadPart(tuple(range(len(widths))), rows, planes, BitFields(widths)),)
    symbol_heads, row_heads = owners
    starts = list(accumulate(widths, initial=0))
    return tuple(
        _part(head, symbol_heads, row_heads, widths, starts, side.layout.bytes_per_token)
        for head in range(side.n_heads)
    )


def _index(places: tuple[int, ...]) -> slice | list[int]:
    neighbours = bool(places) and places == tuple(range(places[0], places[-1] + 1))
    return slice(places[0], places[-1] + 1) if neighbours else list(places)


def _part(
    head: int,
    symbol_heads: list[int],
    row_heads: dict[str, list[int]],
    widths: tuple[int, ...],
    starts: list[int],
    n_planes: int,
) -> HeadPart:
    symbols = tuple(i for i, owner in enumerate(symbol_heads) if owner == head)
    rows = {name: tuple(i for i, owner in enumerate(found) if owner == head) for name, found in row_heads.items()}
    fields = BitFields(tuple(widths[i] for i in symbols))
    return HeadPart(symbols, rows, _own_planes(symbols, widths, starts, n_planes), fields)


def _own_planes(
    symbols: tuple[int, ...], widths: tuple[int, ...], starts: list[int], n_planes: int
) -> tuple[int, ...] | None:
    """The planes that packing these symbols by themselves would give, if they are whole planes of all symbols."""
    if all(width == 8 for width in widths):
        return symbols
    if not symbols or symbols != tuple(range(symbols[0], symbols[-1] + 1)):
        return None
    start, stop = starts[symbols[0]], starts[symbols[-1] + 1]
    if start % 8 or (stop % 8 and stop != starts[-1]):
        return None
    return tuple(range(start // 8, min(-(-stop // 8), n_planes)))


def _owners(side: SideCodec, side_rows: dict[str, int]) -> tuple[list[int], dict[str, list[int]]] | None:
    if side.frame.joined:
        return None
    quantizer: Any = side.quantizer
    n_heads, n_symbols = side.n_heads, len(quantizer.widths)
    rows = {name: list(range(n)) for name, n in side_rows.items() if name in ROW_PER_HEAD and n == n_heads}
    if isinstance(quantizer, AffineQuantizer | LloydMaxQuantizer):
        if quantizer.bits.shape[0] != n_heads:
            return None
        symbols = (quantizer.bits > 0).nonzero()[:, 0].tolist()
        if isinstance(quantizer, AffineQuantizer):
            ranges = [symbols[i : i + quantizer.group] for i in range(0, n_symbols, quantizer.group)]
            if any(len(set(one)) != 1 for one in ranges):
                return None
            rows |= {name: [one[0] for one in ranges] for name in ("low", "step")}
    elif isinstance(quantizer, Float8Quantizer | StaticFloat8Quantizer):
        symbols = [i * n_heads // n_symbols for i in range(n_symbols)]
    elif hasattr(quantizer, "plane_group"):
        symbols = quantizer.plane_group.tolist()
    else:
        return None
    whole = rows.keys() == side_rows.keys() and all(len(found) == side_rows[name] for name, found in rows.items())
    return (symbols, rows) if whole and len(symbols) == n_symbols else None
