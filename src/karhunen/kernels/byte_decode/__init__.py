"""Coefficients of coded tokens: for each plane the entry that its byte names.

`naive.py` is the definition, `cpu.py` the same for Numba: one addition per coefficient and plane, in the order of the
planes, so both give the same numbers. Paths are named and chosen as in `byte_attention`.
"""

import importlib
import importlib.util
from types import ModuleType

from jaxtyping import Float, UInt8
from torch import Tensor

from karhunen.kernels.byte_tables import ByteTables

PATHS = ("naive", "cpu")

__all__ = ["PATHS", "available", "byte_decode"]


def available(path: str) -> tuple[bool, str]:
    """Whether a path can run on this machine, and what it found or misses."""
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    if path == "cpu" and importlib.util.find_spec("numba") is None:
        return False, "numba is not installed"
    return True, "plain torch" if path == "naive" else "Numba"


def byte_decode(codes: UInt8[Tensor, "b s t"], tables: ByteTables, *, path: str) -> Float[Tensor, "b h t c"]:
    """Σ over planes of the named entries, float32, by the named path."""
    runs, reason = available(path)
    if not runs:
        raise RuntimeError(f"path={path!r} cannot run here: {reason}; path='naive' runs anywhere")
    if codes.shape[1] != tables.n_planes:
        raise ValueError(f"codes have {codes.shape[1]} planes; the tables want {tables.n_planes}")
    return _module(path).byte_decode(codes, tables)


def _module(path: str) -> ModuleType:
    return importlib.import_module(f"karhunen.kernels.byte_decode.{path}")
