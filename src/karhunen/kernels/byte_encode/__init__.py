"""The bytes of new tokens: for each plane the nearest of its 256 entries.

`naive.py` is the definition, `cpu.py` the same for Numba; the same coefficients give the same bytes in both, so a cache
does not depend on the machine's packages. Paths are named and chosen as in `byte_attention`.
"""

import importlib
import importlib.util

from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables

PATHS = ("naive", "cpu")

__all__ = ["PATHS", "available", "byte_encode"]


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    if path == "naive":
        return True, "plain torch"
    if importlib.util.find_spec("numba") is None:
        return False, "numba is not installed"
    return _module(path).available()


def byte_encode(coefficients: Float[Tensor, "b h t c"], tables: ByteTables, *, path: str) -> UInt8[Tensor, "b s t"]:
    """One byte per plane and token, by the named path."""
    runs, reason = available(path)
    if not runs:
        raise RuntimeError(f"path={path!r} cannot run here: {reason}; path='naive' runs anywhere")
    return _module(path).byte_encode(coefficients, tables)


def _module(path: str):
    return importlib.import_module(f"karhunen.kernels.byte_encode.{path}")
