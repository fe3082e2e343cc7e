"""Byte tables as the GPU kernels read them: cut into quads of four float16 columns, so that a look-up is one load.

    bits[quad][byte] = four float16 entries,    entry · scale[head] = the table's

A plane of w columns becomes ⌈w / 4⌉ quads, zero-padded; quads of zeros pad a head up to the sum of its `pieces`.
`scale` is a power of two that brings the head's largest entry near 2^10, so that float16 neither overflows nor loses
small entries; tables that are float16 stay exact.
`term_*` invert the map: coefficient c of head i is the sum of columns `term_column[i, :, c]`, in the order of planes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables

LARGEST_EXPONENT = 10
LEAST_PIECE = 16


class EntryQuads(NamedTuple):
    """Quads of each KV head, the same number for all; padding reads byte plane 0 and adds zeros to coefficient 0."""

    bits: Int[Tensor, "h n 256"]  # four float16, the first in the lowest bits
    plane: Int[Tensor, "h n"]  # the byte that a quad reads
    coefficient: Int[Tensor, "h n 4"]
    scale: Float[Tensor, " h"]
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
    n = sum(pieces(max(_n_quads(tables, head) for head in range(tables.n_heads))))
    half = torch.zeros(tables.n_heads, n, 256, 4, dtype=torch.float16)
    plane = torch.zeros(tables.n_heads, n, dtype=torch.int32)
    coefficient = torch.zeros(tables.n_heads, n, 4, dtype=torch.int32)
    scale = torch.ones(tables.n_heads)
    placed: list[list[tuple[int, int, int]]] = []
    for head in range(tables.n_heads):
        planes = [(j, *(part.cpu() for part in tables.plane(j))) for j in _planes(tables, head)]
        peak = max((float(table.abs().max()) for _, table, _ in planes if table.numel()), default=0.0)
        if peak:
            scale[head] = 2.0 ** (torch.tensor(peak).log2().floor() - LARGEST_EXPONENT)
        quad, terms = 0, []
        for j, table, index in planes:
            for first in range(0, len(index), 4):
                part = index[first : first + 4]
                half[head, quad, :, : len(part)] = (table[:, first : first + 4].float() / scale[head]).half()
                coefficient[head, quad, : len(part)] = part.int()
                plane[head, quad] = j
                terms += [(j, c, 4 * quad + k) for k, c in enumerate(part.tolist())]
                quad += 1
        placed.append(terms)
    bits = half.contiguous().view(torch.int64).squeeze(-1)
    return EntryQuads(bits, plane, coefficient, scale, _inverted(placed, tables.n_coefficients)[1])


def _inverted(placed: list[list[tuple[int, int, int]]], n_coefficients: int) -> tuple[Tensor, Tensor]:
    """Plane and column of each coefficient's terms, from each head's (plane, coefficient, column) in their order."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for head, terms in enumerate(placed):
        for j, c, column in terms:
            found.setdefault((head, c), []).append((j, column))
    n_terms = max((len(terms) for terms in found.values()), default=1)
    both = torch.full((2, len(placed), n_terms, n_coefficients), -1, dtype=torch.int32)
    for (head, c), terms in found.items():
        both[:, head, : len(terms), c] = torch.tensor(terms, dtype=torch.int32).T
    return both[0], both[1]


def _planes(tables: ByteTables, head: int) -> range:
    return range(tables.plane_start[head], tables.plane_start[head + 1])


def _columns(tables: ByteTables, j: int) -> list[tuple[int, int]]:
    """Column and coefficient of each column of plane j."""
    start, stop = tables.column_start[j], tables.column_start[j + 1]
    return list(zip(range(start, stop), tables.coefficient[start:stop].tolist(), strict=True))


def _n_quads(tables: ByteTables, head: int) -> int:
    return sum(-(-(tables.column_start[j + 1] - tables.column_start[j]) // 4) for j in _planes(tables, head))
