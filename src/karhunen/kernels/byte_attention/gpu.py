"""Attention from bytes on a GPU: frames of queries are given; the rest is karhunen.kernels.split_attention.

Measured speed: none yet; the programs are held against `naive.py` under Triton's interpreter.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_attention.inputs import CodedTokens, require_agreement
from karhunen.kernels.entry_quads import EntryQuads, entry_quads
from karhunen.kernels.softmax import Partial
from karhunen.kernels.split_attention.arguments import Extent, Queries, Terms, aligned, seen, shape_of, side_of
from karhunen.kernels.split_attention.launch import Launch, Problem, nothing, split_attention

available = triton_launch.available

TOLERANCE = 4e-3
"""Of the largest mean or log-sum, against naive in float64: queries and weights are rounded to float16 (2^-11 of each),
sums are float32; a score of order 5 is then off by about 1e-3, and a weight by as much of itself."""


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
    n_splits: int | None = None,
    launch: Launch | None = None,
) -> Partial:
    """As `naive.byte_attention`, in float32 from float16 operands; ValueError unless all tensors lie on one GPU.

    `n_splits`: token ranges per row (see `token_splits`); `launch`: timed over LAUNCHES if None.
    """
    require_agreement(q_frames, keys, values, key_bias, offset_bias, block_tokens, first_offset, mask, first_visible)
    triton_launch.require_gpu(
        q_frames, keys.codes, keys.gain, values.codes, values.gain, key_bias, offset_bias, mask, first_visible
    )  # fmt: skip
    b, h, q, n, _ = q_frames.shape
    t, device, c_value = keys.n_tokens, q_frames.device, values.tables.n_coefficients
    if not b * h * q * t:
        return nothing(b, h, q, c_value, device)
    (key, key_kind), (value, value_kind) = side_of(keys, device), side_of(values, device)
    queries = _in_columns(q_frames, entry_quads(keys.tables, device), scale)
    bias, bias_kind = _bias(key_bias, offset_bias if block_tokens is not None else None, scale)
    queries = queries if bias is None else queries._replace(bias=bias)
    shape = shape_of(q, block_tokens)
    first_offset = 0 if block_tokens is None else first_offset
    read, mask_kind = seen(mask, first_visible, queries.size)
    terms = Terms(
        bias_kind, mask_kind, first_visible is not None, softcap is not None, aligned((key, value), shape, first_offset)
    )
    extent = Extent(h, q, t, n, 1, first_offset, float(softcap or 1.0))
    problem = Problem(queries, key, value, read, extent, key_kind, value_kind, shape, terms)
    return split_attention(problem, entry_quads(values.tables, device), c_value, n_splits, launch)


def _in_columns(frames: Float[Tensor, "b h q n c"], quads: EntryQuads, scale: float) -> Queries:
    """Frames as the program multiplies them: in the order of the quads, divided by the largest of a row."""
    b, h, q, n, _ = frames.shape
    index = quads.coefficient.long()[None, :, None, None].expand(b, h, n, q, -1)
    columns = frames.float().transpose(2, 3).gather(-1, index) * quads.scale[:, None, None]
    size = columns.abs().amax((2, 4)).clamp_min(torch.finfo(torch.float32).tiny)
    columns = (columns / size[:, :, None, :, None]).half()
    return Queries(columns.contiguous(), size * scale, size, size)


def _bias(
    key_bias: Float[Tensor, "b h q n"] | None, offset_bias: Float[Tensor, "b h q n k"] | None, scale: float
) -> tuple[Tensor | None, int]:
    """Both as one, [b h n q k], and how many there are of a block: none, one, or one for each token."""
    if offset_bias is None:
        if key_bias is None:
            return None, 0
        return (key_bias.float() * scale).transpose(2, 3).contiguous(), 1
    both = offset_bias.float() if key_bias is None else offset_bias.float() + key_bias.float()[..., None]
    return (both * scale).transpose(2, 3).contiguous(), 2
