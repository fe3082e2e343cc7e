"""What the CPU kernel of attention from bytes is handed: where everything lies, in arrays and addresses."""

import threading
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.quads import Quads, quads_of

SPAN = 512
"""Tokens of one softmax step: their scores of 8 rows take 16 KiB, half of a common first-level cache."""

NO_GAIN, FLOAT_GAIN, HALF_GAIN, LEVEL_GAIN = range(4)


class Problem(NamedTuple):
    """Sizes and terms of one call; an empty array is a term that is not there."""

    h: int
    q: int
    t: int
    n: int
    c: int
    c_value: int
    n_chunks: int
    n_splits: int
    block_tokens: int  # 0: one frame for all tokens
    first_offset: int
    scale: float
    softcap: float  # 0: none
    q_frames: np.ndarray  # a row per query row and block, `q_frame_stride` apart, in the order of the quads
    q_frame_stride: int
    key_bias: np.ndarray
    offset_bias: np.ndarray  # [b, h, block, offset, row]
    offset_bias_rows: int
    mask: np.ndarray
    first_visible: np.ndarray


class Side(NamedTuple):
    """Where one side's bytes lie; strides in bytes, so one compilation serves every slice of a buffer."""

    codes: int
    batch_stride: int
    plane_stride: int
    gain_kind: int
    gain: int
    gain_batch_stride: int
    gain_head_stride: int
    gain_levels: np.ndarray
    tables: Quads


class Scratch(NamedTuple):
    """One worker's memory, made by the caller and filled by the kernel: no compiled code allocates."""

    query: np.ndarray  # q' of one block, [quad][4][eight lanes]
    folded: np.ndarray  # [plane][256][row]
    histogram: np.ndarray  # [plane][256][row]
    sums: np.ndarray  # [quad][4][row]
    scores: np.ndarray  # [token of a span][row], then weights
    gains: np.ndarray  # [token of a span]
    bias: np.ndarray  # eight lanes, lane k of row k % n_rows; so the next two
    reference: np.ndarray
    largest: np.ndarray
    lanes: np.ndarray  # of up to four vectors
    total: np.ndarray  # [row], float64


def scratch_of(n_rows: int, keys: Quads, values: Quads) -> Scratch:
    """This thread's memory, which grows to what the largest call has asked for."""
    sizes = (
        keys.most_quads * 32,
        keys.most_planes * 256 * n_rows,
        values.most_planes * 256 * n_rows,
        values.most_quads * 4 * n_rows,
        (SPAN + 8) * 8 + 8,
        SPAN + 8,
        *[8] * 3,
        32,
    )
    kept: tuple[int, ...] = getattr(_kept, "sizes", (0,) * len(sizes))
    if any(size > held for size, held in zip(sizes, kept, strict=True)):
        _kept.sizes = tuple(map(max, sizes, kept))
        _kept.scratch = Scratch(*(np.empty(size, np.float32) for size in _kept.sizes), np.empty(8))
    return _kept.scratch


_kept = threading.local()


def side_of(side: CodedTokens) -> Side:
    """ValueError where neighbouring tokens are not neighbours in memory, TypeError on gains of another dtype."""
    codes, gain = side.codes, side.gain
    for name, tensor in (("codes", codes), ("gain", gain)):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} have stride {tensor.stride(-1)} along the token axis; neighbours are wanted")
    kinds = {None: NO_GAIN, torch.float32: FLOAT_GAIN, torch.float16: HALF_GAIN, torch.uint8: LEVEL_GAIN}
    kind = kinds.get(None if gain is None else gain.dtype)
    if kind is None:
        raise TypeError(
            f"gains are {gain.dtype if gain is not None else None}; float16, float32 or bytes with levels are read"
        )
    size = 0 if gain is None else gain.element_size()
    return Side(
        codes=codes.data_ptr(),
        batch_stride=codes.stride(0),
        plane_stride=codes.stride(1),
        gain_kind=kind,
        gain=0 if gain is None else gain.data_ptr(),
        gain_batch_stride=0 if gain is None else gain.stride(0) * size,
        gain_head_stride=0 if gain is None else gain.stride(1) * size,
        gain_levels=NOTHING if side.gain_levels is None else flat(side.gain_levels),
        tables=quads_of(side.tables),
    )


def frames_of(q_frames: Float[Tensor, "b h q n c"], tables: ByteTables) -> tuple[np.ndarray, int]:
    """Frames in the order of the quads' columns, and their distance; a copy only where the order differs."""
    quads = quads_of(tables)
    if not quads.in_order:
        made = q_frames.new_zeros(*q_frames.shape[:-1], 4 * quads.most_quads)
        for head, (start, stop) in enumerate(pairwise((4 * quads.head_quads).tolist())):
            index = torch.from_numpy(quads.coefficient[start:stop])
            made[:, head, ..., : stop - start] = q_frames[:, head].index_select(-1, index)
        q_frames = made
    return vectors_of(q_frames)


def vectors_of(tensor: Float[Tensor, "*n c"]) -> tuple[np.ndarray, int]:
    """All vectors of the last axis and their distance in floats; a copy only where that is not one number."""
    tensor = tensor.detach().float()
    n, width, stride = tensor[..., 0].numel(), tensor.shape[-1], tensor.stride(-2)
    steps = [size * step for size, step in zip(tensor.shape[1:-1], tensor.stride()[1:-1], strict=True)]
    if tensor.stride(-1) != 1 or list(tensor.stride()[:-2]) != steps:
        tensor, stride = tensor.contiguous(), width
    return tensor.as_strided(((n - 1) * stride + width,), (1,)).numpy(), stride


def row_vectors_of(bias: Float[Tensor, "b h q n k"], n_rows: int) -> tuple[np.ndarray, int]:
    """The rows of each (block, offset) side by side, a multiple of `n_rows` of them; a copy only where they are not."""
    bias = bias.detach().float()
    b, h, q, n, k = bias.shape
    width = bias.stride(4)
    whole = [h * n * k * width, n * k * width, 1, k * width, width]
    if list(bias.stride()) != whole or width % n_rows or width < q:
        width = -(-q // n_rows) * n_rows
        made = bias.new_zeros(b, h, n, k, width)
        made[..., :q] = bias.permute(0, 1, 3, 4, 2)
        bias = made
    return bias.as_strided((b * h * n * k * width,), (1,)).numpy(), width


def flat(tensor: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Contiguous, in one axis."""
    return tensor.detach().to(dtype).contiguous().view(-1).numpy()


NOTHING = np.zeros(0, np.float32)
NO_INDICES = np.zeros(0, np.int64)
