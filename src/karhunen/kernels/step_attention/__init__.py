"""Attention of a decode step to all that a layer holds, coded and exact: one softmax, as vectors.

| path | file | where |
|---|---|---|
| `naive` | naive.py | any device, any float dtype: the definition |
| `cpu` | cpu.py | where the scan and the exact tokens have a kernel: what passes between them stays in its own memory |
"""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.layers import Layers
from karhunen.kernels.softmax import Partial

__all__ = ["PATHS", "available", "step_attention"]

PATHS = ("naive", "cpu")


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("step_attention", path)


def step_attention(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    matrix: Float[Tensor, "h c e"],
    offset: Float[Tensor, "h e"],
    *,
    path: str,
    first_position: int = 0,
    scale: float = 1.0,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    layers: Layers | None = None,
) -> Partial:
    """Every row attends to the coded tokens, whose values are y `matrix` + `offset` of their coefficients y, and to the
    exact ones of all `pieces`. Otherwise as `scan_attention`; ValueError as there."""
    return paths.require("step_attention", path).step_attention(
        query, keys, values, frames, pieces, matrix, offset, first_position=first_position, scale=scale, hidden=hidden,
        layers=layers,
    )  # fmt: skip
