"""One range of tokens against the query rows of a KV head: flash decoding, each byte looked up once for all rows.

    entries of keys [column token] ─ᵀ· q′ [column row] ─▶ scores [token row] ─ softmax ─▶ weights
    entries of values [column token] · weights [token row] ─▶ mean [column row]

Tokens and columns are the long sides of both products, so a tensor core wastes nothing on a group of eight query rows
and half on four. A head's quads are read in one or two pieces of a power of two, for 44 quads 32 and 16. The tables
stay in the first-level cache: programs that run together read the same head. Scores and sums are float32; operands are
float16, scaled so that they neither overflow nor vanish: queries by whoever makes them (`Queries.size`), weights by
the largest gain so far.
"""

# programs for Triton, whose constants decide branches that pyright cannot follow
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from karhunen.kernels.split_attention.entries import entries, plane_offsets
from karhunen.kernels.split_attention.folding import folded_scores

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
WEIGHT_SCALE: tl.constexpr = tl.constexpr(4096.0)  # keeps weights down to 2^-26 of the largest gain normal in float16
LEAST_TERM: tl.constexpr = tl.constexpr(-1e30)  # INVISIBLE: a mask's term at or below hides its token


@triton.jit(do_not_specialize=["extent"])
def attend(
    queries, keys, values, seen, found, extent,
    KEYS: tl.constexpr, VALUES: tl.constexpr, SHAPE: tl.constexpr, TERMS: tl.constexpr,
    TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Mean (in value columns) and log-sum of one range of tokens for up to SHAPE.rows query rows of a KV head.

    Grid: range, batch, KV head × chunk of rows. A tile of tokens lies in one block, so it has one frame. The bytes of
    the tile AHEAD of the one in work are asked for early; 0: they are not. Arguments: arguments.py.
    """
    i_split, i_b = tl.program_id(0), tl.program_id(1)
    n_chunks = tl.cdiv(extent.rows, SHAPE.rows)
    i_h = tl.program_id(2) // n_chunks
    o_row = tl.program_id(2) % n_chunks * SHAPE.rows + tl.arange(0, SHAPE.rows)
    i_bh = (i_b * extent.heads + i_h).to(tl.int64)
    m_row = o_row < extent.rows
    b_size = tl.load(queries.size + i_bh * extent.rows + o_row, mask=m_row, other=0.0)
    tiles_per_block: tl.constexpr = (SHAPE.block + TILE - 1) // TILE
    begin, end = _tiles(extent, i_split, tiles_per_block, SHAPE.block, TILE)

    b_key_a, b_key_b = _offsets(keys, i_h, KEYS)
    b_value_a, b_value_b = _offsets(values, i_h, VALUES)

    b_peak = tl.full([SHAPE.rows], float("-inf"), tl.float32)
    b_sum = tl.zeros([SHAPE.rows], tl.float32)
    b_mean_a = tl.zeros([4 * VALUES.quads_a, SHAPE.rows], tl.float32)
    b_mean_b = tl.zeros([4 * VALUES.quads_b if VALUES.quads_b else 1, SHAPE.rows], tl.float32)
    level = 1e-30  # largest gain so far; the means are held divided by it
    for tile in range(begin, end):
        block = tile // tiles_per_block
        o_place = tile % tiles_per_block * TILE + tl.arange(0, TILE)
        token = block * SHAPE.block - extent.first_offset + tile % tiles_per_block * TILE
        o_token = token + tl.arange(0, TILE)
        m_token = (o_place < SHAPE.block) & (o_token >= 0) & (o_token < extent.tokens)
        if AHEAD > 0:
            _fetch(keys, i_b, token + AHEAD * TILE, extent.tokens, b_key_a, b_key_b, KEYS)
            _fetch(values, i_b, token + AHEAD * TILE, extent.tokens, b_value_a, b_value_b, VALUES)

        i_frame = (i_bh * extent.blocks + block) * extent.rows
        if SHAPE.folded:
            b_scores = folded_scores(queries, keys, i_b, i_h, i_frame, token, extent, o_row, m_row, KEYS, SHAPE, TILE)
        else:
            p_rows = queries.columns + (i_frame + o_row) * (4 * (KEYS.quads_a + KEYS.quads_b))
            o_column = tl.arange(0, 4 * KEYS.quads_a)
            b_query = tl.load(p_rows[None, :] + o_column[:, None], mask=m_row[None, :], other=0.0)
            b_entries = entries(keys, i_b, i_h, token, extent.tokens, b_key_a, 0, KEYS, TILE, TERMS.aligned)
            b_scores = tl.dot(tl.trans(b_entries), b_query)
            if KEYS.quads_b > 0:
                o_second = 4 * KEYS.quads_a + tl.arange(0, 4 * KEYS.quads_b)
                b_query = tl.load(p_rows[None, :] + o_second[:, None], mask=m_row[None, :], other=0.0)
                b_entries = entries(
                    keys, i_b, i_h, token, extent.tokens, b_key_b, KEYS.quads_a, KEYS, TILE, TERMS.aligned
                )
                b_scores = tl.dot(tl.trans(b_entries), b_query, b_scores)
        b_scores *= b_size[None, :]
        if KEYS.gain > 0:
            b_scores *= _gain(keys, i_b, i_h, o_token, m_token, KEYS)[:, None]
        b_scores = _with_bias(b_scores, queries, i_frame, o_row, m_row, o_place, m_token, SHAPE, TERMS)
        b_scores = _of_seen(b_scores, seen, i_b, extent, o_row, m_row, o_token, m_token, TERMS)
        b_weights, b_shrink, b_peak, b_sum = _softmax(b_scores, b_peak, b_sum)

        if VALUES.gain > 0:
            b_gain = _gain(values, i_b, i_h, o_token, m_token, VALUES)
            new_level = tl.maximum(level, tl.max(tl.abs(b_gain), 0))
            b_weights *= (b_gain / new_level)[:, None]
            b_shrink *= level / new_level
            level = new_level
        b_weights = (b_weights * WEIGHT_SCALE).to(tl.float16)
        b_entries = entries(values, i_b, i_h, token, extent.tokens, b_value_a, 0, VALUES, TILE, TERMS.aligned)
        b_mean_a = tl.dot(b_entries, b_weights, b_mean_a * b_shrink[None, :])
        if VALUES.quads_b > 0:
            b_entries = entries(
                values, i_b, i_h, token, extent.tokens, b_value_b, VALUES.quads_a, VALUES, TILE, TERMS.aligned
            )
            b_mean_b = tl.dot(b_entries, b_weights, b_mean_b * b_shrink[None, :])

    i_rows = i_split * (tl.num_programs(1) * extent.heads).to(tl.int64) * extent.rows + i_bh * extent.rows
    b_total = tl.where(b_sum > 0, b_sum, 1.0)
    b_log_sum = tl.where(b_sum > 0, b_peak + tl.log(b_total), float("-inf"))
    tl.store(found.log_sum + i_rows + o_row, b_log_sum, mask=m_row)
    b_factor = 1.0 / (WEIGHT_SCALE * b_total)
    if VALUES.gain > 0:
        b_factor *= level
    _store(found, values, i_h, i_rows, o_row, m_row, b_mean_a * b_factor[None, :], 0, VALUES)
    if VALUES.quads_b > 0:
        _store(found, values, i_h, i_rows, o_row, m_row, b_mean_b * b_factor[None, :], 4 * VALUES.quads_a, VALUES)


@triton.jit
def _tiles(extent, i_split, tiles_per_block: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First tile of a range and the one behind its last; tiles are counted from the first block's beginning."""
    last = extent.tokens - 1 + extent.first_offset
    base = extent.first_offset // BLOCK * tiles_per_block + extent.first_offset % BLOCK // TILE
    end = last // BLOCK * tiles_per_block + last % BLOCK // TILE + 1
    per_split = tl.cdiv(end - base, extent.splits)
    begin = tl.minimum(base + i_split * per_split, end)
    return begin, tl.minimum(begin + per_split, end)


@triton.jit
def _offsets(side, i_h, SIDE: tl.constexpr):
    """Of the planes of both pieces."""
    b_a = plane_offsets(side, i_h, 0, SIDE.quads_a, SIDE)
    b_b = b_a
    if SIDE.quads_b > 0:
        b_b = plane_offsets(side, i_h, SIDE.quads_a, SIDE.quads_b, SIDE)
    return b_a, b_b


@triton.jit
def _fetch(side, i_b, token, t, b_a, b_b, SIDE: tl.constexpr):
    """Asks the second-level cache for the bytes from `token` on, one line per quad."""
    p_byte = side.codes + i_b.to(tl.int64) * side.s_batch + tl.maximum(tl.minimum(token, t - 1), 0)
    _prefetch(p_byte + b_a)
    if SIDE.quads_b > 0:
        _prefetch(p_byte + b_b)


@triton.jit
def _prefetch(p_byte):
    """Triton has no word for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_byte.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _gain(side, i_b, i_h, o_token, m_token, SIDE: tl.constexpr):
    """Gains of a tile of tokens: as read, or the levels that bytes choose."""
    p_gain = side.gain + i_b.to(tl.int64) * side.s_gain_batch + i_h.to(tl.int64) * side.s_gain_head
    b_gain = tl.load(p_gain + o_token, mask=m_token, other=0)
    if SIDE.gain == 2:
        b_gain = tl.load(side.levels + b_gain.to(tl.int32), mask=m_token, other=0.0)
    return b_gain.to(tl.float32)


@triton.jit
def _with_bias(b_scores, queries, i_frame, o_row, m_row, o_place, m_token, SHAPE: tl.constexpr, TERMS: tl.constexpr):
    """The scores and what a block's frame took away."""
    if TERMS.bias == 1:
        b_scores += tl.load(queries.bias + i_frame + o_row, mask=m_row, other=0.0)[None, :]
    if TERMS.bias == 2:
        p_bias = queries.bias + (i_frame + o_row)[None, :] * SHAPE.block + o_place[:, None]
        b_scores += tl.load(p_bias, mask=m_token[:, None] & m_row[None, :], other=0.0)
    return b_scores


@triton.jit
def _of_seen(b_scores, seen, i_b, extent, o_row, m_row, o_token, m_token, TERMS: tl.constexpr):
    """The scores, capped, -inf where a token is not seen."""
    if TERMS.capped:
        b_scores = extent.softcap * (2 * tl.sigmoid(2 * b_scores / extent.softcap) - 1)
    m_seen = m_token[:, None] & m_row[None, :]
    p_mask = seen.mask + i_b.to(tl.int64) * seen.s_mask + o_token
    if TERMS.mask == 1:
        m_seen = m_seen & (tl.load(p_mask, mask=m_token, other=0) != 0)[:, None]
    if TERMS.mask == 2:
        b_term = tl.load(p_mask, mask=m_token, other=0.0).to(tl.float32)
        m_seen = m_seen & (b_term > LEAST_TERM)[:, None]
        b_scores += b_term[:, None]
    if TERMS.first:
        b_first = tl.load(seen.first + i_b * extent.rows + o_row, mask=m_row, other=0)
        m_seen = m_seen & (o_token[:, None] >= b_first[None, :])
    return tl.where(m_seen, b_scores, float("-inf"))


@triton.jit
def _softmax(b_scores, b_peak, b_sum):
    """Weights of a tile below the largest score so far, and what the sums before it shrink by."""
    b_new_peak = tl.maximum(b_peak, tl.max(b_scores, 0))
    b_origin = tl.where(b_new_peak == float("-inf"), 0.0, b_new_peak)
    b_weights = tl.exp2((b_scores - b_origin[None, :]) * LOG2_E)
    b_shrink = tl.exp2((b_peak - b_origin) * LOG2_E)
    return b_weights, b_shrink, b_new_peak, b_sum * b_shrink + tl.sum(b_weights, 0)


@triton.jit
def _store(found, values, i_h, i_rows, o_row, m_row, b_mean, FIRST: tl.constexpr, VALUES: tl.constexpr):
    """Columns from FIRST on, times their scales."""
    N_COLUMNS: tl.constexpr = 4 * (VALUES.quads_a + VALUES.quads_b)
    o_column = FIRST + tl.arange(0, b_mean.shape[0])
    b_mean *= tl.load(values.scale + i_h * N_COLUMNS + o_column)[:, None]
    p_mean = found.mean + (i_rows + o_row)[None, :] * N_COLUMNS + o_column[:, None]
    tl.store(p_mean, b_mean, mask=m_row[None, :])
