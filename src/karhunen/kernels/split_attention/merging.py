"""The ranges of one query row become one: weighted by their share of the softmax, columns summed into coefficients."""

# programs for Triton, whose types pyright cannot follow
# pyright: reportOperatorIssue=false
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n_splits"])
def merge(
    found, p_term_column, p_mean, p_log_sum, h, q, c, n_rows, n_splits, n_columns,
    N_TERMS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: row, group of COLUMNS coefficients. `p_term_column` names the columns of a coefficient, -1: none."""
    i_row = tl.program_id(0)
    i_h = i_row // q % h
    o_split, o_c = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_split, m_c = o_split < n_splits, o_c < c
    b_log_sums = tl.load(found.log_sum + o_split * n_rows + i_row, mask=m_split, other=float("-inf"))
    peak = tl.max(b_log_sums, 0)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    b_weights = tl.exp(b_log_sums - origin)
    total = tl.sum(b_weights, 0)
    p_rows = found.mean + (o_split.to(tl.int64) * n_rows + i_row) * n_columns
    b_mean = tl.zeros([COLUMNS], tl.float32)
    for term in tl.static_range(N_TERMS):  # pyright: ignore[reportGeneralTypeIssues]
        b_column = tl.load(p_term_column + (i_h * N_TERMS + term) * c + o_c, mask=m_c, other=-1)
        m_read = m_split[:, None] & (b_column >= 0)[None, :]
        b_part = tl.load(p_rows[:, None] + b_column[None, :], mask=m_read, other=0.0)
        b_mean += tl.sum(b_part * b_weights[:, None], 0)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(p_mean + i_row.to(tl.int64) * c + o_c, b_mean / divisor, mask=m_c)
    if tl.program_id(1) == 0:
        tl.store(p_log_sum + i_row, tl.where(total > 0, origin + tl.log(divisor), float("-inf")))
