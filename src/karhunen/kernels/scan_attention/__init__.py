"""Attention read from bytes that are looked up as int8, frames of the query included: one call for a layer's step.

| path | file | where |
|---|---|---|
| `naive` | naive.py | any device, any float dtype: the definition |
| `cpu` | cpu.py | Numba on x86 (AVX2, AVX-512) and ARM (NEON) |
| `gpu` | gpu.py | Triton on CUDA |
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.byte_attention.inputs import CodedTokens
from karhunen.kernels.scan_attention.frames import Frames
from karhunen.kernels.scan_attention.layers import Layers
from karhunen.kernels.softmax import Partial

__all__ = ["PATHS", "CodedTokens", "Frames", "Layers", "available", "scan_attention"]

PATHS = ("naive", "cpu", "gpu")


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("scan_attention", path)


def scan_attention(
    query: Float[Tensor, "b h r d"],
    keys: CodedTokens,
    values: CodedTokens,
    frames: Frames,
    *,
    path: str,
    first_position: int = 0,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Float[Tensor, "b t"] | Bool[Tensor, "b t"] | None = None,
    hidden: tuple[Int[Tensor, " n"], Int[Tensor, " n"]] | None = None,
    layers: Layers | None = None,
) -> Partial:
    """Attention of `r` query rows per KV head to all coded tokens, by the named path; in value coefficients.

    Token n stands at position first_position + n. `mask` is added to the scores, or true where a token is seen;
    `hidden` names (row of the batch, token) pairs that nobody sees; `layers` add to the coefficients of some, which
    path `gpu` does not read. ValueError unless the shapes belong together.
    """
    return paths.require("scan_attention", path).scan_attention(
        query, keys, values, frames,
        first_position=first_position, scale=scale, softcap=softcap, mask=mask, hidden=hidden, layers=layers,
    )  # fmt: skip
