"""From bytes to the operand of a tensor-core product: four tokens a word, four columns a look-up.

    words [quad word] ─ byte j ─▶ look-up [quad word] ─▶ 4 × float16 ─▶ [4·quad, 4·word]      j = 0 … 3

Lanes of a warp take neighbouring words of one quad, so their look-ups fall into one table: 64 bytes for a nibble, which
one access of the first-level cache serves whatever the lanes ask for; 1 KB for a whole byte of int8.
"""

import triton
import triton.language as tl

FLOAT16: tl.constexpr = tl.constexpr(0)  # kinds of entries: 64 bits of four float16,
DIGITS: tl.constexpr = tl.constexpr(1)  # four digits,
SUM: tl.constexpr = tl.constexpr(2)  # or the sum of two words of digits


@triton.jit
def plane_offsets(side, i_h, FIRST: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr):
    """How far each of N quads' planes lies behind the first plane of its row of the batch: below 2^31 bytes."""
    return tl.load(side.plane + i_h * (SIDE.quads_a + SIDE.quads_b) + FIRST + tl.arange(0, N)) * side.s_plane


@triton.jit
def entries(
    side, i_b, i_h, token, t, b_offset, FIRST: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Entries of the quads from FIRST on of one head, for TILE tokens from `token` on: float16 [4 · quad, token].

    Tokens outside 0 … t − 1 read any byte: their entries are finite, and they are given no weight.
    """
    QUADS: tl.constexpr = b_offset.shape[0]
    p_codes = side.codes + i_b.to(tl.int64) * side.s_batch
    o_table = i_h * (SIDE.quads_a + SIDE.quads_b) + FIRST + tl.arange(0, QUADS)
    if ALIGNED:
        b_word = _aligned_words(p_codes, b_offset, token, t, TILE // 4)
    else:
        b_word = _words(p_codes, b_offset, token, t, TILE // 4)
    b_0 = _columns(_look_up(side, o_table, b_word & 0xFF, SIDE), SIDE)
    b_1 = _columns(_look_up(side, o_table, (b_word >> 8) & 0xFF, SIDE), SIDE)
    b_2 = _columns(_look_up(side, o_table, (b_word >> 16) & 0xFF, SIDE), SIDE)
    b_3 = _columns(_look_up(side, o_table, (b_word >> 24) & 0xFF, SIDE), SIDE)
    b_four = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))  # [quad word 2 2 | 2 2]: columns, then bytes
    return tl.reshape(tl.permute(b_four, [0, 2, 3, 1, 4, 5]), [4 * QUADS, TILE])


@triton.jit
def _aligned_words(p_codes, b_offset, token, t, WORDS: tl.constexpr):
    """Words that begin with every fourth token, which lies at a multiple of four bytes: [quad, word]."""
    o_token = token + 4 * tl.arange(0, WORDS)
    p_word = (p_codes + (b_offset[:, None] + o_token[None, :])).to(tl.pointer_type(tl.int32))
    m_word = (o_token >= 0) & (o_token < t)
    return tl.load(p_word, mask=m_word[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _words(p_codes, b_offset, token, t, WORDS: tl.constexpr):
    """As `_aligned_words` from any address: each word is cut from two that lie at multiples of four bytes."""
    b_address = (p_codes + (b_offset + token)).to(tl.int64)
    b_skipped = (b_address & 3).to(tl.int32)
    p_word = (b_address & -4).to(tl.pointer_type(tl.int32))
    o_word = tl.arange(0, WORDS)
    o_token = token - b_skipped[:, None] + 4 * o_word[None, :]  # of a word's first byte
    p_words = p_word[:, None] + o_word[None, :]
    b_this = tl.load(p_words, mask=(o_token > -4) & (o_token < t), other=0)
    b_next = tl.load(p_words + 1, mask=(o_token > -8) & (o_token < t - 4), other=0)
    b_both = (b_next.to(tl.int64) << 32) | (b_this.to(tl.int64) & 0xFFFFFFFF)
    return (b_both >> (8 * b_skipped[:, None]).to(tl.int64)).to(tl.int32)


@triton.jit
def _look_up(side, o_table, b_byte, SIDE: tl.constexpr):
    """The word of columns that each byte names: [quad, word]."""
    o_table = o_table[:, None]
    if SIDE.entries == SUM:
        p_low = side.low + ((o_table << SIDE.low_bits) + (b_byte & ((1 << SIDE.low_bits) - 1)))
        p_high = side.high + ((o_table << SIDE.high_bits) + (b_byte >> (8 - SIDE.high_bits)))
        b_word = tl.load(p_low, eviction_policy="evict_last") + tl.load(p_high, eviction_policy="evict_last")
    else:
        b_word = tl.load(side.low + ((o_table << 8) + b_byte), eviction_policy="evict_last")
    return b_word


@triton.jit
def _columns(b_word, SIDE: tl.constexpr):
    """The four columns of each word: float16 [quad, word, 2, 2].

    Digit d is the float16 of bits 0x6400 + d less 1152: 1024 + d, exact, less 1024 and the 128 of a zero.
    """
    if SIDE.entries == FLOAT16:
        b_0, b_1 = _half(b_word), _half(b_word >> 16)
        b_2, b_3 = _half(b_word >> 32), _half(b_word >> 48)
    else:
        b_even = (b_word & 0x00FF00FF) | 0x64006400
        b_odd = ((b_word >> 8) & 0x00FF00FF) | 0x64006400
        b_0, b_1 = _half(b_even) - 1152.0, _half(b_odd) - 1152.0
        b_2, b_3 = _half(b_even >> 16) - 1152.0, _half(b_odd >> 16) - 1152.0
    return tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))


@triton.jit
def _half(b_word):
    """The float16 in the lowest bits."""
    return (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
