"""Coefficients of coded tokens: for each plane the entry that its byte names.

`naive.py` is the definition, `cpu.py` the same for Numba, `gpu.py` for Triton: one addition per coefficient and plane,
in the order of the planes, so all give the same numbers. Paths are named and chosen as in `byte_attention`.
"""

from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.paths import PATHS

__all__ = ["PATHS", "available", "byte_decode"]


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("byte_decode", path)


def byte_decode(codes: UInt8[Tensor, "b s t"], tables: ByteTables, *, path: str) -> Float[Tensor, "b h t c"]:
    """Σ over planes of the named entries, float32, by the named path."""
    if codes.shape[1] != tables.n_planes:
        raise ValueError(f"codes have {codes.shape[1]} planes; the tables want {tables.n_planes}")
    return paths.require("byte_decode", path).byte_decode(codes, tables)
