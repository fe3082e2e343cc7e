"""Frames of a query on a GPU: a query turned back by the beginning of each block, times a matrix laid out once.

    [first · cos + second · sin | second · cos − first · sin | rest] · maps ─▶ columns of the key quads | biases

Rows of the product are (block, query row), its columns the key tables' with their scales, then the bias of each token
of a block, ν + R(n − n₀) μ. Both sides are float16: queries divided by their largest number, maps by their longest
column, so that no product leaves float16; biases are float32. Cosines are of float64 angles, kept on the device.
"""

# programs for Triton, whose types pyright cannot follow
# pyright: reportOperatorIssue=false
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.entry_quads import entry_quads
from karhunen.kernels.host import HOST
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.naive import rotated
from karhunen.kernels.split_attention.arguments import Queries
from karhunen.kernels.triton_launch import Call

LEAST_DEPTH = 16  # what a tensor core multiplies at once
COLUMNS = 64  # of one program
ROWS = 32


class Maps(NamedTuple):
    """One codec's frames for one set of key tables, on a device. `size` brings products back to their units."""

    order: Int[Tensor, " places"]  # which coordinate stands at each place of a laid-out query, -1: none
    matrix: Float[Tensor, "h places columns"]  # of key quads, then of biases, padded to whole programs
    column_size: Float[Tensor, " h"]
    bias_size: Float[Tensor, " h"]


class Turn(NamedTuple):
    """Cosines and sines of the beginning of each block from the first in use on, [block][cosines | sines]."""

    angles: Float[Tensor, "n pairs"]
    s_block: int


class Rows(NamedTuple):
    """Query rows; neighbouring coordinates lie side by side."""

    of: Float[Tensor, "b h r d"]
    s_batch: int
    s_head: int
    s_row: int


class FrameExtent(NamedTuple):
    """Sizes that no program is compiled for. `rows` of a table's query rows, all its heads together."""

    heads: int
    query_rows: int
    tables: int
    rows: int
    blocks: int
    scale: float


class FrameShape(NamedTuple):
    """Places for pairs and for what does not turn, powers of two or 0; columns of frames; biases of a block;
    coordinates of a query, and the power of two that holds them."""

    pairs: int
    rest: int
    columns: int
    biases: int
    coordinates: int
    width: int


@final
@dataclass(frozen=True)
class BoundFrames:
    """Frames bound to key tables on a device."""

    maps: Maps
    shape: FrameShape

    @classmethod
    def of(cls, frames: Frames, tables: ByteTables, device: torch.device) -> "BoundFrames":
        """Made at first use for these frames and tables."""
        name = f"gpu {device}"
        found = frames.prepared.get(name)
        if found is None or found[1] is not tables:
            found = frames.prepared[name] = (cls._made(frames, tables, device), tables)
        return found[0]

    @classmethod
    def _made(cls, frames: Frames, tables: ByteTables, device: torch.device) -> "BoundFrames":
        quads = entry_quads(tables, HOST)
        n_heads, d, _ = frames.matrix.shape
        pairs, rest = _places(len(frames.first)), _places(len(frames.rest))
        order = torch.full((2 * pairs + rest,), -1, dtype=torch.int32, device=HOST)
        for start, places in ((0, frames.first), (pairs, frames.second), (2 * pairs, frames.rest)):
            order[start : start + len(places)] = torch.tensor(places, dtype=torch.int32, device=HOST)
        group = torch.arange(n_heads, device=HOST) * (tables.n_heads == n_heads)  # joined heads have one table
        index = quads.coefficient.long()[group][:, None].expand(-1, d, -1)
        columns = frames.matrix.double().cpu().gather(2, index) * quads.scale.double()[group][:, None]
        bias = _bias(frames)
        parts = [_normalized(part) for part in (columns, bias)]
        whole = torch.cat([part for part, _ in parts], 2)
        padding = -whole.shape[2] % COLUMNS
        whole = torch.nn.functional.pad(whole, (0, padding, 0, 1))[:, order.long()]  # place -1: the row of zeros
        maps = Maps(order, whole.half().contiguous(), *(size.float() for _, size in parts))
        shape = FrameShape(pairs, rest, columns.shape[2], bias.shape[2], d, triton.next_power_of_2(d))
        return cls(Maps(*(part.to(device) for part in maps)), shape)


