"""Byte decoding on a GPU: each coefficient gathers its entry; those of several planes add in their order."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.entry_quads import entry_terms

available = triton_launch.available

CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((32, 4), (16, 4), (64, 8))]


def byte_decode(
    codes: UInt8[Tensor, "b s t"], tables: ByteTables, *, tile: int | None = None
) -> Float[Tensor, "b h t c"]:
    """As `naive.byte_decode`, number for number. `tile`: tokens per program, a power of two; timed if None.

    ValueError unless the codes lie on a GPU.
    """
    triton_launch.require_gpu(codes)
    b, _, t = codes.shape
    if not b * t * tables.n_heads * tables.n_coefficients:
        return torch.empty(b, tables.n_heads, t, tables.n_coefficients, device=codes.device)
    out, call = planned(codes, tables, tile=tile)
    call.launch()
    return out


def planned(
    codes: UInt8[Tensor, "b s t"], tables: ByteTables, *, tile: int | None = None
) -> tuple[Float[Tensor, "b h t c"], triton_launch.Call]:
    """Where the coefficients will be, and the launch that gathers them."""
    b, _, t = codes.shape
    h, c = tables.n_heads, tables.n_coefficients
    out = torch.empty(b, h, t, c, device=codes.device)
    terms = entry_terms(tables, codes.device)

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return (-(-t // meta["TILE"]), h, b)

    arguments = (codes, *codes.stride(), *terms, tables.entries.shape[1], out, h, t, c)
    shapes = {"N_TERMS": terms.plane.shape[1], "WIDTH": triton.next_power_of_2(c), "enable_fp_fusion": False}
    if tile is None:
        return out, triton_launch.Call(_decode_tuned, grid, arguments, shapes)
    return out, triton_launch.Call(_decode, grid, arguments, shapes | {"TILE": tile, "num_warps": 4})


@triton.jit(do_not_specialize=["t"])
def _decode(
    p_codes, s_batch, s_plane, s_token, p_entries, p_plane, p_column, n_columns, p_out, h, t, c,
    N_TERMS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i_h, i_b = tl.program_id(1), tl.program_id(2)
    o_token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_c = tl.arange(0, WIDTH)
    m_out = (o_token < t)[:, None] & (o_c < c)[None, :]
    b_out = tl.zeros([TILE, WIDTH], tl.float32)
    for term in tl.static_range(N_TERMS):  # pyright: ignore[reportGeneralTypeIssues]
        o_term = (i_h * N_TERMS + term) * c + o_c
        b_plane = tl.load(p_plane + o_term, mask=o_c < c, other=-1)
        b_column = tl.load(p_column + o_term, mask=o_c < c, other=0)
        m_read = m_out & (b_plane >= 0)[None, :]
        p_byte = p_codes + i_b.to(tl.int64) * s_batch + b_plane.to(tl.int64)[None, :] * s_plane
        b_byte = tl.load(p_byte + o_token[:, None] * s_token, mask=m_read, other=0).to(tl.int32)
        b_out += tl.load(p_entries + b_byte * n_columns + b_column[None, :], mask=m_read, other=0.0)
    p_rows = p_out + ((i_b * h + i_h).to(tl.int64) * t + o_token) * c
    tl.store(p_rows[:, None] + o_c[None, :], b_out, mask=m_out)


_decode_tuned = triton_launch.tuned(_decode, CONFIGS, ["N_TERMS", "WIDTH"])
