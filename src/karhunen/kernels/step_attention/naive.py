"""The definition: the scan's, then that of exact attention with what the scan gave."""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.exact_attention import CodedPart
from karhunen.kernels.exact_attention import naive as exact
from karhunen.kernels.scan_attention import naive as scan
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.layers import Layers
from karhunen.kernels.softmax import Partial


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
) -> Partial:
    """In the dtype of `query`."""
    coded = scan.scan_attention(
        query, keys, values, frames, first_position=first_position, scale=scale, hidden=hidden, layers=layers
    )
    return exact.exact_attention(query, pieces, CodedPart(coded, matrix, offset), scale=scale)