def plan_queries(
    query: Float[Tensor, "b h r d"], frames: Frames, tables: ByteTables, first_block: int, n_blocks: int, scale: float,
    folded: bool = False,
) -> tuple[Queries, int, Call]:  # fmt: skip
    """The rows of each table's heads in its columns, which biases there are (see `Terms`), and the launch. `folded`:
    also room for the tables that they are folded into."""
    b, h, r, _ = query.shape
    bound, device = BoundFrames.of(frames, tables, query.device), query.device
    groups, rows = (h, r) if tables.n_heads == h else (1, h * r)
    shape = bound.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    made = Queries(
        torch.empty(b, groups, n_blocks, rows, shape.columns, dtype=torch.float16, device=device),
        torch.empty(b, groups, rows, device=device),
        torch.empty(b, groups, n_blocks, rows, shape.biases, device=device),
        torch.empty(b, groups, n_blocks, shape.columns // 4 * folded, 32, rows, dtype=torch.float16, device=device),
    )
    turn = angles_of(frames, first_block, n_blocks, device)
    extent = FrameExtent(h, r, groups, rows, n_blocks, scale)
    tile = max(LEAST_DEPTH, min(ROWS, triton.next_power_of_2(n_blocks * r)))
    call = Call(
        frame_queries,
        (-(-n_blocks * r // tile), bound.maps.matrix.shape[2] // COLUMNS, b * h),
        (Rows(query, *query.stride()[:3]), bound.maps, turn, made, extent),
        {"SHAPE": shape, "TILE": tile, "WIDTH": COLUMNS, "num_warps": 8, "enable_fp_fusion": True},
    )
    return made, 0 if not shape.biases else 1 if frames.block_tokens is None or shape.biases == 1 else 2, call


def angles_of(frames: Frames, first: int, n_blocks: int, device: torch.device) -> Turn:
    """Angles of blocks from `first` on, a view of a table that grows and is shared by layers that turn alike."""
    if frames.block_tokens is None:
        return Turn(torch.zeros(1, 2, device=device), 0)
    key = (frames.frequencies, frames.block_tokens, str(device))
    table, low = _angles.get(key, (None, 0))
    if table is None or first < low or first + n_blocks > low + len(table):
        low, high = min(low, first), max(2 * (first + n_blocks), 64)
        starts = torch.arange(low, high, dtype=torch.float64, device=device) * frames.block_tokens
        angle = starts[:, None] * torch.tensor(frames.frequencies, dtype=torch.float64, device=device)
        table = torch.cat([angle.cos(), angle.sin()], 1).float()
        _angles[key] = table, low
    return Turn(table[first - low :], table.stride(0))


_angles: dict[tuple[Any, ...], tuple[Tensor, int]] = {}


def _places(n: int) -> int:
    """What a tensor core multiplies at once, or a power of two that holds them; none for none."""
    return max(LEAST_DEPTH, triton.next_power_of_2(n)) if n else 0


def _bias(frames: Frames) -> Float[Tensor, "h d k"]:
    """What a turned query is multiplied by for the bias of each token of a block: one column if all are alike, none if
    there is no bias."""
    offset, mean = frames.offset.double().cpu(), frames.mean.double().cpu()
    turns = bool(mean[:, [*frames.first, *frames.second]].any())
    places = torch.arange(frames.block_tokens if frames.block_tokens is not None and turns else 1, device=HOST)
    both = offset[:, None] + rotated(mean[:, None], frames, places)
    return both.mT if bool(both.any()) else both.mT[..., :0]


def _normalized(maps: Float[Tensor, "h d k"]) -> tuple[Float[Tensor, "h d k"], Float[Tensor, " h"]]:
    """Divided by the length of a head's longest column; that length."""
    size = maps.norm(dim=1).amax(1) if maps.shape[2] else maps.new_ones(len(maps))
    size = torch.where(size > 0, size, 1.0)
    return maps / size[:, None, None], size


@triton.jit(do_not_specialize=["extent"])
def frame_queries(query, maps, turn, made, extent, SHAPE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """TILE rows (block, query row) of one head times WIDTH columns of its maps. Grid: rows, columns, batch × head."""
    i_b, i_h = tl.program_id(2) // extent.heads, tl.program_id(2) % extent.heads
    o_m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_block, o_row, m_m = o_m // extent.query_rows, o_m % extent.query_rows, o_m < extent.blocks * extent.query_rows
    p_query = query.of + i_b.to(tl.int64) * query.s_batch + i_h.to(tl.int64) * query.s_head
    p_rows = p_query + o_row.to(tl.int64) * query.s_row
    b_size = _largest(p_rows, m_m, SHAPE)
    b_out = _product(p_rows, maps, turn, i_h, o_block, m_m, b_size, SHAPE, WIDTH)

    i_table = i_b * extent.tables + (i_h if extent.tables == extent.heads else 0)
    o_among = o_row + (0 if extent.tables == extent.heads else i_h * extent.query_rows)
    o_out = (i_table.to(tl.int64) * extent.blocks + o_block) * extent.rows + o_among
    o_column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    p_columns = made.columns + o_out[:, None] * SHAPE.columns + o_column[None, :]
    tl.store(p_columns, b_out.to(tl.float16), mask=m_m[:, None] & (o_column < SHAPE.columns)[None, :])
    if tl.program_id(1) == 0:
        b_unit = b_size * tl.load(maps.column_size + i_h) * extent.scale
        tl.store(made.size + i_table * extent.rows + o_among, b_unit, mask=m_m & (o_block == 0))
    if SHAPE.biases > 0:
        o_bias = o_column - SHAPE.columns
        b_bias = b_out * (b_size * tl.load(maps.bias_size + i_h) * extent.scale)[:, None]
        m_bias = m_m[:, None] & ((o_bias >= 0) & (o_bias < SHAPE.biases))[None, :]
        tl.store(made.bias + o_out[:, None] * SHAPE.biases + o_bias[None, :], b_bias, mask=m_bias)


@triton.jit
def _largest(p_rows, m_m, SHAPE: tl.constexpr):
    """The largest number of each row, 1 where all are 0."""
    o_d = tl.arange(0, SHAPE.width)
    b_row = tl.load(p_rows[:, None] + o_d[None, :], mask=m_m[:, None] & (o_d < SHAPE.coordinates)[None, :], other=0.0)
    b_size = tl.max(tl.abs(b_row.to(tl.float32)), 1)
    return tl.where(b_size > 0, b_size, 1.0)


@triton.jit
def _places_of(p_rows, maps, m_m, FIRST: tl.constexpr, N: tl.constexpr):
    """Coordinates of the places from FIRST on: [row, place], float32."""
    b_order = tl.load(maps.order + FIRST + tl.arange(0, N))
    m_read = m_m[:, None] & (b_order >= 0)[None, :]
    return tl.load(p_rows[:, None] + b_order[None, :], mask=m_read, other=0.0).to(tl.float32)


@triton.jit
def _product(p_rows, maps, turn, i_h, o_block, m_m, b_size, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """Turned rows, divided by their largest number, times WIDTH columns of the maps."""
    b_unit = (1.0 / b_size)[:, None]
    b_out = tl.zeros([p_rows.shape[0], WIDTH], tl.float32)
    if SHAPE.pairs > 0:
        o_pair, n_pairs = tl.arange(0, SHAPE.pairs), turn.s_block // 2
        p_angle = turn.angles + o_block.to(tl.int64)[:, None] * turn.s_block + o_pair[None, :]
        m_angle = m_m[:, None] & (o_pair < n_pairs)[None, :]
        b_cos = tl.load(p_angle, mask=m_angle, other=0.0)
        b_sin = tl.load(p_angle + n_pairs, mask=m_angle, other=0.0)
        b_x = _places_of(p_rows, maps, m_m, 0, SHAPE.pairs) * b_unit
        b_y = _places_of(p_rows, maps, m_m, SHAPE.pairs, SHAPE.pairs) * b_unit
        b_first, b_second = b_x * b_cos + b_y * b_sin, b_y * b_cos - b_x * b_sin
        b_out = tl.dot(b_first.to(tl.float16), _columns_of(maps, i_h, 0, SHAPE.pairs, SHAPE, WIDTH), b_out)
        b_out = tl.dot(b_second.to(tl.float16), _columns_of(maps, i_h, SHAPE.pairs, SHAPE.pairs, SHAPE, WIDTH), b_out)
    if SHAPE.rest > 0:
        b_rest = _places_of(p_rows, maps, m_m, 2 * SHAPE.pairs, SHAPE.rest) * b_unit
        b_maps = _columns_of(maps, i_h, 2 * SHAPE.pairs, SHAPE.rest, SHAPE, WIDTH)
        b_out = tl.dot(b_rest.to(tl.float16), b_maps, b_out)
    return b_out


@triton.jit
def _columns_of(maps, i_h, FIRST: tl.constexpr, N: tl.constexpr, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of the maps from FIRST on, in this program's columns."""
    n_columns = tl.num_programs(1) * WIDTH
    o_place = i_h * (2 * SHAPE.pairs + SHAPE.rest) + FIRST + tl.arange(0, N)
    o_column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    return tl.load(maps.matrix + o_place[:, None] * n_columns + o_column[None, :])
