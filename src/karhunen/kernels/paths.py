"""Which implementations of an op can run here: asked once for each process, since kernels are called for every layer.

An op is a folder of `naive.py` (the definition, plain torch) and compiled twins of the same signature.
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

PATHS = ("naive", "cpu")


@cache
def available(op: str, path: str) -> tuple[bool, str]:
    """Whether a path of `op` (a folder of karhunen.kernels) can run on this machine, and what it found or misses.

    ValueError on an unknown path.
    """
    if path not in PATHS:
        raise ValueError(f"path={path!r} is unknown; choose one of {PATHS}")
    if path == "naive":
        return True, "plain torch"
    if importlib.util.find_spec("numba") is None:
        return False, "numba is not installed"
    return implementation(op, path).available()


def require(op: str, path: str) -> ModuleType:
    """The implementation of `op` on that path; RuntimeError with the reason if it cannot run here."""
    runs, reason = available(op, path)
    if not runs:
        raise RuntimeError(f"path={path!r} cannot run here: {reason}; path='naive' runs anywhere")
    return implementation(op, path)


def implementation(op: str, path: str) -> ModuleType:
    """The module `karhunen.kernels.op.path`."""
    return importlib.import_module(f"karhunen.kernels.{op}.{path}")
