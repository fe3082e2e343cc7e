"""Byte encoding on a GPU: a program codes a tile of one head's tokens, plane by plane, all distances in registers.

The operations and their order are those of `naive.py`; the compiler is told not to fuse multiply and add, so the bytes
are the same. Where no plane refines another, the coefficients are only read; else what is left of them is kept in a
copy that each program reads and writes for its own tokens.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_encode.naive import require_agreement
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.entry_quads import refines
from karhunen.kernels.host import HOST

available = triton_launch.available

CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((16, 4), (32, 4), (32, 8), (64, 8))]


def byte_encode(
    coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, tile: int | None = None
) -> UInt8[Tensor, "b s t"]:
    """As `naive.byte_encode`, byte for byte. `tile`: tokens per program, a power of two; timed if None.

    ValueError unless the coefficients lie on a GPU.
    """
    require_agreement(coefficients, tables)
    triton_launch.require_gpu(coefficients)
    b, h, t, _ = coefficients.shape
    if not b * h * t * tables.n_planes:
        return torch.empty(b, tables.n_planes, t, dtype=torch.uint8, device=coefficients.device)
    codes, call = planned(coefficients, tables, tile=tile)
    call.launch()
    return codes


def planned(
    coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, tile: int | None = None
) -> tuple[UInt8[Tensor, "b s t"], triton_launch.Call]:
    """Where the bytes will be, and the launch that finds them."""
    b, h, t, c = coefficients.shape
    codes = torch.empty(b, tables.n_planes, t, dtype=torch.uint8, device=coefficients.device)
    source = coefficients.detach().float().contiguous()
    refined = refines(tables)
    if refined and source.data_ptr() == coefficients.data_ptr():
        source = source.clone()

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return (-(-t // meta["TILE"]), h, b)

    arguments = (source, codes, *_parts(tables, coefficients.device), h, t, c, tables.n_planes)
    constants = {"REFINES": refined, "enable_fp_fusion": False}
    if tile is None and not refined:  # timing runs a program many times, which a refined source does not bear
        return codes, triton_launch.Call(_encode_tuned, grid, arguments, constants)
    return codes, triton_launch.Call(_encode, grid, arguments, constants | {"TILE": tile or 32, "num_warps": 4})


def _parts(tables: ByteTables, device: torch.device) -> tuple[Tensor, ...]:
    """The tables with the 256 entries of a column side by side, and where planes and columns begin."""
    key = f"byte_encode {device}"
    if key not in tables.prepared:
        parts = (
            tables.entries.float().mT.contiguous(),
            tables.half_norms,
            tables.coefficient.int(),
            torch.tensor(tables.column_start, dtype=torch.int32, device=HOST),
            torch.tensor(tables.plane_start, dtype=torch.int32, device=HOST),
        )
        tables.prepared[key] = tuple(part.to(device) for part in parts)
    return tables.prepared[key]


@triton.jit(do_not_specialize=["t"])
def _encode(
    p_x, p_codes, p_entries, p_half_norms, p_coefficient, p_column_start, p_plane_start, h, t, c, n_planes,
    REFINES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    o_token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_token = o_token < t
    o_entry = tl.arange(0, 256)
    p_rows = p_x + ((i_b * h + i_h).to(tl.int64) * t + o_token) * c
    first_plane, last_plane = tl.load(p_plane_start + i_h), tl.load(p_plane_start + i_h + 1)
    p_out = p_codes + (i_b.to(tl.int64) * n_planes + first_plane) * t + o_token
    for plane in range(first_plane, last_plane):
        first, last = tl.load(p_column_start + plane), tl.load(p_column_start + plane + 1)
        b_distance = tl.zeros([TILE, 256], tl.float32) + tl.load(p_half_norms + plane * 256 + o_entry)[None, :]
        for column in range(first, last):
            b_x = tl.load(p_rows + tl.load(p_coefficient + column), mask=m_token, other=0.0)
            b_entry = tl.load(p_entries + column * 256 + o_entry)
            b_distance -= b_x[:, None] * b_entry[None, :]
        b_smallest = tl.min(b_distance, 1)
        b_code = tl.min(tl.where(b_distance == b_smallest[:, None], o_entry[None, :], 255), 1)
        tl.store(p_out, b_code.to(tl.uint8), mask=m_token)
        p_out += t
        if REFINES:
            tl.debug_barrier()
            for column in range(first, last):
                p_left = p_rows + tl.load(p_coefficient + column)
                b_left = tl.load(p_left, mask=m_token, other=0.0)
                tl.store(p_left, b_left - tl.load(p_entries + column * 256 + b_code), mask=m_token)
            tl.debug_barrier()


_encode_tuned = triton_launch.tuned(_encode, CONFIGS, ["n_planes", "c"])
