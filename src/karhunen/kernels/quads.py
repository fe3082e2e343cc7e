"""Byte tables as the CPU kernels read them: cut into quads, four columns wide, one vector per entry.

A plane of w columns becomes ⌈w / 4⌉ quads, zero-padded; a head has an even number, so that two fill a vector of eight.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.host import HOST


class Quads(NamedTuple):
    """Quads of all planes, head after head."""

    entries: np.ndarray  # [quad][256][4]
    columns: np.ndarray  # [quad][4][256]
    coefficient: np.ndarray  # [quad][4]; 0 where padded, for entries there are 0
    quad_plane: np.ndarray  # [quad]
    head_quads: np.ndarray  # [h + 1]
    plane_quads: np.ndarray  # [plane + 1]; the padding at the end of a head belongs to no plane
    plane_end: np.ndarray  # [plane]
    plane_start: np.ndarray  # [h + 1]
    most_planes: int  # of a head
    most_quads: int
    in_order: bool  # the columns of every head's quads name coefficients 0, 1, 2, …, or nothing


def quads_of(tables: ByteTables) -> Quads:
    """The tables' quads, cut at first use."""
    if "quads" not in tables.prepared:
        tables.prepared["quads"] = _cut(tables)
    return tables.prepared["quads"]


def _cut(tables: ByteTables) -> Quads:
    entries, coefficient, quad_plane = [], [], []
    head_quads, plane_quads, plane_end = [0], [], []
    for head in range(tables.n_heads):
        for j in range(tables.plane_start[head], tables.plane_start[head + 1]):
            table, index = tables.plane(j)
            plane_quads.append(len(entries))
            for first in range(0, len(index), 4):
                width = min(4, len(index) - first)
                entries.append(torch.nn.functional.pad(table[:, first : first + 4].float(), (0, 4 - width)))
                coefficient.append(torch.nn.functional.pad(index[first : first + 4].long(), (0, 4 - width)))
                quad_plane.append(j)
            plane_end.append(len(entries))
        if len(entries) % 2:
            entries.append(torch.zeros(256, 4, device=HOST))
            coefficient.append(torch.zeros(4, dtype=torch.long, device=HOST))
            quad_plane.append(quad_plane[-1])
        head_quads.append(len(entries))
    stacked = torch.stack(entries) if entries else torch.zeros(0, 256, 4, device=HOST)
    most_quads = int(np.diff(head_quads).max(initial=0))
    named = torch.cat(coefficient) if entries else torch.zeros(0, dtype=torch.long, device=HOST)
    own = torch.cat([torch.arange(4 * (b - a), device=HOST) for a, b in pairwise(head_quads)])
    in_order = bool(((named == own) | (stacked == 0).all(1).view(-1)).all()) and tables.n_coefficients == 4 * most_quads
    return Quads(
        entries=_flat(stacked),
        columns=_flat(stacked.mT),
        coefficient=_flat(named, torch.int64),
        quad_plane=np.array(quad_plane, np.int64),
        head_quads=np.array(head_quads, np.int64),
        plane_quads=np.array(plane_quads, np.int64),
        plane_end=np.array(plane_end, np.int64),
        plane_start=np.array(tables.plane_start, np.int64),
        most_planes=int(np.diff(tables.plane_start).max(initial=0)),
        most_quads=most_quads,
        in_order=in_order,
    )


def _flat(tensor: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    return tensor.to(dtype).contiguous().view(-1).numpy()
