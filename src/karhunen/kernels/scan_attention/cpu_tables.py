"""What the CPU scan reads of a codec, laid out once: tables by plane, and the query's maps by head.

Columns are in the order of the planes, so that a plane's are neighbours; `matrix` has the scale of each column in it.
A query is laid out as [first halves | second halves | rest], each padded with zeros to a multiple of eight.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import torch

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.scan.tokens import place
from karhunen.kernels.scan_attention.frames import Frames

COLUMNS = 16  # a row of products is a multiple of this many floats
PAD = 8


@final
@dataclass(frozen=True)
class ScanTables:
    """One side's tables, unsigned. Head i owns planes `plane_start[i]:plane_start[i + 1]`; plane j's columns begin at
    `column_start[head, j]`, an even number counted from its head's first: a column of zeros fills an odd plane."""

    kind: tuple[int, int]
    plane_start: np.ndarray
    column_start: np.ndarray  # int64 [head][planes of the widest + 1]
    first_column: np.ndarray  # of each head among all columns
    source: np.ndarray  # int64 [column]: the column of the tables it is, -1: none
    bytes: np.ndarray  # uint8 [column][2^a + 2^b]
    scale: np.ndarray  # float32 [column]
    least: np.ndarray  # float32 [column]: what the bytes of an entry lack, in steps
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
        lookups = tables.lookups
        assert lookups is not None, "only tables of look-ups are scanned"
        most = max((b - a for a, b in pairwise(tables.plane_start)), default=0)
        by_head = np.zeros((tables.n_heads, most + 1), np.int64)
        source: list[int] = []
        firsts: list[int] = []
        for head, (first, last) in enumerate(pairwise(tables.plane_start)):
            firsts.append(len(source))
            for j in range(first, last):
                columns = list(range(tables.column_start[j], tables.column_start[j + 1]))
                source += columns + [-1] * (len(columns) % 2)
                by_head[head, j - first + 1] = len(source) - firsts[-1]
            by_head[head, last - first + 1 :] = len(source) - firsts[-1]
        index = np.array(source, np.int64)
        there = index >= 0
        bytes_of, least = [], np.zeros(len(index), np.float32)
        for part in (lookups.low, lookups.high):
            rows = np.zeros((len(index), len(part)), np.int64)
            rows[there] = part.cpu().T.numpy()[index[there]]
            if len(part):
                bytes_of.append(rows - rows.min(1, keepdims=True))
                least += rows.min(1)
        scale = np.zeros(len(index), np.float32)
        scale[there] = lookups.scale.float().cpu().numpy()[index[there]]
        widest = max(by_head[:, -1].tolist(), default=0)
        return cls(
            lookups.index_bits, np.array(tables.plane_start, np.int64), by_head, np.array(firsts, np.int64), index,
            np.concatenate(bytes_of, axis=1).astype(np.uint8), scale, least, most, padded(widest, COLUMNS),
        )  # fmt: skip

    def columns_of(self, head: int) -> slice:
        """The columns of one head."""
        first = int(self.first_column[head])
        return slice(first, first + int(self.column_start[head, -1]))


@final
@dataclass(frozen=True)
class ScanFrames:
    """A frame's maps, one head after the other."""

    order: np.ndarray  # int64: where each place of a laid-out query comes from, -1: zero
    n_pairs: int  # padded
    matrix: (
        np.ndarray
    )  # float32 [head][place][column]: coefficients; if anything, one column for what a block has in common
    turned_mean: np.ndarray  # float32 [head][2 · n_pairs]: the mean in the middle of a block, as `turn` takes it
    basis: np.ndarray
    basis_tokens: int  # of a block, padded to whole groups
    least: np.ndarray  # float32 [head][column]: of the key tables, zeros behind each head's
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
        order, n_pairs = query_order(frames)
        rest = list(frames.rest)
        heads, block = len(frames.matrix), frames.block_tokens
        there = torch.from_numpy(order >= 0)
        source = torch.from_numpy(order[order >= 0])
        common = frames.offset.clone().float()
        common[:, rest] += frames.mean.float()[:, rest]  # what does not turn adds the same to every token
        has_common = bool(common.any())
        matrix = torch.zeros(heads, len(order), scan.width + COLUMNS * has_common)
        for head in range(heads):
            group = head if tables.n_heads == heads else 0
            columns = scan.columns_of(group)
            mine = torch.from_numpy(scan.source[columns])
            scaled = frames.matrix[head].float()[:, tables.coefficient[mine.clamp_min(0)].long()]
            scaled = scaled * torch.from_numpy(scan.scale[columns])  # 0 where there is no column
            matrix[head, there, : len(mine)] = scaled[source]
            if has_common:
                matrix[head, there, scan.width] = common[head, source]
        least = np.zeros((tables.n_heads, scan.width), np.float32)
        for group in range(tables.n_heads):
            mine = scan.columns_of(group)
            least[group, : mine.stop - mine.start] = scan.least[mine]
        mean, basis, n_tokens = torch.zeros(heads, 2 * n_pairs), np.zeros((0, 0), np.float32), 0
        if block is not None:
            n_tokens = padded(block, width)
            basis = _basis(n_tokens, frames.frequencies, n_pairs, width)
            angle = middle(n_tokens) * torch.tensor(frames.frequencies, dtype=torch.float64)
            x, y = (frames.mean.double()[:, list(half)] for half in (frames.first, frames.second))
            mean[:, : len(angle)] = x * angle.cos() - y * angle.sin()
            mean[:, n_pairs : n_pairs + len(angle)] = x * angle.sin() + y * angle.cos()
        return cls(
            order, n_pairs, matrix.contiguous().numpy(), mean.numpy(), basis, n_tokens, least,
            bool(mean.any()), has_common,
        )  # fmt: skip


def query_order(frames: Frames) -> tuple[np.ndarray, int]:
    """Where each place of a laid-out query comes from, -1: zero; and its pairs, padded."""
    n_pairs, rest = padded(len(frames.first), PAD), list(frames.rest)
    filling = [-1] * (n_pairs - len(frames.first))
    behind = [-1] * (padded(len(rest), PAD) - len(rest))
    return np.array([*frames.first, *filling, *frames.second, *filling, *rest, *behind], np.int64), n_pairs


def _basis(n_tokens: int, frequencies: tuple[float, ...], n_pairs: int, width: int) -> np.ndarray:
    """cos j′ω and sin j′ω of the even tokens of a block, j′ counted from its middle, in the order of their places:
    [2 · n_pairs][n_tokens / 2, padded]."""
    half = width // 2
    tokens = np.zeros(n_tokens // 2, np.int64)
    for group in range(n_tokens // width):
        for i in range(0, width, 2):
            tokens[group * half + place(i, width)] = group * width + i
    angle = np.array(frequencies)[:, None] * (tokens - middle(n_tokens))
    made = np.zeros((2 * n_pairs, padded(len(tokens), COLUMNS)), np.float32)
    made[: len(angle), : len(tokens)] = np.cos(angle)
    made[n_pairs : n_pairs + len(angle), : len(tokens)] = np.sin(angle)
    return made


def middle(n_tokens: int) -> float:
    """Of tokens 0 … n − 1."""
    return (n_tokens - 1) / 2


def padded(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple
