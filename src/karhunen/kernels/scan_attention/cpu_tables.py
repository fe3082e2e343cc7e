"""What the CPU scan reads of a codec, laid out once: tables by plane, and the query's maps by head.

Columns are in the order of the planes, so that a plane's are neighbours; `matrix` has the scale of each column in it.
A query is laid out as [first halves | second halves | rest], each padded with zeros to a multiple of eight.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import torch
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.scan_attention.frames import Frames

COLUMNS = 16  # a row of products is a multiple of this many floats
PAD = 8


@final
@dataclass(frozen=True)
class ScanTables:
    """One side's tables. Head i owns planes `plane_start[i]:plane_start[i + 1]`; plane j's columns begin at
    `column_start[j]`, counted from its head's first."""

    plane_start: np.ndarray
    column_start: np.ndarray  # int64 [head][planes of the widest + 1], 0 where a head has fewer
    first_column: np.ndarray  # of each head, in `rows`
    rows: np.ndarray  # float32 [column][32]: low, high
    bytes: np.ndarray  # uint8 [column][32]: the same from 0 on
    scale: np.ndarray  # float32 [column]
    offset: np.ndarray  # float32 [column]: of a sum of `bytes` to the entry, in steps
    most_planes: int
    width: int  # columns of the widest head, padded

    @classmethod
    def of(cls, tables: ByteTables) -> "ScanTables":
        """Made at first use."""
        if "scan" not in tables.prepared:
            tables.prepared["scan"] = cls._laid_out(tables)
        return tables.prepared["scan"]

    @classmethod
    def _laid_out(cls, tables: ByteTables) -> "ScanTables":
        nibbles = tables.nibbles
        assert nibbles is not None, "only additive tables are scanned"
        low, high = (part.cpu().T.contiguous().int().numpy() for part in (nibbles.low, nibbles.high))  # [column 16]
        both = np.concatenate([low, high], axis=1)
        least = np.concatenate([low.min(1, keepdims=True), high.min(1, keepdims=True)], axis=1) if len(low) else both
        shifted = np.concatenate([low - least[:, :1], high - least[:, 1:2]], axis=1)
        starts = np.array(tables.plane_start, np.int64)
        columns = np.array(tables.column_start, np.int64)
        most = int(np.diff(starts).max(initial=0))
        by_head = np.zeros((tables.n_heads, most + 1), np.int64)
        for head, (first, last) in enumerate(pairwise(tables.plane_start)):
            by_head[head, : last - first + 1] = columns[first : last + 1] - columns[first]
        widest = int(max((columns[b] - columns[a] for a, b in pairwise(tables.plane_start)), default=0))
        return cls(
            starts, by_head, columns[starts[:-1]], both.astype(np.float32), shifted.astype(np.uint8),
            nibbles.scale.float().cpu().numpy().copy(), least.sum(1).astype(np.float32), most, padded(widest, COLUMNS),
        )  # fmt: skip

    def widths(self) -> np.ndarray:
        """Columns of each head."""
        return np.append(self.first_column[1:], len(self.rows)) - self.first_column


@final
@dataclass(frozen=True)
class ScanFrames:
    """A frame's maps, one head after the other."""

    order: np.ndarray  # int64: where each place of a laid-out query comes from, -1: zero
    n_pairs: int  # padded
    matrix: np.ndarray  # float32 [head][place][column]: coefficients, then one column for what a block has in common
    turned_mean: np.ndarray  # float32 [head][2 · n_pairs]: the mean as `turn` takes it
    basis: np.ndarray  # float32 [2 · n_pairs][block_tokens, padded]: what cosines and sines say of each offset
    has_mean: bool
    has_common: bool

    @classmethod
    def of(cls, frames: Frames, tables: ByteTables, width: int) -> "ScanFrames":
        """Made at first use, for vectors of `width` bytes."""
        name = f"scan {width}"
        if name not in frames.prepared:
            frames.prepared[name] = cls._laid_out(frames, tables, width)
        return frames.prepared[name]

    @classmethod
    def _laid_out(cls, frames: Frames, tables: ByteTables, width: int) -> "ScanFrames":
        scan = ScanTables.of(tables)
        n_pairs = padded(len(frames.first), PAD)
        filling = [-1] * (n_pairs - len(frames.first))
        rest = list(frames.rest)
        places = [*frames.first, *filling, *frames.second, *filling, *rest, *[-1] * (padded(len(rest), PAD) - len(rest))]
        order = np.array(places, np.int64)
        heads, block = len(frames.matrix), frames.block_tokens
        matrix = torch.zeros(heads, len(order), scan.width + COLUMNS)
        there = torch.from_numpy(order >= 0)
        source = torch.from_numpy(order[order >= 0])
        common = frames.offset.clone().float()
        common[:, rest] += frames.mean.float()[:, rest]  # what does not turn adds the same to every token
        for head in range(heads):
            group = head if tables.n_heads == heads else 0
            columns = slice(tables.column_start[tables.plane_start[group]], tables.column_start[tables.plane_start[group + 1]])
            index = tables.coefficient[columns].long()
            scaled = frames.matrix[head].float()[:, index] * torch.from_numpy(scan.scale[columns])
            matrix[head, there, : len(index)] = scaled[source]
            matrix[head, there, scan.width] = common[head, source]
        mean = torch.zeros(heads, 2 * n_pairs)
        mean[:, : len(frames.first)] = frames.mean.float()[:, list(frames.first)]
        mean[:, n_pairs : n_pairs + len(frames.first)] = frames.mean.float()[:, list(frames.second)]
        return cls(
            order, n_pairs, matrix.contiguous().numpy(), mean.numpy(), _basis(frames, n_pairs, width),
            bool(mean.any()) and block is not None, bool(common.any()),
        )  # fmt: skip


def _basis(frames: Frames, n_pairs: int, width: int) -> np.ndarray:
    """cos jω and sin jω for each offset j of a block, evens before odds within every group of `width`."""
    if frames.block_tokens is None:
        return np.zeros((0, 0), np.float32)
    n = padded(frames.block_tokens, max(width, COLUMNS))
    offsets = split_order(np.arange(n), width)
    angle = np.array(frames.frequencies)[:, None] * offsets
    made = np.zeros((2 * n_pairs, n), np.float32)
    made[: len(angle)] = np.cos(angle)
    made[n_pairs : n_pairs + len(angle)] = np.sin(angle)
    return made


def split_order(x: np.ndarray, width: int) -> np.ndarray:
    """The last axis with the evens of every `width` before the odds."""
    return x.reshape(*x.shape[:-1], -1, width // 2, 2).swapaxes(-1, -2).reshape(x.shape)


def padded(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple


def as_floats(x: Tensor) -> np.ndarray:
    """Contiguous float32."""
    return x.detach().float().contiguous().numpy()
