"""The Triton programs of attention from bytes: one reads a range of tokens for all query rows of a KV head, one merges.

    bytes [quad token] ─ look-up ─▶ 64 bits = 4 × float16 [4·quad token] ─┬─ · q′ [row 4·quad] ─▶ scores
                                                                           └─ weights · values ─▶ mean [row 4·quad]

Each byte is loaded and looked up once for the whole group of query rows, padded to a tile of at least 16 for the tensor
cores. A head's quads are read in one or two pieces of a power of two, for 44 quads 32 and 16. The tables stay in the
first-level cache: programs that run together read the same head. Scores and sums are float32; operands are float16,
scaled so that they neither overflow nor vanish: a query row by its largest coefficient, weights by the largest gain so
far, tables as in entry_quads.py.
"""

# programs for Triton, whose constants decide branches that pyright cannot follow
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
WEIGHT_SCALE: tl.constexpr = tl.constexpr(4096.0)  # keeps weights down to 2^-26 of the largest gain normal in float16


@triton.jit
def _look_up(p_codes, s_plane, p_bits, p_plane, o_quad, o_token, m_token):
    """The 64 bits that each byte names: [quad, token]. A hidden token reads as byte 0: finite, and given no weight."""
    b_plane = tl.load(p_plane + o_quad).to(tl.int64)
    p_byte = p_codes + b_plane[:, None] * s_plane + o_token[None, :]
    b_byte = tl.load(p_byte, mask=m_token[None, :], other=0, eviction_policy="evict_first").to(tl.int32)
    return tl.load(p_bits + ((o_quad * 256)[:, None] + b_byte), eviction_policy="evict_last")


