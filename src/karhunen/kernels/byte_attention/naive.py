"""The definition of attention from bytes: decode, then softmax.

    κ̂_n = gain_n · Σ_j table_j[code_j,n]
    s_n = cap(scale · (⟨q′_block(n), κ̂_n⟩ + bias_block(n) + bias_block(n),offset(n))) + mask_n
    mean = Σ_n softmax(s)_n · ν̂_n                 log_sum = log Σ_n e^s_n,    cap(s) = c · tanh(s / c)

q′ is the query with rotation and inverse key transform folded in, one per block of `block_tokens` tokens; the value's
inverse transform is applied to the mean by the caller (design: the read path knows bytes, tables and gains).
Computed in the dtype of `q_frames`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens, require_agreement
from karhunen.kernels.softmax import INVISIBLE, Partial, attended, capped


def byte_attention(
    q_frames: Float[Tensor, "b h q n c"],
    keys: CodedTokens,
    values: CodedTokens,
    *,
    key_bias: Float[Tensor, "b h q n"] | None = None,
    offset_bias: Float[Tensor, "b h q n k"] | None = None,
    block_tokens: int | None = None,
    first_offset: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    first_visible: Int[Tensor, "b q"] | None = None,
) -> Partial:
    """Attention of `q` query rows per KV head to all coded tokens, in value coefficients.

    Token n lies in block (n + first_offset) // block_tokens; None: one frame for all. Row i sees tokens from
    first_visible[:, i] on. `offset_bias` is of a block's tokens, what a
    centered frame took away. `mask` is added to the scores, or true where a token is seen.
    """
    require_agreement(q_frames, keys, values, key_bias, offset_bias, block_tokens, first_offset, mask, first_visible)
    k, v = (decoded(side, q_frames.dtype) for side in (keys, values))
    return of_coefficients(
        q_frames, k, v, key_bias=key_bias, offset_bias=offset_bias, block_tokens=block_tokens,
        first_offset=first_offset, scale=scale, softcap=softcap, mask=mask, first_visible=first_visible,
    )  # fmt: skip


def of_coefficients(
    q_frames: Float[Tensor, "b h q n c"],
    keys: Float[Tensor, "b h t c"],
    values: Float[Tensor, "b h t e"],
    *,
    key_bias: Float[Tensor, "b h q n"] | None = None,
    offset_bias: Float[Tensor, "b h q n k"] | None = None,
    block_tokens: int | None = None,
    first_offset: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    first_visible: Int[Tensor, "b q"] | None = None,
) -> Partial:
    """As `byte_attention`, from coefficients that are there already."""
    t, dtype = keys.shape[2], q_frames.dtype
    token = torch.arange(t, device=q_frames.device)
    block = torch.zeros_like(token) if block_tokens is None else (token + first_offset) // block_tokens

    scores = torch.einsum("bhqtc,bhtc->bhqt", q_frames[:, :, :, block], keys)
    if key_bias is not None:
        scores = scores + key_bias.to(dtype)[..., block]
    if offset_bias is not None and block_tokens is not None:
        scores = scores + offset_bias.to(dtype)[..., block, (token + first_offset) % block_tokens]
    scores = capped(scores * scale, softcap)
    if mask is not None:
        scores = scores + additive(mask, dtype)[:, None, None]
    if first_visible is not None:
        scores = scores.masked_fill(token < first_visible[:, None, :, None], -torch.inf)

    return attended(scores, values)


def decoded(side: CodedTokens, dtype: torch.dtype) -> Float[Tensor, "b h t c"]:
    """Coefficients of every token: gain times the sum of its entries."""
    tables, (b, _, t) = side.tables, side.codes.shape
    coefficients = torch.zeros(b, tables.n_heads, t, tables.n_coefficients, dtype=dtype, device=side.codes.device)
    for head in range(tables.n_heads):
        for j in range(tables.plane_start[head], tables.plane_start[head + 1]):
            entries, index = tables.plane(j)
            coefficients[:, head].index_add_(-1, index, entries.to(dtype)[side.codes[:, j].long()])
    gain = gains(side, dtype)
    return coefficients if gain is None else coefficients * gain[..., None]


def gains(side: CodedTokens, dtype: torch.dtype) -> Float[Tensor, "b h t"] | None:
    """The gain of every token, or None if all are 1."""
    if side.gain is None:
        return None
    if side.gain_levels is None:
        return side.gain.to(dtype)
    return side.gain_levels.to(dtype)[side.gain.long()]


def additive(mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"], dtype: torch.dtype) -> Float[Tensor, "b t"]:
    """The mask as a term of the scores: -inf where a token is hidden."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask.to(dtype).masked_fill(mask <= INVISIBLE, -torch.inf)
