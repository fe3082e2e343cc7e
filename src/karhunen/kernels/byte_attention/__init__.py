"""Attention read straight from bytes: no dense copy of keys or values is made.

| path | file | where |
|---|---|---|
| `naive` | naive.py | any device, any float dtype: the definition |
| `cpu` | cpu.py | Numba on x86 (AVX2) and ARM |
| `gpu` | gpu.py | Triton on CUDA |

All have one signature. `choose_path` says which one fits and why; nothing falls back unasked.
"""

from dataclasses import dataclass
from typing import final

from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.paths import PATHS
from karhunen.kernels.softmax import Partial

__all__ = [
    "PATHS",
    "CodedTokens",
    "PathChoice",
    "available",
    "byte_attention",
    "choose_path",
]


@final
@dataclass(frozen=True)
class PathChoice:
    """The path to read with, and why it and not a faster one."""

    path: str
    reason: str


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("byte_attention", path)


def choose_path(device_type: str) -> PathChoice:
    """The fastest path that can run on tensors of this device type."""
    return PathChoice(*paths.fastest("byte_attention", device_type))


def byte_attention(
    q_frames: Float[Tensor, "b h q n c"],
    keys: CodedTokens,
    values: CodedTokens,
    *,
    path: str,
    key_bias: Float[Tensor, "b h q n"] | None = None,
    offset_bias: Float[Tensor, "b h q n k"] | None = None,
    block_tokens: int | None = None,
    first_offset: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    first_visible: Int[Tensor, "b q"] | None = None,
) -> Partial:
    """Attention of `q` query rows per KV head to all coded tokens, by the named path (see `choose_path`)."""
    return paths.require("byte_attention", path).byte_attention(
        q_frames,
        keys,
        values,
        key_bias=key_bias,
        offset_bias=offset_bias,
        block_tokens=block_tokens,
        first_offset=first_offset,
        scale=scale,
        softcap=softcap,
        mask=mask,
        first_visible=first_visible,
    )
