"""The scan on a GPU: frames of the query made by one launch (gpu_frames.py), then split attention.

    query ─ turned, times the maps ─▶ frames float16, biases float32 ─▶ ranges of tokens ─▶ merged

No number is read back from the device: lengths and positions are the host's. Frames and biases of blocks of 64 tokens
take a third of the bytes of keys of 32 and values of 32, and are read while the second-level cache holds them.
Measured speed: none yet; the programs are held against `naive.py` under Triton's interpreter.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import triton_launch
from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.entry_quads import entry_quads
from karhunen.kernels.scan_attention.frames import Frames, require_agreement
from karhunen.kernels.scan_attention.gpu_frames import plan_queries
from karhunen.kernels.scan_attention.layers import Layers
from karhunen.kernels.softmax import Partial
from karhunen.kernels.split_attention import arguments
from karhunen.kernels.split_attention.folding import fold_call
from karhunen.kernels.split_attention.launch import Launch, Problem, nothing, plan
from karhunen.kernels.triton_launch import Call

available = triton_launch.available

TOLERANCE = 4e-3
"""Of the largest mean or log-sum, against naive in float64: queries, maps and weights are rounded to float16 (2^-11
of each), entries are exact, sums are float32; a score of order 5 is then off by 1e-3, a weight by as much of itself."""


def scan_attention(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    *,
    first_position: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    layers: Layers | None = None,
    n_splits: int | None = None,
    launch: Launch | None = None,
    folded: bool = False,
) -> Partial:
    """As `naive.scan_attention`, in float32 from float16 operands; ValueError unless all tensors lie on one GPU.

    `n_splits`: token ranges per row (see `token_splits`); `launch`: timed over LAUNCHES if None; `folded`: scores from
    key tables that the query is folded into, ValueError unless these are sums of two look-ups of 16.
    """
    require_agreement(query, keys, values, frames, mask)
    if layers is not None:
        raise ValueError("no GPU kernel reads layers of refinement; hide the tokens that have them and read them apart")
    triton_launch.require_gpu(query, keys.codes, keys.gain, values.codes, values.gain, mask, *(hidden or ()))
    b, h, r, _ = query.shape
    if not b * h * r * keys.n_tokens:
        return nothing(b, h, r, values.tables.n_coefficients, query.device)
    found, calls = planned(
        query, keys, values, frames, first_position=first_position, scale=scale, softcap=softcap,
        mask=_with_hidden(mask, hidden, query, keys.n_tokens), n_splits=n_splits, launch=launch,
        folded=folded,
    )  # fmt: skip
    for call in calls:
        call.launch()
    return Partial(found.mean.view(b, h, r, -1), found.log_sum.view(b, h, r))


def planned(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    *,
    first_position: int,
    scale: float,
    softcap: float | None = None,
    mask: Tensor | None = None,
    n_splits: int | None = None,
    launch: Launch | None = None,
    folded: bool = False,
) -> tuple[Partial, tuple[Call, ...]]:
    """Where the result will be, and the launches that make it."""
    t, block, device = keys.n_tokens, frames.block_tokens, query.device
    first_block = 0 if block is None else first_position // block
    n_blocks = 1 if block is None else (first_position + t - 1) // block - first_block + 1
    first_offset = 0 if block is None else first_position - first_block * block
    queries, bias, make_queries = plan_queries(query, frames, keys.tables, first_block, n_blocks, scale, folded)
    (key, key_kind), (value, value_kind) = (arguments.side_of(side, device) for side in (keys, values))
    groups, rows = queries.size.shape[1:]
    shape = arguments.shape_of(rows, block, folded)
    seen, mask_kind = arguments.seen(mask, None, queries.size)
    together = arguments.aligned((key, value), shape, first_offset)
    problem = Problem(
        queries, key, value, seen,
        arguments.Extent(groups, rows, t, n_blocks, 1, first_offset, float(softcap or 1.0)),
        key_kind, value_kind, shape,
        arguments.Terms(bias, mask_kind, False, softcap is not None, together),
    )  # fmt: skip
    quads = entry_quads(values.tables, device)
    found, calls = plan(problem, quads, values.tables.n_coefficients, n_splits, launch)
    folding = (fold_call(queries, key, key_kind, problem.extent, shape),) if folded else ()
    return found, (make_queries, *folding, *calls)


def _with_hidden(
    mask: Tensor | None, hidden: tuple[Tensor, Tensor] | None, query: Tensor, n_tokens: int
) -> Tensor | None:
    """The mask, named tokens hidden in a copy."""
    if hidden is None or not len(hidden[0]):
        return mask
    shape = (len(query), n_tokens)
    mask = torch.ones(shape, dtype=torch.bool, device=query.device) if mask is None else mask.clone()
    mask[hidden[0].long(), hidden[1].long()] = False if mask.dtype == torch.bool else -torch.inf
    return mask
