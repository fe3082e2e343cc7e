"""Cosines and sines of the first positions of blocks, by which the CPU scan turns a query."""

from dataclasses import dataclass
from typing import final

import numpy as np

from karhunen.kernels.scan_attention.cpu_tables import PAD
from karhunen.kernels.scan_attention.frames import Frames


@final
@dataclass(frozen=True)
class _Angles:
    """Cosines and sines of the first positions of blocks `low` … `high` − 1, [block][cosines | sines], padded."""

    table: np.ndarray
    low: int
    high: int
    address: int
    """Of block 0, which may lie outside the table."""
    row: int

    @classmethod
    def of(cls, frames: Frames, low: int, high: int) -> "_Angles":
        n_pairs = -(-len(frames.frequencies) // PAD) * PAD
        angle = np.arange(low, high)[:, None] * float(frames.block_tokens or 0) * np.array(frames.frequencies)
        made = np.zeros((len(angle), 2 * n_pairs), np.float32)
        made[:, : angle.shape[1]] = np.cos(angle)
        made[:, n_pairs : n_pairs + angle.shape[1]] = np.sin(angle)
        row = made.strides[0]
        return cls(made, low, high, made.ctypes.data - low * row, row)


def angles_of(frames: Frames, first: int, last: int) -> tuple[int, int]:
    """Address and row bytes of the angles of blocks, of which `first` … `last` may be read; rows padded on the left
    begin below 0. Kept for good, since another thread may be reading, and shared by layers that turn alike."""
    found: _Angles | None = frames.prepared.get("angles")
    if found is None or first < found.low or last >= found.high:
        key = (frames.frequencies, frames.block_tokens)
        made = _angles.setdefault(key, [])
        if not made or first < made[-1].low or last >= made[-1].high:
            low = made[-1].low if made else 0
            made.append(_Angles.of(frames, min(low, first), max(2 * last, 64) + 1))
        found = frames.prepared["angles"] = made[-1]
    return found.address, found.row


_angles: dict[tuple[tuple[float, ...], int | None], list[_Angles]] = {}
