"""What the programs of split attention are given: tensors with their strides, and what they are compiled for.

Tuples, which Triton takes as they are: a program reads `keys.codes` as Python would.
"""

from typing import NamedTuple

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.entry_quads import EntryQuads, entry_quads, pieces
from karhunen.kernels.split_attention.entries import DIGITS, FLOAT16, SUM

ONE_BLOCK = 1 << 30
"""Tokens of a block that holds any cache: one number, so that its programs are compiled once."""
MOST_ROWS = 64
LEAST_ROWS = 8


class Side(NamedTuple):
    """Keys or values: bytes, gains and tables."""

    codes: Tensor
    s_batch: int
    s_plane: int
    gain: Tensor
    s_gain_batch: int
    s_gain_head: int
    levels: Tensor
    low: Tensor
    high: Tensor
    plane: Tensor
    scale: Tensor


class SideKind(NamedTuple):
    """What a program is compiled for, of one side. Gains: 0 none, 1 as read, 2 levels that bytes choose."""

    entries: int
    low_bits: int
    high_bits: int
    quads_a: int
    quads_b: int
    gain: int

    @property
    def n_columns(self) -> int:
        """Padding included."""
        return 4 * (self.quads_a + self.quads_b)


class Queries(NamedTuple):
    """The rows of a KV head in the columns of its key quads, block by block; what they were divided by, softmax scale
    and all; what is added to the scores; key tables that they are folded into (folding.py), or anything."""

    columns: Float[Tensor, "b h n q columns"]
    size: Float[Tensor, "b h q"]
    bias: Float[Tensor, "b h n q k"]
    folded: Float[Tensor, "..."]


class Seen(NamedTuple):
    """Which tokens count: by a mask of bytes or of terms of the scores, and from which on for each row."""

    mask: Tensor
    s_mask: int
    first: Tensor


class Extent(NamedTuple):
    """Numbers that no program is compiled anew for."""

    heads: int
    rows: int
    tokens: int
    blocks: int
    splits: int
    first_offset: int
    softcap: float


class Found(NamedTuple):
    """What each range of tokens gives."""

    mean: Float[Tensor, "splits rows columns"]
    log_sum: Float[Tensor, "splits rows"]


class Shape(NamedTuple):
    """Rows of a program, a power of two, and tokens of a block; whether scores come from folded tables."""

    rows: int
    block: int
    folded: bool = False


class Terms(NamedTuple):
    """What happens to the scores. Bias: 0 none, 1 of a block, 2 of each token in it; mask: 0 none, 1 bytes that are 0
    where a token is hidden, 2 terms. `aligned`: four tokens from a block's first on lie in one word."""

    bias: int
    mask: int
    first: bool
    capped: bool
    aligned: bool


def side_of(tokens: CodedTokens, device: torch.device) -> tuple[Side, SideKind]:
    """One side as the programs read it: neighbouring tokens side by side."""
    quads = entry_quads(tokens.tables, device)
    codes = tokens.codes if tokens.codes.stride(-1) == 1 else tokens.codes.contiguous()
    if not codes.shape[1]:  # no planes: the padding reads some byte
        codes = codes.new_zeros(codes.shape[0], 1, codes.shape[2])
    gain, strides, levels = codes, (0, 0), codes
    if tokens.gain is not None:
        gain = tokens.gain if tokens.gain.stride(-1) == 1 else tokens.gain.contiguous()
        strides, levels = gain.stride()[:2], gain
    if tokens.gain_levels is not None:
        levels = tokens.gain_levels.to(device, torch.float32).contiguous()
    side = Side(
        codes, *codes.stride()[:2], gain, *strides, levels, quads.low, quads.high, quads.plane, quads.scale
    )  # fmt: skip
    return side, _kind_of(tokens, quads)


def _kind_of(tokens: CodedTokens, quads: EntryQuads) -> SideKind:
    lookups = tokens.tables.lookups
    bits = (8, 0) if lookups is None else lookups.index_bits
    entries = FLOAT16 if lookups is None else SUM if bits[1] else DIGITS
    gain = 0 if tokens.gain is None else 1 if tokens.gain_levels is None else 2
    return SideKind(entries.value, *bits, *pieces(quads.plane.shape[1]), gain)


def shape_of(n_rows: int, block_tokens: int | None, folded: bool = False) -> Shape:
    """For this many query rows of a KV head."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(n_rows)))
    return Shape(rows, block_tokens or ONE_BLOCK, folded)


def aligned(sides: tuple[Side, Side], shape: Shape, first_offset: int) -> bool:
    """Whether every fourth token of a block lies at a multiple of four bytes."""
    addresses = [(side.codes.data_ptr(), side.s_batch, side.s_plane) for side in sides]
    return not any(number % 4 for side in addresses for number in side) and not (shape.block % 4 or first_offset % 4)


def seen(
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None,
    first_visible: Int[Tensor, "b q"] | None,
    filler: Tensor,
) -> tuple[Seen, int]:
    """The mask as the program reads it and what kind it is; `filler` stands where nothing is read."""
    first = filler if first_visible is None else first_visible.int().contiguous()
    if mask is None:
        return Seen(filler, 0, first), 0
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    return Seen(mask, mask.stride(0), first), 1 if mask.dtype == torch.uint8 else 2
