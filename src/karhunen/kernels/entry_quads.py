"""Byte tables as the GPU kernels read them: cut into quads of four columns, so that a look-up is one load of one word.

    float16 entries   word = low[quad][byte]: 64 bits, four float16
    look-ups of int8  word = low[quad][byte mod 2^a] + high[quad][byte div 2^(8 − b)]: 32 bits, four digits entry + 128

A digit of the second sum never leaves 0 … 255 (`Lookups` refuses what would), so one 32-bit addition adds four
columns. A plane of w columns becomes ⌈w / 4⌉ quads; places without a column hold zeros and have scale 0. Quads of them
pad a head up to the sum of its `pieces`. Scales of float16 entries are powers of two that bring a head's largest near
2^10, so that float16 neither overflows nor loses small entries; tables that are float16 stay exact.
`term_*` invert the map: coefficient c of head i is the sum of columns `term_column[i, :, c]`, in the order of planes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.host import HOST

LARGEST_EXPONENT = 10
LEAST_PIECE = 16
DIGIT_OF_ZERO = 128


class EntryQuads(NamedTuple):
    """Quads of each KV head, the same number for all. Padding reads byte plane 0 and belongs to coefficient 0."""

    low: Int[Tensor, "h n rows"]  # int64: four float16, or int32: four digits; the first in the lowest bits
    high: Int[Tensor, "h n rows"]  # no row where there is one look-up
    plane: Int[Tensor, "h n"]  # the byte that a quad reads
    coefficient: Int[Tensor, "h places"]
    scale: Float[Tensor, "h places"]  # what an entry of a column is multiplied by
    term_column: Int[Tensor, "h terms c"]  # 4 · quad + place; -1: no such term


class EntryTerms(NamedTuple):
    """The float32 entries behind each coefficient: what exact decoding reads."""

    entries: Float[Tensor, "256 columns"]
    plane: Int[Tensor, "h terms c"]  # -1: no such term
    column: Int[Tensor, "h terms c"]


def entry_quads(tables: ByteTables, device: torch.device) -> EntryQuads:
    """The tables' quads on a device, cut at first use."""
    key = f"entry_quads {device}"
    if key not in tables.prepared:
        tables.prepared[key] = EntryQuads(*(part.to(device) for part in _cut(tables)))
    return tables.prepared[key]


def entry_terms(tables: ByteTables, device: torch.device) -> EntryTerms:
    """The tables' terms on a device, inverted at first use."""
    key = f"entry_terms {device}"
    if key not in tables.prepared:
        columns = [
            [(j, c, k) for j in _planes(tables, head) for k, c in _columns(tables, j)] for head in range(tables.n_heads)
        ]
        plane, column = _inverted(columns, tables.n_coefficients)
        entries = tables.entries.float().contiguous()
        tables.prepared[key] = EntryTerms(*(part.to(device) for part in (entries, plane, column)))
    return tables.prepared[key]


def pieces(n_quads: int) -> tuple[int, int]:
    """Two powers of two, or one and 0, whose sum is the least that holds the quads; none below what a product takes."""
    whole = max(LEAST_PIECE, 1 << (n_quads - 1).bit_length() if n_quads else 0)
    half = whole // 2
    rest = max(LEAST_PIECE, 1 << max(0, n_quads - half - 1).bit_length())
    return (half, rest) if half < n_quads and rest < half else (whole, 0)


def refines(tables: ByteTables) -> bool:
    """Whether two planes of a head name one coefficient: the later codes what the earlier left."""
    if "refines" not in tables.prepared:
        named = [[c for j in _planes(tables, head) for _, c in _columns(tables, j)] for head in range(tables.n_heads)]
        tables.prepared["refines"] = any(len(set(each)) < len(each) for each in named)
    return tables.prepared["refines"]


