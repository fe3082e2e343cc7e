"""Attention to exact tokens, merged with what the coded ones gave: the end of a decode step.

| path | file | where |
|---|---|---|
| `naive` | naive.py | any device, any float dtype: the definition |
| `cpu` | cpu.py | Numba on x86 (AVX2) and ARM: one call where torch takes thirty |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.softmax import Partial

__all__ = ["PATHS", "CodedPart", "available", "exact_attention"]

PATHS = ("naive", "cpu")


@final
@dataclass(frozen=True)
class CodedPart:
    """Attention to the coded tokens in value coefficients, and the map from them to vectors: x = y A + offset."""

    partial: Partial
    matrix: Float[Tensor, "h c e"]
    offset: Float[Tensor, "h e"]


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("exact_attention", path)


def exact_attention(
    query: Float[Tensor, "b h r d"],
    pieces: Sequence[tuple[Float[Tensor, "b h _ d"], Float[Tensor, "b h _ e"]]],
    coded: CodedPart | None,
    *,
    scale: float,
    path: str,
) -> Partial:
    """Every row attends to all tokens of all `pieces` and to the coded ones, under one softmax."""
    return paths.require("exact_attention", path).exact_attention(query, pieces, coded, scale=scale)