@triton.jit
def _fetch(p_codes, s_plane, p_plane, o_quad, token, t):
    """Asks the second-level cache for the bytes from `token` on, one line per plane; Triton has no word for it."""
    b_plane = tl.load(p_plane + o_quad).to(tl.int64)
    p_byte = p_codes + b_plane * s_plane + tl.minimum(token, t - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_byte.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _entries(b_bits, QUADS: tl.constexpr, TILE: tl.constexpr):
    """The four float16 columns of each quad, side by side as they lie in the 64 bits: [4 · quad, token]."""
    b_0 = (b_bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_1 = ((b_bits >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_2 = ((b_bits >> 32) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_3 = ((b_bits >> 48) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    b_four = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))  # [quad token 2 2]
    b_four = tl.permute(tl.reshape(b_four, [QUADS, TILE, 4]), [0, 2, 1])
    return tl.reshape(b_four, [4 * QUADS, TILE])


@triton.jit
def _query(p_rows, m_row, p_coefficient, o_column):
    """What each column of the quads multiplies: [row, column], float32."""
    b_coefficient = tl.load(p_coefficient + o_column)
    return tl.load(p_rows[:, None] + b_coefficient[None, :], mask=m_row[:, None], other=0.0).to(tl.float32)


@triton.jit
def _gain(p_gain, p_levels, o_token, m_token, KIND: tl.constexpr):
    """Gains of a tile of tokens: read (KIND 1), or levels that bytes choose (2)."""
    b_gain = tl.load(p_gain + o_token, mask=m_token, other=0)
    if KIND == 2:
        b_gain = tl.load(p_levels + b_gain.to(tl.int32), mask=m_token, other=0.0)
    return b_gain.to(tl.float32)


@triton.jit(do_not_specialize=["t", "n", "n_splits"])
def attend(
    p_q, s_q_batch, s_q_head, s_q_row, s_q_frame, p_bias, p_offset_bias, p_mask, p_first, p_mean, p_log_sum,
    p_k_codes, s_k_batch, s_k_plane, p_k_gain, s_k_gain_batch, s_k_gain_head, p_k_levels,
    p_k_bits, p_k_plane, p_k_coefficient, p_k_scale,
    p_v_codes, s_v_batch, s_v_plane, p_v_gain, s_v_gain_batch, s_v_gain_head, p_v_levels,
    p_v_bits, p_v_plane, p_v_scale,
    h, q, t, n, n_splits, block_tokens, first_offset, scale, softcap,
    K_GAIN: tl.constexpr, V_GAIN: tl.constexpr, BIASED: tl.constexpr, OFFSET_BIASED: tl.constexpr,
    MASKED: tl.constexpr, FIRST: tl.constexpr, CAPPED: tl.constexpr,
    K_A: tl.constexpr, K_B: tl.constexpr, V_A: tl.constexpr, V_B: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Mean (in value columns) and log-sum of one split's tokens for up to ROWS query rows of a KV head.

    Grid: split, batch, KV head × chunk of rows. A tile of tokens lies in one block of `block_tokens`, so it has one
    frame. The bytes of the tile AHEAD of the one in work are asked for early; 0: they are not.
    """
    i_split, i_b = tl.program_id(0), tl.program_id(1)
    n_chunks = tl.cdiv(q, ROWS)
    i_h = tl.program_id(2) // n_chunks
    o_row = tl.program_id(2) % n_chunks * ROWS + tl.arange(0, ROWS)
    m_row = o_row < q
    o_k_a, o_v_a = tl.arange(0, K_A), tl.arange(0, V_A)

    p_q += i_b.to(tl.int64) * s_q_batch + i_h.to(tl.int64) * s_q_head
    p_k_codes += i_b.to(tl.int64) * s_k_batch
    p_v_codes += i_b.to(tl.int64) * s_v_batch
    p_k_gain += i_b.to(tl.int64) * s_k_gain_batch + i_h.to(tl.int64) * s_k_gain_head
    p_v_gain += i_b.to(tl.int64) * s_v_gain_batch + i_h.to(tl.int64) * s_v_gain_head
    p_k_bits += i_h * (K_A + K_B) * 256
    p_k_plane += i_h * (K_A + K_B)
    p_k_coefficient += i_h * (K_A + K_B) * 4
    p_v_bits += i_h * (V_A + V_B) * 256
    p_v_plane += i_h * (V_A + V_B)
    k_scale, v_scale = tl.load(p_k_scale + i_h), tl.load(p_v_scale + i_h)

    tiles_per_block = tl.cdiv(block_tokens, TILE)
    last = t - 1 + first_offset
    n_tiles = last // block_tokens * tiles_per_block + last % block_tokens // TILE + 1
    lowest = first_offset
    if FIRST:
        b_first = tl.load(p_first + i_b * q + o_row, mask=m_row, other=t)
        lowest += tl.minimum(tl.maximum(tl.min(b_first, 0), 0), t)
    base = tl.minimum(lowest // block_tokens * tiles_per_block + lowest % block_tokens // TILE, n_tiles)
    tiles_per_split = tl.cdiv(n_tiles - base, n_splits)
    begin = tl.minimum(base + i_split * tiles_per_split, n_tiles)
    end = tl.minimum(begin + tiles_per_split, n_tiles)

    b_peak = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_mean = tl.zeros([ROWS, 4 * V_A], tl.float32)
    if V_B > 0:
        b_mean_b = tl.zeros([ROWS, 4 * V_B], tl.float32)
    level = 1e-30  # largest gain so far; the means are held divided by it

    for block in range(begin // tiles_per_block, tl.cdiv(end, tiles_per_block)):
        o_frame = tl.zeros([ROWS], tl.int64) + block
        p_rows = p_q + o_row.to(tl.int64) * s_q_row + o_frame * s_q_frame
        b_query = _query(p_rows, m_row, p_k_coefficient, tl.arange(0, 4 * K_A))
        b_largest = tl.max(tl.abs(b_query), 1)
        if K_B > 0:
            b_query_b = _query(p_rows, m_row, p_k_coefficient, 4 * K_A + tl.arange(0, 4 * K_B))
            b_largest = tl.maximum(b_largest, tl.max(tl.abs(b_query_b), 1))
        b_largest = tl.where(b_largest > 0, b_largest, 1.0)
        b_query = (b_query / b_largest[:, None]).to(tl.float16)
        if K_B > 0:
            b_query_b = (b_query_b / b_largest[:, None]).to(tl.float16)
        if BIASED:
            o_bias = ((i_b * h + i_h) * q + o_row).to(tl.int64) * n + o_frame
            b_bias = tl.load(p_bias + o_bias, mask=m_row, other=0.0)

        block_begin = block * tiles_per_block
        for tile in range(tl.maximum(begin, block_begin), tl.minimum(end, block_begin + tiles_per_block)):
            o_place = (tile - block_begin) * TILE + tl.arange(0, TILE)
            o_token = block * block_tokens - first_offset + o_place
            m_token = (o_place < block_tokens) & (o_token >= 0) & (o_token < t)

            if AHEAD > 0:
                token = block * block_tokens - first_offset + (tile - block_begin + AHEAD) * TILE
                _fetch(p_k_codes, s_k_plane, p_k_plane, o_k_a, token, t)
                _fetch(p_v_codes, s_v_plane, p_v_plane, o_v_a, token, t)
                if K_B > 0:
                    _fetch(p_k_codes, s_k_plane, p_k_plane, K_A + tl.arange(0, K_B), token, t)
                if V_B > 0:
                    _fetch(p_v_codes, s_v_plane, p_v_plane, V_A + tl.arange(0, V_B), token, t)

            b_bits = _look_up(p_k_codes, s_k_plane, p_k_bits, p_k_plane, o_k_a, o_token, m_token)
            b_scores = tl.dot(b_query, _entries(b_bits, K_A, TILE))
            if K_B > 0:
                o_k_b = K_A + tl.arange(0, K_B)
                b_bits = _look_up(p_k_codes, s_k_plane, p_k_bits, p_k_plane, o_k_b, o_token, m_token)
                b_scores = tl.dot(b_query_b, _entries(b_bits, K_B, TILE), b_scores)
            b_scores *= (b_largest * k_scale)[:, None]
            if K_GAIN > 0:
                b_scores *= _gain(p_k_gain, p_k_levels, o_token, m_token, K_GAIN)[None, :]
            if BIASED:
                b_scores += b_bias[:, None]
            if OFFSET_BIASED:
                o_offset = (((i_b * h + i_h) * q + o_row).to(tl.int64) * n + o_frame) * block_tokens
                m_bias = m_row[:, None] & m_token[None, :]
                b_scores += tl.load(p_offset_bias + o_offset[:, None] + o_place[None, :], mask=m_bias, other=0.0)
            b_scores *= scale
            if CAPPED:
                b_scores = softcap * (2 * tl.sigmoid(2 * b_scores / softcap) - 1)
            m_seen = m_row[:, None] & m_token[None, :]
            if MASKED:
                b_scores += tl.load(p_mask + i_b.to(tl.int64) * t + o_token, mask=m_token, other=0.0)[None, :]
            if FIRST:
                m_seen = m_seen & (o_token[None, :] >= b_first[:, None])
            b_scores = tl.where(m_seen, b_scores, float("-inf"))

            b_new_peak = tl.maximum(b_peak, tl.max(b_scores, 1))
            b_origin = tl.where(b_new_peak == float("-inf"), 0.0, b_new_peak)
            b_weights = tl.exp2((b_scores - b_origin[:, None]) * LOG2_E)
            b_shrink = tl.exp2((b_peak - b_origin) * LOG2_E)
            b_peak = b_new_peak
            b_sum = b_sum * b_shrink + tl.sum(b_weights, 1)

            if V_GAIN > 0:
                b_gain = _gain(p_v_gain, p_v_levels, o_token, m_token, V_GAIN)
                new_level = tl.maximum(level, tl.max(tl.abs(b_gain), 0))
                b_weights *= (b_gain / new_level)[None, :]
                b_shrink *= level / new_level
                level = new_level
            b_weights = (b_weights * WEIGHT_SCALE).to(tl.float16)
            b_bits = _look_up(p_v_codes, s_v_plane, p_v_bits, p_v_plane, o_v_a, o_token, m_token)
            b_mean = tl.dot(b_weights, tl.trans(_entries(b_bits, V_A, TILE)), b_mean * b_shrink[:, None])
            if V_B > 0:
                o_v_b = V_A + tl.arange(0, V_B)
                b_bits = _look_up(p_v_codes, s_v_plane, p_v_bits, p_v_plane, o_v_b, o_token, m_token)
                b_mean_b = tl.dot(b_weights, tl.trans(_entries(b_bits, V_B, TILE)), b_mean_b * b_shrink[:, None])

    o_out = ((i_split * tl.num_programs(1) + i_b).to(tl.int64) * h + i_h) * q + o_row
    b_log_sum = tl.where(b_sum > 0, b_peak + tl.log(tl.where(b_sum > 0, b_sum, 1.0)), float("-inf"))
    tl.store(p_log_sum + o_out, b_log_sum, mask=m_row)
    b_factor = v_scale / WEIGHT_SCALE / tl.where(b_sum > 0, b_sum, 1.0)
    if V_GAIN > 0:
        b_factor *= level
    p_out = p_mean + o_out[:, None] * (4 * (V_A + V_B)) + tl.arange(0, 4 * V_A)[None, :]
    tl.store(p_out, b_mean * b_factor[:, None], mask=m_row[:, None])
    if V_B > 0:
        p_out = p_mean + o_out[:, None] * (4 * (V_A + V_B)) + (4 * V_A + tl.arange(0, 4 * V_B))[None, :]
        tl.store(p_out, b_mean_b * b_factor[:, None], mask=m_row[:, None])


@triton.jit(do_not_specialize=["n_splits"])
def merge(
    p_means, p_log_sums, p_term_column, p_mean, p_log_sum, h, q, c, n_rows, n_splits, n_columns,
    N_TERMS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Splits of one query row become one: their columns, summed into coefficients. Grid: row, group of coefficients."""
    i_row = tl.program_id(0)
    i_h = i_row // q % h
    o_split, o_c = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_split, m_c = o_split < n_splits, o_c < c
    b_log_sums = tl.load(p_log_sums + o_split * n_rows + i_row, mask=m_split, other=float("-inf"))
    peak = tl.max(b_log_sums, 0)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    b_weights = tl.exp(b_log_sums - origin)
    total = tl.sum(b_weights, 0)
    p_rows = p_means + (o_split.to(tl.int64) * n_rows + i_row) * n_columns
    b_mean = tl.zeros([COLUMNS], tl.float32)
    for term in tl.static_range(N_TERMS):
        b_column = tl.load(p_term_column + (i_h * N_TERMS + term) * c + o_c, mask=m_c, other=-1)
        m_read = m_split[:, None] & (b_column >= 0)[None, :]
        b_part = tl.load(p_rows[:, None] + b_column[None, :], mask=m_read, other=0.0)
        b_mean += tl.sum(b_part * b_weights[:, None], 0)
    b_mean = b_mean / tl.where(total > 0, total, 1.0)
    tl.store(p_mean + i_row.to(tl.int64) * c + o_c, b_mean, mask=m_c)
    if tl.program_id(1) == 0:
        tl.store(
            p_log_sum + i_row, tl.where(total > 0, origin + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
        )