def _cut(tables: ByteTables) -> EntryQuads:
    n = sum(pieces(max((_n_quads(tables, head) for head in range(tables.n_heads)), default=0)))
    plane = torch.zeros(tables.n_heads, n, dtype=torch.int32, device=HOST)
    column = torch.full((tables.n_heads, 4 * n), -1, device=HOST)  # which of the tables' stands at a place of the quads
    placed: list[list[tuple[int, int, int]]] = []
    for head in range(tables.n_heads):
        quad, terms = 0, []
        for j in _planes(tables, head):
            mine = _columns(tables, j)
            for first in range(0, len(mine), 4):
                for place, (k, c) in enumerate(mine[first : first + 4], 4 * quad):
                    column[head, place] = k
                    terms.append((j, c, place))
                plane[head, quad] = j
                quad += 1
        placed.append(terms)
    there = column >= 0
    coefficient = torch.where(there, _at(tables.coefficient.cpu(), column), 0).int()
    low, high, scale = _float16_words(tables, column) if tables.lookups is None else _digit_words(tables, column)
    terms = _inverted(placed, tables.n_coefficients)[1]
    return EntryQuads(low, high, plane, coefficient, torch.where(there, scale, 0.0), terms)


def _at(rows: Tensor, column: Int[Tensor, "h places"]) -> Tensor:
    """Columns [..., k] of the tables at the places of the quads, zeros where there is none: [..., h, 4n]."""
    return torch.cat([rows, rows.new_zeros(*rows.shape[:-1], 1)], -1)[..., column]


def _float16_words(tables: ByteTables, column: Int[Tensor, "h places"]) -> tuple[Tensor, Tensor, Tensor]:
    entries = _at(tables.entries.float().cpu(), column).movedim(0, 1)  # [h 256 4n]
    peak = entries.abs().amax((1, 2)) if entries.numel() else torch.zeros(len(column), device=HOST)
    exponent = torch.frexp(peak.clamp_min(1e-37)).exponent - 1 - LARGEST_EXPONENT
    scale = torch.where(peak > 0, torch.ldexp(torch.ones_like(peak), exponent), 1.0)
    half = (entries / scale[:, None, None]).half().unflatten(2, (-1, 4)).transpose(1, 2).contiguous()  # [h n 256 4]
    words = half.view(torch.int64).squeeze(-1)
    return words, words[..., :0], scale[:, None].expand_as(column)


def _digit_words(tables: ByteTables, column: Int[Tensor, "h places"]) -> tuple[Tensor, Tensor, Tensor]:
    lookups = tables.lookups
    assert lookups is not None, "these tables are look-ups"
    low, high = (_word(_at(rows.cpu().long(), column)) for rows in (lookups.low, lookups.high))
    zeros = sum(DIGIT_OF_ZERO << 8 * place for place in range(4))
    return _int32(low + zeros), _int32(high), _at(lookups.scale.float().cpu(), column)


def _word(rows: Int[Tensor, "rows h places"]) -> Int[Tensor, "h n rows"]:
    """Four neighbours as the digits of one number; those below zero borrow from the next."""
    places = 256 ** torch.arange(4, device=HOST)
    return (rows.unflatten(2, (-1, 4)) * places).sum(-1).permute(1, 2, 0)


def _int32(words: Int[Tensor, "h n rows"]) -> Int[Tensor, "h n rows"]:
    """Modulo 2^32."""
    return ((words + 2**31) % 2**32 - 2**31).int().contiguous()


def _inverted(placed: list[list[tuple[int, int, int]]], n_coefficients: int) -> tuple[Tensor, Tensor]:
    """Plane and column of each coefficient's terms, from each head's (plane, coefficient, column) in their order."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for head, terms in enumerate(placed):
        for j, c, column in terms:
            found.setdefault((head, c), []).append((j, column))
    n_terms = max((len(terms) for terms in found.values()), default=1)
    both = torch.full((2, len(placed), n_terms, n_coefficients), -1, dtype=torch.int32, device=HOST)
    for (head, c), terms in found.items():
        both[:, head, : len(terms), c] = torch.tensor(terms, dtype=torch.int32, device=HOST).T
    return both[0], both[1]


def _planes(tables: ByteTables, head: int) -> range:
    return range(tables.plane_start[head], tables.plane_start[head + 1])


def _columns(tables: ByteTables, j: int) -> list[tuple[int, int]]:
    """Column and coefficient of each column of plane j."""
    start, stop = tables.column_start[j], tables.column_start[j + 1]
    return list(zip(range(start, stop), tables.coefficient[start:stop].tolist(), strict=True))


def _n_quads(tables: ByteTables, head: int) -> int:
    return sum(-(-(tables.column_start[j + 1] - tables.column_start[j]) // 4) for j in _planes(tables, head))
