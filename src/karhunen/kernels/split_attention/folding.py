"""Scores from tables that the query is folded into: no entry of a key is decoded.

    folded[quad, e, row] = Σ_k entry[quad, e, k] · q′[row, 4 · quad + k]      e: 16 low rows, then 16 high ones
    score[token, row]    = Σ_quad folded[quad, byte mod 16, row] + folded[quad, 16 + byte div 16, row]

For keys whose bytes are sums of two look-ups of 16. Done once for each block of tokens, since its query is its own: 32
entries in place of a block's tokens, and 2 · rows additions for each byte of a token in place of a product of tensor
cores. A variant to be timed (benchmarks/gpu_check.py), not the default.
"""

# programs for Triton, whose constants pyright cannot follow
# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from karhunen.kernels.split_attention.arguments import Extent, Queries, Shape, Side, SideKind
from karhunen.kernels.triton_launch import Call

FOLDED_BITS = (4, 4)
DIGITS_OF_ZERO: tl.constexpr = tl.constexpr(-2139062144)  # 0x80808080: each digit of a high word becomes entry + 128


def fold_call(queries: Queries, keys: Side, kind: SideKind, extent: Extent, shape: Shape) -> Call:
    """The launch that fills `queries.folded`; ValueError for look-ups of other sizes."""
    if (kind.low_bits, kind.high_bits) != FOLDED_BITS:
        raise ValueError(f"keys are look-ups of {kind.low_bits} and {kind.high_bits} bits; folded are those of 4 and 4")
    grid = (kind.quads_a + kind.quads_b, extent.blocks, queries.size.shape[0] * extent.heads)
    chunks = {"CHUNKS": -(-extent.rows // shape.rows)}
    return Call(fold, grid, (queries, keys, extent), {"KEYS": kind, "SHAPE": shape, **chunks, "num_warps": 1})


@triton.jit
def fold(queries, keys, extent, KEYS: tl.constexpr, SHAPE: tl.constexpr, CHUNKS: tl.constexpr):
    """The tables of one quad for one block. Grid: quad, block, batch × KV head."""
    i_quad, i_block, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    QUADS: tl.constexpr = KEYS.quads_a + KEYS.quads_b
    o_entry = tl.arange(0, 16)
    o_table = ((i_bh % extent.heads) * QUADS + i_quad) * 16 + o_entry
    b_low, b_high = tl.load(keys.low + o_table), tl.load(keys.high + o_table) + DIGITS_OF_ZERO
    i_frame = (i_bh * extent.blocks + i_block) * extent.rows
    for chunk in range(CHUNKS):
        o_row = chunk * SHAPE.rows + tl.arange(0, SHAPE.rows)
        m_row = (o_row < extent.rows)[None, :]
        p_query = queries.columns + (i_frame + o_row) * (4 * QUADS) + 4 * i_quad
        b_of_low = tl.zeros([16, SHAPE.rows], tl.float32)
        b_of_high = tl.zeros([16, SHAPE.rows], tl.float32)
        for k in tl.static_range(4):
            b_query = tl.load(p_query + k, mask=o_row < extent.rows, other=0.0).to(tl.float32)[None, :]
            b_of_low += (((b_low >> (8 * k)) & 0xFF) - 128).to(tl.float32)[:, None] * b_query
            b_of_high += (((b_high >> (8 * k)) & 0xFF) - 128).to(tl.float32)[:, None] * b_query
        p_found = queries.folded + (i_frame * QUADS + i_quad * extent.rows) * 32
        p_found += o_entry[:, None] * extent.rows + o_row[None, :]
        tl.store(p_found, b_of_low.to(tl.float16), mask=m_row)
        tl.store(p_found + 16 * extent.rows, b_of_high.to(tl.float16), mask=m_row)


@triton.jit
def folded_scores(
    queries, keys, i_b, i_h, i_frame, token, extent, o_row, m_row, KEYS: tl.constexpr, SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of TILE tokens from `token` on, before sizes and gains: float32 [token, row]. Tokens outside are of byte 0."""
    QUADS: tl.constexpr = KEYS.quads_a + KEYS.quads_b
    o_token = token + tl.arange(0, TILE)
    m_token = (o_token >= 0) & (o_token < extent.tokens)
    p_codes = keys.codes + i_b.to(tl.int64) * keys.s_batch + o_token
    p_rows = queries.folded + i_frame * QUADS * 32 + o_row[None, :]
    b_scores = tl.zeros([TILE, SHAPE.rows], tl.float32)
    for quad in range(QUADS):
        plane = tl.load(keys.plane + i_h * QUADS + quad)
        b_byte = tl.load(p_codes + plane * keys.s_plane, mask=m_token, other=0).to(tl.int32)[:, None]
        p_quad = p_rows + quad * 32 * extent.rows
        b_scores += tl.load(p_quad + (b_byte & 15) * extent.rows, mask=m_row[None, :], other=0.0).to(tl.float32)
        b_scores += tl.load(p_quad + (16 + (b_byte >> 4)) * extent.rows, mask=m_row[None, :], other=0.0).to(tl.float32)
    return b_scores
