"""The bytes of new tokens: for each plane the nearest of its 256 entries.

`naive.py` is the definition, `cpu.py` the same for Numba, `gpu.py` for Triton; the same coefficients give the same
bytes in all, so a cache does not depend on the machine. Paths are named and chosen as in `byte_attention`.
"""

from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels import paths
from karhunen.kernels.byte_tables import ByteTables
from karhunen.kernels.paths import PATHS

__all__ = ["PATHS", "available", "byte_encode"]


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses; ValueError on an unknown path."""
    return paths.available("byte_encode", path)


def byte_encode(coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, path: str) -> UInt8[Tensor, "b s t"]:
    """One byte per plane and token, by the named path."""
    return paths.require("byte_encode", path).byte_encode(coefficients, tables)
