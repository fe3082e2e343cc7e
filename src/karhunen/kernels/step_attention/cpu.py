"""A decode step on a CPU: the scan writes its partials where the kernel of exact tokens merges them."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.exact_attention import cpu as exact
from karhunen.kernels.scan_attention import cpu as scan
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.layers import Layers
from karhunen.kernels.softmax import Partial

TOLERANCE = scan.TOLERANCE

available = scan.available


def step_attention(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    matrix: Float[Tensor, "h c e"],
    offset: Float[Tensor, "h e"],
    *,
    first_position: int = 0,
    scale: float = 1.0,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    layers: Layers | None = None,
    n_threads: int | None = None,
) -> Partial:
    """As `naive.step_attention`, in float32. `n_threads`: torch's own number if None."""
    b, h, r, _ = query.shape
    work = scan.Work.of(b, h, r, keys.n_tokens, n_threads or torch.get_num_threads())
    n_rows, c = work.n_splits * b * h * r, values.tables.n_coefficients
    mean = _memory(n_rows * (c + 1))
    parts = exact.Parts(mean, mean + 4 * n_rows * c, work.n_splits, c)
    scan.scan(
        query, keys, values, frames, work, parts.mean, parts.log_sum, first_position=first_position, scale=scale,
        hidden=hidden, layers=layers,
    )  # fmt: skip
    return exact.attend(query, pieces, parts, matrix, offset, scale=scale)


def _memory(n: int) -> int:
    """Where the calling thread keeps `n` floats."""
    held: tuple[np.ndarray, int] | None = getattr(_kept, "memory", None)
    if held is None or len(held[0]) < n:
        made = np.empty(n, np.float32)
        held = _kept.memory = made, made.ctypes.data
    return held[1]


_kept = threading.local()
