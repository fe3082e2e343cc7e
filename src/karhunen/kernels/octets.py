"""Byte tables as scores read them: cut into octets, eight columns wide, an entry one vector.

A plane of w columns becomes ⌈w / 8⌉ octets, zero-padded. Entries are held as float16 where that is exact, which halves
the tables and lets one instruction load and widen an entry; else as float32.
"""

from typing import NamedTuple

import numpy as np
import torch

from karhunen.kernels.byte_tables import ByteTables


class Octets(NamedTuple):
    """Octets of all planes, head after head."""

    entries: np.ndarray  # [octet][256][8], float16 as uint16, or float32
    plane: np.ndarray  # [octet]
    column: np.ndarray  # [octet]; its first column among its head's
    head_octets: np.ndarray  # [h + 1]
    n_columns: np.ndarray  # [h]


def octets_of(tables: ByteTables) -> Octets:
    """The tables' octets, cut at first use."""
    if "octets" not in tables.prepared:
        tables.prepared["octets"] = _cut(tables)
    return tables.prepared["octets"]


def _cut(tables: ByteTables) -> Octets:
    entries, plane, column, head_octets = [], [], [], [0]
    for head in range(tables.n_heads):
        for j in range(tables.plane_start[head], tables.plane_start[head + 1]):
            table = tables.plane(j)[0].float()
            for first in range(0, table.shape[1], 8):
                part = table[:, first : first + 8]
                entries.append(torch.nn.functional.pad(part, (0, 8 - part.shape[1])))
                plane.append(j)
                column.append(tables.column_start[j] - tables.column_start[tables.plane_start[head]] + first)
        head_octets.append(len(entries))
    stacked = torch.stack(entries) if entries else torch.zeros(0, 256, 8)
    half = stacked.half()
    exact = bool((half.float() == stacked).all())
    return Octets(
        entries=(half.view(torch.int16) if exact else stacked).contiguous().view(-1).numpy(),
        plane=np.array(plane, np.int64),
        column=np.array(column, np.int64),
        head_octets=np.array(head_octets, np.int64),
        n_columns=np.diff([tables.column_start[plane] for plane in tables.plane_start]).astype(np.int64),
    )
